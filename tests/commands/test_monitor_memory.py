"""`python monitor_memory.py`, run as people type it."""

import json
import re
import time

import pytest
from commands import fresh, run

from grpo.run.folder import LOCK_FILE

MONITOR = "monitor_memory.py"

LEAKY = """
import torch
kept = []

def leaky(prompts, completions, **columns):
    kept.append(torch.zeros(1 << 18))  # 1 MB a step that nobody asked for
    return [float(len(text)) for text in completions]
"""


def lines(steps, growth=0):
    """memory.jsonl and metrics.jsonl of a run on a card, `growth` bytes a step."""
    noise = [(step * 7919) % 1000 for step in range(steps + 1)]
    phases = ("sample", "score", "learn", "update")
    memory = [
        {
            "step": step, "phase": phase, "rows": 8, "retries": 0, "predicted_bytes": 2**30,
            "allocated_bytes": 2**29 + growth * step + noise[step], "reserved_bytes": 2**30 + growth * step,
            "peak_bytes": 2**29 + growth * step, "device_used_bytes": 2**30 + growth * step,
        }
        for step in range(1, steps + 1)
        for phase in phases
    ]  # fmt: skip
    metrics = [{"step": step, "num_tokens": 1000 * step} for step in range(1, steps + 1)]
    return memory, metrics


def write_run(folder, steps, growth=0):
    folder.mkdir()
    for name, records in zip(("memory", "metrics"), lines(steps, growth), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize(("growth", "status"), [(0, 0), (2**19, 1)])
def test_a_run_is_followed_to_its_verdict(tmp_path, growth, status):
    folder = write_run(tmp_path / "run", 60, growth)
    typed = fresh if growth else run
    done = typed(MONITOR, "--attach", folder, "--patience", 0.2, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert ("LEAK in 60 steps" if growth else "no leak in 60 steps") in done.stdout
    if growth:
        assert "held tensors: +0.500 MB a step" in done.stdout
    verdict = json.loads((folder / "leak.json").read_text())
    assert verdict["leak"] == bool(growth) and len(verdict["samples"]) == 60
    assert (folder / "memory.png").stat().st_size > 10_000


def test_a_run_that_has_ended_is_not_waited_for(tmp_path):
    began = time.monotonic()
    done = run(MONITOR, "--attach", write_run(tmp_path / "run", 60), "--patience", 300, cwd=tmp_path)
    assert "no leak in 60 steps" in done.stdout and time.monotonic() - began < 100
    assert "following" not in done.stdout


def test_of_a_run_that_is_trained_it_is_said_how_long_news_are_waited_for(tmp_path):
    folder = write_run(tmp_path / "run", 60)
    (folder / LOCK_FILE).touch()
    done = run(MONITOR, "--attach", "run", "--patience", 0.2, cwd=tmp_path)
    assert done.stdout.startswith("following run until it ends, or brings no news for 0.2 s\n")
    assert "no leak in 60 steps" in done.stdout


def test_too_few_steps_for_a_verdict_are_said_at_the_start(tmp_path):
    done = run(MONITOR, 39, 64, "--model", "/no/such/model", cwd=tmp_path)
    assert done.stdout.startswith("there will be no verdict: a trend needs 40 steps, and these are 39\n")
    assert done.returncode == 2


def test_what_cannot_be_followed_is_said(tmp_path):
    done = run(MONITOR, "--attach", tmp_path, "--patience", 0.2, cwd=tmp_path)
    assert done.returncode == 2 and "holds no memory.jsonl" in done.stderr + done.stdout
    done = run(MONITOR, "--attach", tmp_path, "--learning-rate", "1", cwd=tmp_path)
    assert done.returncode == 2 and "leave out --learning-rate 1" in " ".join(done.stdout.split())
    done = run(MONITOR, 10, 60, cwd=tmp_path)
    assert done.returncode == 2 and "56 and 64" in " ".join(done.stderr.split())


def test_a_reward_that_keeps_tensors_is_found_and_named(tmp_path, model_folders, data_file):
    (tmp_path / "leaky.py").write_text(LEAKY)
    done = run(
        MONITOR, 48, 4, "--group-size", 2, "--model", model_folders["gpt2"], "--device", "cpu",
        "--precision", "fp32",
        "--prompts", data_file, "--engine", "off", "--reward", "leaky.py:leaky", "--max-new-tokens", 4,
        "--name", "watched", "--trackers", "tensorboard", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "LEAK in 48 steps" in done.stdout
    rate = float(re.search(r"held tensors: \+([\d.]+) MB a step", done.stdout)[1])
    assert rate == pytest.approx(1.0, abs=0.1)
    assert "(262144,)" in done.stdout and "leaky.py:6" in done.stdout
    assert "step 1: sample" in done.stdout
    assert (tmp_path / "runs/watched/memory.png").exists()
    assert json.loads((tmp_path / "runs/watched/leak.json").read_text())["kinds"] == ["held tensors"]
