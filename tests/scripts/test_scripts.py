"""The scripts as people run them, at their smallest."""

import os
import subprocess
import sys

import pytest
from commands import ENVIRONMENT, ROOT, Ended, run
from prompt_lines import parse_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards.engine import find_stockfish


def shown(done: Ended) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADING = """
import runpy, sys
from pathlib import Path
sys.path[0] = "scripts"
for script in sorted(Path("scripts").glob("*.py")):
    runpy.run_path(str(script), run_name="loaded")
"""


def test_every_script_finds_what_it_imports():
    """In a Python that has just been started; elsewhere scripts are forked."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING], cwd=ROOT,
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_demo_shows_before_and_after(tmp_path):
    arguments = ("--steps", 1, "--batch-size", 16, "--heldout", 8)
    done = run("scripts/demo.py", *arguments, cwd=tmp_path, traced=True)
    text = shown(done)
    assert "[transformers]" not in done.stderr  # a warning of theirs would be about our work
    assert "Held out, 16 prompts" in text and "the next state, exactly" in text
    assert "Sampled, " in text and "Greedy, " in text and "\x1b" not in text  # no control codes in a file
    (run_folder,) = (tmp_path / "runs").iterdir()
    assert str(run_folder.relative_to(tmp_path)) in text
    assert (run_folder / "checkpoints" / "step-000001" / "model.safetensors").exists()
    assert "Before and after" in (run_folder / "report.html").read_text()


def test_the_learning_curve_has_its_controls_and_keeps_what_is_done(tmp_path):
    little = ("--steps", 1, "--batch-size", 16, "--seeds", 1, "--heldout", 2, "--minutes", 0.03, "--games", 0)
    arguments = ("--output", tmp_path / "out", *little)
    text = shown(run("scripts/learning_curve.py", *arguments, cwd=tmp_path))
    assert "rate-0" in text and "supervised" in text and "Significantly below -2 points (greedy)" in text
    picture = tmp_path / "out" / "learning.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "out" / "seed-0-greedy.json").stat().st_mtime_ns
    shown(run("scripts/learning_curve.py", *arguments, cwd=tmp_path))
    assert (tmp_path / "out" / "seed-0-greedy.json").stat().st_mtime_ns == written


def test_positions_are_labelled_and_a_model_is_pretrained_on_them(tmp_path):
    if not find_stockfish():
        pytest.skip("needs Stockfish")
    lines = tmp_path / "policy.txt"
    arguments = ("--policy", 40, "--environment", 2, "--depth", 2, "--output", lines)
    shown(run("scripts/label_positions.py", *arguments, cwd=tmp_path))
    samples = [parse_line(line) for line in lines.read_text().splitlines()]
    assert len(samples) == 42
    only_policy = tmp_path / "only.txt"
    only_policy.write_text("\n".join(lines.read_text().splitlines()[:40]))
    arguments = (
        "--policy-lines", only_policy, "--output", tmp_path / "model",
        "--steps", 2, "--batch-tokens", 512, "--layers", 1, "--width", 64,
    )  # fmt: skip
    shown(run("scripts/pretrain_tiny.py", *arguments, cwd=tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.n_layer == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([0]) == "<|endoftext|>"


def test_the_benchmark_of_several_processes_says_how_it_is_started(tmp_path):
    done = run("scripts/benchmark_shard.py", "--help", cwd=tmp_path)
    assert done.returncode == 1 and "torchrun --nproc_per_node 2 scripts/benchmark_shard.py" in done.stderr
    assert "Traceback" not in done.stderr
