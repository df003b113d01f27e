"""Whole runs of the command, and a ladder of limits: from the smallest that is named to twice the need."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from loguru import logger
from rich import box
from rich.table import Table

from grpo.memory.budget import GB
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


def ladder(
    models: Sequence[str], precisions: Sequence[str], *, batch_size: int, how: How, rungs: int = 8
) -> Iterator[Outcome]:
    """Without a limit, then from what a refusal says is enough to twice the need."""
    for model, precision in product(models, precisions):
        options = ["--model", model, "--precision", precision, "--batch-size", str(batch_size)]
        kind = f"{Path(model).name} {precision}"
        free = run_command(kind, options)
        logger.info("{}: {} s a step without a limit", kind, free.step_s)
        yield free
        for limit in np.geomspace(smallest_limit(options, how), 2 * free.process_bytes, rungs).astype(int):
            outcome = run_command(kind, options, limit=int(limit), how=how)
            logger.info(
                "{} at {:.2f} GB: status {}, {} s a step", kind, limit / GB, outcome.status, outcome.step_s
            )
            yield outcome


def smallest_limit(options: Sequence[str], how: How) -> int:
    """Bytes that a refusal names: the least --memory-limit, or the least that has to be there.

    Where a limit comes from outside, what is enough for --memory-limit lets the process live to its refusal.
    """
    limit, ways = 2**28, list[How](dict.fromkeys(("--memory-limit", how)))
    for way in ways:
        refused = run_command("", options, limit=limit, how=way)
        named = refused.named_bytes or (limit if refused.status == 0 else None)
        if named is None:
            raise RuntimeError(f"no limit is named: {refused.said[-2000:]}")
        limit = named
    return limit


def ladder_table(rows: Sequence[Outcome], how: How) -> Table:
    table = Table(title=f"Limits, by {how}; GB", title_justify="left", box=box.MARKDOWN)
    for column in ("run", "limit", "status", "s a step", "of none's", "retries", "process"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.limit_bytes / GB:.2f}" if row.limit_bytes else "none",
            "traceback" if row.has_traceback else str(row.status),
            f"{row.step_s:.2f}" if row.step_s else "", f"{_times(row, rows):.2f}" if row.step_s else "",
            str(row.retries), f"{row.process_bytes / GB:.3f}",
        )  # fmt: skip
    return table


def ladder_verdicts(rows: Sequence[Outcome], *, bar: float) -> dict[str, bool]:
    """bar: how much longer a step may be at twice the need."""
    limited: dict[str, list[Outcome]] = {}
    for row in rows:
        if row.limit_bytes:
            limited.setdefault(row.name, []).append(row)
    least, most = ([each[place] for each in limited.values()] for place in (0, -1))
    slowest, at_twice = (max((_times(row, rows) for row in some), default=np.inf) for some in (least, most))
    return {
        "no traceback": not any(row.has_traceback for row in rows),
        "each is refused before its first step, with what is enough, or ends with status 0": all(
            row.status == 0 or row.named_bytes is not None for row in rows
        ),
        "the smallest limit that is named is enough": all(row.status == 0 for row in least),
        f"at it a step takes {slowest:.2f} times as long (at most {SLOWEST:g})": slowest <= SLOWEST,
        f"at twice the need {at_twice:.2f} times (at most {1 + bar:g})": at_twice <= 1 + bar,
    }


def _times(row: Outcome, rows: Sequence[Outcome]) -> float:
    """As long a step as without a limit."""
    free = next(each.step_s for each in rows if each.name == row.name and each.limit_bytes is None)
    return row.step_s / free if row.step_s and free else float("inf")


def without_passes(rows: Sequence[Outcome]) -> list[Outcome]:
    """For a file."""
    return [replace(row, passes=[], said=row.said[-2000:] if row.status else "") for row in rows]
