"""Whole runs of the command, and a ladder of limits: from the smallest that is named to twice the need."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from loguru import logger

from benchmarks.models import GPT2_30M, write_model
from benchmarks.results import finish, until_stopped
from grpo.memory.budget import GB
from grpo.model.target import multiplies_in_bf16
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines

ROOT = Path(__file__).parents[2]
How = Literal["--memory-limit", "ulimit -d", "cgroup"]
STEPS = 4
"""Of a run under a limit: in the first two tensors are counted one by one, which takes time."""
TIMEOUT_S = 900
SLOWEST = 4.0
"""Times as long a step as without a limit, at the smallest that is named."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run: its best step's seconds (None: it took none), and the lines of memory.jsonl."""

    name: str
    status: int
    said: str
    step_s: float | None
    passes: list[dict[str, Any]]
    limit_bytes: int | None = None

    @property
    def retries(self) -> int:
        return sum(line["retries"] for line in self.passes)

    @property
    def process_bytes(self) -> int:
        """The most, as the system counts it."""
        return max((line["process_bytes"] for line in self.passes), default=0)

    @property
    def has_traceback(self) -> bool:
        return "Traceback" in self.said

    @property
    def named_bytes(self) -> int | None:
        """What a refusal says is enough."""
        found = re.search(r"at least ([\d.]+)\s?GB|([\d.]+) GB have to be there", self.said)
        return int(float(found[1] or found[2]) * GB) if found and not self.passes else None


def run_command(
    name: str, options: Sequence[str], *, limit: int | None = None, how: How = "--memory-limit",
    steps: int = STEPS,
) -> Outcome:  # fmt: skip
    """One run of train_lean.py in a folder of its own. limit: bytes, set in which way."""
    command = [sys.executable, str(ROOT / "train_lean.py"), *options, "--device", "cpu", "--engine", "off"]
    command += ["--steps", str(steps), "--eval-interval", "0"]
    if limit and how == "--memory-limit":
        command += ["--memory-limit", str(limit)]
    with TemporaryDirectory() as folder, _way_in(limit, how) as enter:
        try:
            ended = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, preexec_fn=enter
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, -1, f"no end within {TIMEOUT_S} s", None, [], limit)
        passes, metrics = (
            [line for path in Path(folder).glob(f"runs/*/{file}") for line in read_lines(path)]
            for file in (MEMORY_FILE, METRICS_FILE)
        )
    seconds = [line["step_time"] for line in metrics if "step_time" in line]
    said = " ".join((ended.stdout + ended.stderr).split())
    return Outcome(name, ended.returncode, said, min(seconds, default=None), passes, limit)


