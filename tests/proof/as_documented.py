"""Runs started by accelerate, as docs/several-cards.md says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from grpo.logs.tracking import COMPLETIONS_FILE, METRICS_FILE, read_lines

TRAIN = str(ROOT / "train_lean.py")
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_machines",
    1,
    "--num_processes",
    2,
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
]


def python(cwd: Path, *words: object, **environment: str) -> str:
    """Returns what it prints; it ends with 0."""
    own = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_accelerate_starts_two_processes_that_do_the_step_of_one(tmp_path):
    """Without a card as with several, if it is told that there are."""
    little = {
        "model": "rook-tiny",
        "device": "cpu",
        "batch-size": 16,
        "max-new-tokens": 8,
        "engine": "off",
        "eval-interval": 0,
        "steps": 1,
        "precision": "fp64",
    }
    flags = [word for name, value in little.items() for word in (f"--{name}", value)]
    python(tmp_path, *ACCELERATE, TRAIN, *flags, "--name", "two")
    python(tmp_path, TRAIN, *flags, "--name", "one")
    (two,), (one,) = (read_lines(tmp_path / "runs" / name / METRICS_FILE) for name in ("two", "one"))
    assert two["processes/exchanged_bytes"] > 0 and "processes/exchanged_bytes" not in one
    for name in ("reward", "loss", "grad_norm", "completions/mean_length"):
        assert two[name] == pytest.approx(one[name], rel=1e-10), name
    texts, others = (read_lines(tmp_path / "runs" / name / COMPLETIONS_FILE) for name in ("two", "one"))
    assert texts == others and texts
