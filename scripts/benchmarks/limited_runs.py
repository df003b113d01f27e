"""Whole runs of the command, under limits or without, held against what their plans said of the process.

What is measured is what the system counts, by the run's own memory.jsonl.
"""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from grpo.memory.budget import GB
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines

ROOT = Path(__file__).parents[2]
How = Literal["--memory-limit", "ulimit -d", "cgroup"]
PROMISED_BYTES = 16 * 2**20
"""Half an interval may be so wide, or a twentieth of the peak above the baseline."""


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
