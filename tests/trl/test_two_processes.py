"""Two processes, one with half the memory of the other: the steps of one process, and nobody waits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.trl_cases import Stock, difference, run
from commands import ROOT
from two_processes import CASES

pytestmark = pytest.mark.usefixtures("own_accelerator")


def test_two_unlike_processes_take_the_steps_of_one(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, Path(__file__).with_name("two_processes.py"), tmp_path],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "learn: out of memory with" in done.stderr
    both = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    for case, (first, second) in zip(CASES, both, strict=True):
        parameters, logged = difference(run(Stock, case), first)
        assert parameters < 1e-10
        assert logged < 1e-10 or case.accumulation > 1  # a mean of means of rows that TRL shuffles
        for name, value in first["parameters"].items():
            assert torch.equal(value, second["parameters"][name])
