"""Whole runs of the command, under limits or without, held against what their plans said of the process.

`ladder`: one run a rung, from the smallest limit that is not refused to twice the need. `grid`: many kinds of
runs. What is measured is what the system counts, by the run's own memory.jsonl.
"""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from loguru import logger
from rich import box
from rich.table import Table

from benchmarks.random_gpt2 import make_random_gpt2
from grpo.memory.budget import GB
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines

ROOT = Path(__file__).parents[2]
How = Literal["--memory-limit", "ulimit -d", "cgroup"]
RUNGS = 8
PROMISED_BYTES = 16 * 2**20
"""Half an interval may be so wide, or a twentieth of the peak above the baseline."""
SHAPE_OF_30M = {"n_layer": 8, "n_head": 8, "n_embd": 512, "n_positions": 512}


@dataclass(frozen=True)
class RunOutcome:
    """What became of a run. Bytes of the phase that held most; nothing where it was refused."""

    name: str
    status: int
    traceback: bool
    step_s: float | None = None
    retries: int = 0
    most_bytes: int = 0
    expected_bytes: int = 0
    error_bytes: int = 0
    measured_bytes: int = 0
    baseline_bytes: int = 0
    said: str = ""
    times_said: float | None = None
    """As long a step as with all rows at once, by what it said beforehand."""
    phases_inside: tuple[bool, ...] = ()
    """Of each phase, whether its peak is within what was stated for it."""
    phases_beyond: tuple[str, ...] = ()
    """Phases that exceeded the worst case."""

    @property
    def miss(self) -> float:
        """How far off the expectation was, in half intervals."""
        return (self.measured_bytes - self.expected_bytes) / max(1, self.error_bytes)

    @property
    def inside(self) -> bool:
        """Whether what was measured is within what was stated for the shapes that came."""
        return abs(self.miss) <= 1

    @property
    def cells(self) -> tuple[str, str, str]:
        """What was said, and measured, in GB."""
        expected = f"{self.expected_bytes / GB:.3f} ± {self.error_bytes / GB:.3f}"
        return f"{self.most_bytes / GB:.3f}", expected, f"{self.measured_bytes / GB:.3f}"

    @property
    def within_worst(self) -> bool:
        return self.measured_bytes <= self.most_bytes and not self.phases_beyond

    @property
    def width(self) -> float:
        """Half the interval, in shares of what is promised."""
        return self.error_bytes / max(PROMISED_BYTES, 0.05 * (self.measured_bytes - self.baseline_bytes))