@contextmanager
def _way_in(limit: int | None, how: How) -> Iterator[Callable[[], Any]]:
    """What a process does at its start to be under a limit that others set."""
    if limit and how == "ulimit -d":
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    with _cgroup(limit) if limit and how == "cgroup" else nullcontext() as group:
        yield lambda: group and (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def _cgroup(limit: int) -> Iterator[Path]:
    """A control group, version 1 or 2, in one that has this limit. OSError: not root."""
    old = Path("/sys/fs/cgroup/memory")
    outer = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"limited-run-{os.getpid()}"
    outer.mkdir()
    try:
        with suppress(OSError):  # version 1 only, and always on by now
            (outer / "memory.use_hierarchy").write_text("1")
        (outer / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
        (outer / "inner").mkdir()
        try:
            yield outer / "inner"
        finally:
            (outer / "inner").rmdir()
    finally:
        outer.rmdir()


def limits(
    how: How = "--memory-limit", batch_size: int = 256, rungs: int = 8, large: bool = True,
    quick: bool = False, output: Path | None = None,
) -> int:  # fmt: skip
    """A ladder of limits: from the smallest that is not refused to twice the need. Some 20 minutes.

    Args:
        how: Who sets the limit. A cgroup needs root.
        batch_size: Completions a step.
        rungs: Limits a model and precision, two or more.
        large: A GPT-2 of 30 M as well, at an eighth of the batch.
        quick: Let a step at twice the need take 15 % longer, not 5 %, as few are timed.
        output: A JSON file for every run.
    """
    if rungs < 2:
        raise SystemExit(f"--rungs is {rungs}: give at least 2.")
    try:
        with _way_in(2**40, how):
            pass
    except OSError as error:
        raise SystemExit(
            f"--how is {how}, and no group can be made ({error}): be root, or give another."
        ) from None
    # Where bf16 is not native, a step in it takes minutes.
    precisions = ["bf16", "fp32"] if multiplies_in_bf16(torch.device("cpu")) else ["fp32"]
    with TemporaryDirectory() as folder:
        models = {"rook-tiny": batch_size}
        if large:
            models[str(write_model(Path(folder) / "30m", GPT2_30M))] = batch_size // 8
        found = until_stopped(_ladder(models, precisions, how, rungs))
    rows = [
        {**asdict(run), "passes": [], "said": run.said[-2000:] if run.status else "", "times": times}
        for run, times in found
    ]
    title = f"Limits, by {how}; GB"
    return finish(title, map(_shown, found), _verdicts(found, 0.15 if quick else 0.05), rows, output)


Rung = tuple[Outcome, float]
"""A run, and how many times as long as without a limit a step of it takes."""


def _ladder(models: Mapping[str, int], precisions: Sequence[str], how: How, rungs: int) -> Iterator[Rung]:
    """Without a limit, then from what a refusal says is enough to twice the need. models: batch sizes."""
    for (model, batch_size), precision in product(models.items(), precisions):
        options = ["--model", model, "--precision", precision, "--batch-size", str(batch_size)]
        name = f"{Path(model).name} {precision}"
        free = run_command(name, options)
        yield free, 1.0
        for limit in np.geomspace(_smallest_limit(options, how), 2 * free.process_bytes, rungs).astype(int):
            run = run_command(name, options, limit=int(limit), how=how)
            times = run.step_s / free.step_s if run.step_s and free.step_s else np.inf
            logger.info("{} at {:.2f} GB: status {}, {:.2f} times", name, limit / GB, run.status, times)
            yield run, times


def _smallest_limit(options: Sequence[str], how: How) -> int:
    """Bytes that a refusal names: the least --memory-limit, or the least that has to be there.

    Where a limit comes from outside, what is enough for --memory-limit lets the process live to its refusal.
    """
    limit = 2**28
    for way in dict.fromkeys(("--memory-limit", how)):
        refused = run_command("", options, limit=limit, how=way)
        named = refused.named_bytes or (limit if refused.status == 0 else None)
        if named is None:
            raise RuntimeError(f"no limit is named: {refused.said[-2000:]}")
        limit = named
    return limit


def _shown(rung: Rung) -> dict[str, object]:
    run, times = rung
    return {
        "run": run.name,
        "limit": f"{run.limit_bytes / GB:.2f}" if run.limit_bytes else "-",
        "status": "traceback" if run.has_traceback else run.status,
        "s a step": f"{run.step_s:.2f}" if run.step_s else "",
        "of none's": f"{times:.2f}" if run.step_s else "",
        "retries": run.retries,
        "process": f"{run.process_bytes / GB:.3f}",
    }


def _verdicts(found: Sequence[Rung], bar: float) -> dict[str, bool]:
    """bar: how much longer a step may be at twice the need."""
    by_name: dict[str, list[Rung]] = {}
    for run, times in found:
        if run.limit_bytes:
            by_name.setdefault(run.name, []).append((run, times))
    least, most = ([rungs[place] for rungs in by_name.values()] for place in (0, -1))
    slowest, at_twice = (max((times for _, times in some), default=np.inf) for some in (least, most))
    return {
        "no traceback": not any(run.has_traceback for run, _ in found),
        "each is refused before its first step, with what is enough, or ends with status 0": all(
            run.status == 0 or run.named_bytes is not None for run, _ in found
        ),
        "the smallest limit that is named is enough": all(run.status == 0 for run, _ in least),
        f"at it a step takes {slowest:.2f} times as long (at most {SLOWEST:g})": slowest <= SLOWEST,
        f"at twice the need {at_twice:.2f} times (at most {1 + bar:g})": at_twice <= 1 + bar,
    }
