"""Limits from outside are refused by name or kept, and watching memory takes next to nothing of a step."""

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from commands import ROOT

from grpo import memory
from grpo.config import Config
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.memory.budget import GB
from grpo.model.target import multiplies_in_bf16
from grpo.trainer import Trainer

STEPS, SKIPPED = 8, 2
"""In the first steps tensors are counted one by one."""
PRECISIONS = ["fp32", "bf16"] if multiplies_in_bf16(torch.device("cpu")) else ["fp32"]


def train(
    folder: Path, precision: str, *, limit: float | None = None, within: bool = False
) -> tuple[int, str, float, float]:
    """Status, what is printed, seconds of the best step, and the most bytes.

    limit: bytes of data, by `ulimit -d`; or, within, by --memory-limit.
    """
    flags = f"--precision {precision} --batch-size 64 --device cpu --engine off --steps 4 --eval-interval 0"
    flags += f" --memory-limit {limit:.0f}" if within else ""
    words = f"ulimit -d {limit / 1024:.0f}; " if limit and not within else ""
    words += f"exec {sys.executable} {ROOT / 'train_lean.py'} {flags} --runs-dir {folder}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=300)
    printed = " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in printed
    passes, metrics = (
        [line for path in folder.glob(f"*/{file}") for line in read_lines(path)]
        for file in (MEMORY_FILE, METRICS_FILE)
    )
    seconds = min((line["step_time"] for line in metrics if "step_time" in line), default=0.0)
    return done.returncode, printed, seconds, max((line["process_bytes"] for line in passes), default=0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_least_limit_that_is_named_is_enough_and_twice_the_need_costs_no_time(tmp_path, precision):
    status, _, seconds, need = train(tmp_path / "free", precision)
    assert status == 0
    limit = GB / 4
    for within in True, False:  # what is enough for the one lets the process live to the other's refusal
        status, printed, *_ = train(tmp_path / f"refused-{within}", precision, limit=limit, within=within)
        named = re.search(r"at least ([\d.]+)\s?GB|([\d.]+) GB have to be there", printed)
        assert named or status == 0, printed
        limit = GB * float(named[1] or named[2]) if named else limit
    status, _, slow, _ = train(tmp_path / "least", precision, limit=limit)
    assert status == 0 and slow <= 4 * seconds
    for within in True, False:
        status, printed, *_ = train(tmp_path / f"more-{within}", precision, limit=1.2 * limit, within=within)
        assert status == 0 and "out of memory" not in printed
    status, _, free, _ = train(tmp_path / "twice", precision, limit=2 * need)
    assert status == 0 and free <= 1.15 * seconds


def test_measuring_and_planning_take_one_percent_of_a_step(tmp_path):
    """By where this thread is, every millisecond; a pass of the model that memory calls is not its own."""
    here = Path(memory.__file__).parent
    seconds: Counter[bool] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal last
        since, last = last, time.perf_counter()
        while frame is not None and not frame.f_code.co_filename.startswith(str(here.parent)):
            frame = frame.f_back
        seconds[frame is not None and frame.f_code.co_filename.startswith(str(here))] += last - since

    trainer = Trainer(
        Config(
            steps=SKIPPED + STEPS,
            batch_size=64,
            model="rook-tiny",
            engine="off",
            eval_interval=0,
            checkpoint_interval=0,
            runs_dir=tmp_path,
        )
    )
    last, before = time.perf_counter(), signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        for step in trainer:
            if step.number == SKIPPED:
                seconds.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seconds[False] > 0.1 and seconds[True] <= 0.01 * seconds[False], seconds