def run_command(
    name: str, options: Sequence[str], *, limit: int | None = None, how: How = "--memory-limit",
    steps: int = 3, processes: int = 1, timeout_s: float = 300,
) -> RunOutcome:  # fmt: skip
    """One run of train_lean.py in a folder of its own. limit: bytes, set in which way."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train_lean.py")]
        if processes > 1:
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(processes),
            ]
            command = [*launcher, *command[1:]]
        command += [*options, "--steps", str(steps), "--eval-interval", "0", "--engine", "off"]
        if limit is not None and how == "--memory-limit":
            command += ["--memory-limit", str(limit)]
        with _cgroup(limit) if limit is not None and how == "cgroup" else nullcontext() as enter:
            try:
                ended = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=timeout_s,
                    preexec_fn=_under(limit, how, enter),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return RunOutcome(name, -1, False, said=f"no end within {timeout_s:g} s")
        lines = [line for path in Path(folder).glob(f"runs/*/{MEMORY_FILE}") for line in read_lines(path)]
        metrics = [line for path in Path(folder).glob(f"runs/*/{METRICS_FILE}") for line in read_lines(path)]
        return _outcome(name, ended, lines, [line["step_time"] for line in metrics if "step_time" in line])


def _outcome(
    name: str, ended: subprocess.CompletedProcess[str], lines: list[dict[str, Any]], seconds: list[float]
) -> RunOutcome:
    text = ended.stdout + ended.stderr
    if not lines:
        return RunOutcome(name, ended.returncode, "Traceback" in text, said=text[-2000:])
    each = [
        max((line for line in lines if line["phase"] == phase), key=lambda line: line["device_used_bytes"])
        for phase in dict.fromkeys(line["phase"] for line in lines)
    ]
    highest = max(each, key=lambda line: line["device_used_bytes"])
    said = " ".join(text.split())
    times = re.search(r"and ([\d.]+) times as long a step", said)
    return RunOutcome(
        name, ended.returncode, "Traceback" in text, median(seconds[1:] or seconds or [0.0]),
        sum(line["retries"] for line in lines), highest["worst_bytes"], highest["expected_bytes"],
        highest["expected_error_bytes"], highest["device_used_bytes"], lines[0]["process_before_bytes"],
        "" if ended.returncode == 0 else text[-2000:],
        float(times[1]) if times else None,
        tuple(
            abs(line["device_used_bytes"] - line["expected_bytes"]) <= line["expected_error_bytes"]
            for line in each
        ),
        tuple(line["phase"] for line in each if line["device_used_bytes"] > line["worst_bytes"]),
    )  # fmt: skip


def _under(limit: int | None, how: How, enter: Callable[[], None] | None) -> Callable[[], None]:
    def prepare() -> None:
        if limit is not None and how == "ulimit -d":
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if enter is not None:
            enter()

    return prepare


@contextmanager
def _cgroup(limit: int) -> Iterator[Callable[[], None]]:
    """A control group, version 1 or 2, with this limit; how a process enters it. OSError: not root."""
    old = Path("/sys/fs/cgroup/memory")
    folder = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"limited-run-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
        yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        folder.rmdir()


# ------------------------------------------------------------------------------------------ ladder


def ladder(
    models: Sequence[str], precisions: Sequence[str], *, batch_size: int, how: How, rungs: int = RUNGS
) -> Iterator[tuple[str, int | None, RunOutcome]]:
    """(kind of run, limit, outcome): without one, at what a refusal says is enough, up to twice the need."""
    for model, precision in product(models, precisions):
        options = ["--model", model, "--precision", precision, "--batch-size", str(batch_size)]
        kind = f"{Path(model).name} {precision}"
        free = run_command(kind, options)
        logger.info("{}: {} s a step without a limit", kind, free.step_s)
        yield kind, None, free
        least = smallest_limit(options, how)
        for rung in range(rungs):
            limit = int(least * (2 * free.measured_bytes / least) ** (rung / (rungs - 1)))
            outcome = run_command(kind, options, limit=limit, how=how)
            logger.info(
                "{} at {:.2f} GB: status {}, {} s a step", kind, limit / GB, outcome.status, outcome.step_s
            )
            yield kind, limit, outcome


def smallest_limit(options: Sequence[str], how: How = "--memory-limit") -> int:
    """Bytes that a refusal names: the least --memory-limit, or the least that has to be there.

    Where a limit comes from outside, what is enough for --memory-limit lets the process live to its refusal.
    """
    least = _named(run_command("", options, limit=2**28))
    return least if how == "--memory-limit" else _named(run_command("", options, limit=least, how=how))


def _named(refused: RunOutcome) -> int:
    said = " ".join(refused.said.split())
    if not (named := re.search(r"at least ([\d.]+)GB|([\d.]+) GB have to be there", said)):
        raise RuntimeError(f"no limit is named: {refused.said}")
    return int(float(named[1] or named[2]) * GB)


def ladder_table(rows: Sequence[tuple[str, int | None, RunOutcome]], how: How) -> Table:
    table = Table(title=f"Limits, by {how}; GB", title_justify="left", box=box.MARKDOWN)
    for column in (
        "run",
        "limit",
        "status",
        "s a step",
        "of none's",
        "said",
        "retries",
        "at most",
        "expected",
        "measured",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    free = {kind: outcome.step_s for kind, limit, outcome in rows if limit is None}
    for kind, limit, outcome in rows:
        ratio = outcome.step_s / free[kind] if outcome.step_s and free.get(kind) else None
        table.add_row(
            kind,
            f"{limit / GB:.2f}" if limit else "none",
            "traceback" if outcome.traceback else str(outcome.status),
            f"{outcome.step_s:.2f}" if outcome.step_s else "",
            f"{ratio:.2f}" if ratio else "",
            f"{outcome.times_said or 1:.1f}",
            str(outcome.retries),
            *outcome.cells,
        )
    return table


def ladder_verdicts(rows: Sequence[tuple[str, int | None, RunOutcome]]) -> dict[str, bool]:
    free = {kind: outcome.step_s or 0.0 for kind, limit, outcome in rows if limit is None}
    done = [outcome for _, _, outcome in rows if outcome.step_s]
    return {
        "no traceback": not any(outcome.traceback for _, _, outcome in rows),
        "what is not refused ends with status 0": all(outcome.status == 0 for outcome in done),
        "the smallest limit that is named is enough": all(outcome.step_s for _, _, outcome in rows),
        "no step takes over 3 times the unlimited one's, unless the plan said more than 2": all(
            (outcome.step_s or 0.0) <= 3 * free[kind] * max(1.0, (outcome.times_said or 1) / 2)
            for kind, _, outcome in rows
        ),
        "no phase exceeds the worst case": all(outcome.within_worst for outcome in done),
    }


# -------------------------------------------------------------------------------------------- grid


def grid(folder: Path, *, only: str = "") -> Iterator[RunOutcome]:
    """Runs of three steps: models, batches, precisions, adapters, checkpointing, limits, processes."""
    endless = str(make_random_gpt2(folder / "endless", n_layer=6, n_head=6, n_embd=192, n_positions=512))
    large = str(make_random_gpt2(folder / "30m", **SHAPE_OF_30M))
    runs: list[tuple[str, list[str], dict[str, Any]]] = []
    for size, precision in product((8, 16, 32, 64, 128, 256, 512), ("fp32", "bf16")):
        runs.append(("rook-tiny", ["--batch-size", str(size), "--precision", precision], {}))
    for size, precision in product((8, 16, 32, 64, 128), ("fp32", "bf16")):
        runs.append((endless, ["--batch-size", str(size), "--precision", precision], {}))
    for size, precision in product((8, 16, 32), ("fp32", "bf16")):
        runs.append((large, ["--batch-size", str(size), "--precision", precision], {}))
    for size, precision, more in product(
        (16, 64, 256), ("fp32", "bf16"), (["--lora-rank", "16"], ["--gradient-checkpointing", "full"])
    ):
        runs.append(("rook-tiny", ["--batch-size", str(size), "--precision", precision, *more], {}))
    for size, precision, share in product((64, 256), ("fp32", "bf16"), (0.8, 0.9, 1.5)):
        runs.append(
            ("rook-tiny", ["--batch-size", str(size), "--precision", precision], {"limit": int(share * GB)})
        )
    for size, precision in product((16, 64, 128), ("fp32", "bf16")):
        runs.append(("rook-tiny", ["--batch-size", str(size), "--precision", precision], {"processes": 2}))
    for model, options, more in runs:
        limit, processes = more.get("limit"), more.get("processes", 1)
        name = " ".join([Path(model).name, *options])
        name += f", limit {limit / GB:.1f} GB" if limit else ", two processes" if processes > 1 else ""
        if only in name:
            outcome = run_command(name, ["--model", model, *options], limit=limit, processes=processes)
            logger.info("{}: status {}, expected {}, measured {}", name, outcome.status, *outcome.cells[1:])
            yield outcome


def grid_table(outcomes: Sequence[RunOutcome]) -> Table:
    table = Table(title="Whole runs; GB", title_justify="left", box=box.MARKDOWN)
    for column in ("run", "status", "at most", "expected", "measured", "within"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in sorted(outcomes, key=lambda run: abs(run.miss), reverse=True):
        table.add_row(run.name, str(run.status), *run.cells, "yes" if run.inside else "no")
    return table


def grid_verdicts(outcomes: Sequence[RunOutcome]) -> dict[str, bool]:
    done = [run for run in outcomes if run.status == 0 and run.measured_bytes]
    inside = sum(run.inside for run in done)
    width = median([run.width for run in done] or [0.0])
    phases = [each for run in done for each in run.phases_inside]
    return {
        f"{len(done)} of {len(outcomes)} runs end well": len(done) == len(outcomes),
        "no run exceeds its worst case": all(run.within_worst for run in done),
        f"{inside} of {len(done)} intervals hold the measured peak (95 %)": inside >= 0.95 * len(done),
        f"{sum(phases)} of {len(phases)} phases' own hold theirs (95 %)": sum(phases) >= 0.95 * len(phases),
        f"half an interval is {width:.2f} of 5 % or 16 MB, in the median": width <= 1,
    }
