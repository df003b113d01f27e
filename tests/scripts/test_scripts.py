"""The scripts: that each can be started, and the demo. What they measure is `make proof`."""

import json
import runpy
from pathlib import Path

import proof
from commands import ROOT, run
from proof import ProofPart
from several_processes import in_processes


def load_all(rank: int) -> int:
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    for script in scripts:
        runpy.run_path(str(script), run_name="loaded")
    return len(scripts)


def test_every_script_finds_what_it_imports():
    (ended,) = in_processes(1, load_all)
    assert ended.error is None and ended.value > 5


def test_the_demo_shows_before_and_after_and_can_be_asked_to_improve(tmp_path: Path):
    """One step on few prompts cannot, by more than chance."""
    words = ("--steps", 1, "--batch-size", 16, "--heldout", 2, "--must-improve")
    done = run("scripts/demo.py", *words, cwd=tmp_path)
    text = done.stdout
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "[transformers]" not in done.stderr  # a warning of theirs would be about our work
    assert "Held out, 4 prompts" in text and "the next state, exactly" in text
    assert "Sampled, " in text and "Greedy, " in text and "\x1b" not in text  # no control codes in a file
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(folder.relative_to(tmp_path)) in text
    assert (folder / "checkpoints" / "step-000001" / "model.safetensors").exists()
    assert "Before and after" in (folder / "report.html").read_text()


def test_the_smallest_trainer_takes_a_step(tmp_path: Path):
    """A step on the model and the prompts that are there; a minute of it is for people."""
    done = run("scripts/minimal_grpo.py", "--seconds", 0.1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.startswith("step   1: reward 0.") and first.endswith(" tokens")
    assert last.startswith("reward of the first quarter of 1 steps 0.")


def test_the_check_of_a_card_runs_where_there_is_none(tmp_path: Path):
    """Its first parts, on a tiny model: minutes of a card are not for finding out that they do not."""
    file = tmp_path / "small.json"
    done = run("scripts/gpu_check.py", "--small", "--quick", "--output", file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [row["rows"]["learn"] for row in found["rows"]] == [8, 16]
    assert found["recorded steps"]["equal"] == 1.0


def test_the_proof_counts_what_passed_failed_and_was_left_out(tmp_path: Path, monkeypatch, capsys):
    parts = (
        ProofPart("good", 1, "sh -c 'touch {folder}/made'", "something"),
        ProofPart("bad", 1, "sh -c 'echo why; exit 3'", "something"),
        ProofPart("absent", 1, "sh -c 'exit 1'", "something", ("card", "no-such-program")),
        ProofPart("endless", 0.02, "sh -c 'sleep 60 & wait'", "something"),
    )
    monkeypatch.setattr(proof, "TOGETHER", parts[:2])
    monkeypatch.setattr(proof, "ALONE", parts[2:])
    assert proof.main(folder=tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "proof: 1 passed, 2 failed, 1 skipped (no card) in 0 min"
    assert "    why" in lines and any("exit status 3" in line for line in lines)
    assert any("no end within 0.02 minutes" in line for line in lines)
    assert proof.main(only=("good",), folder=tmp_path) == 0 and (tmp_path / "good" / "made").exists()
