"""Does a run survive running out of memory, and come out the same? Faults on purpose, and a real limit.

What must be equal is compared: all parameters, in float64, and every completion of every step.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import grpo.run.checkpoint
from benchmarks import worker_environment
from benchmarks.out_of_memory import (
    OUT_OF_MEMORY,
    FailAtAllocation,
    mispredict,
    replaced,
    stratified_points,
)
from grpo.config import CONFIG_FILE, Config, from_flat, read_yaml, write_yaml
from grpo.memory import Device, DoesNotFit, Fit, Size, fit
from grpo.run.interrupt import StopRequest
from grpo.run.setup import Run, open_run
from grpo.run.tracking import COMPLETIONS_FILE, MEMORY_FILE, read_lines
from grpo.trainer import Trainer

SAME = 1e-12
"""Parameters may differ by this much: sums over other splits round differently, even in float64."""
PHASES = ("sample", "score", "learn", "evaluate", "checkpoint")
FAULTY_STEP = 2


@dataclass(frozen=True)
class Outcome:
    """What a run left: weights, completions of all steps, and how often it had to repeat something."""

    parameters: list[Tensor]
    completions: list[Any]
    retries: int

    def difference(self, other: "Outcome") -> float:
        """Largest difference of any parameter; infinite where the completions are not the same."""
        if self.completions != other.completions:
            return float("inf")
        pairs = zip(self.parameters, other.parameters, strict=True)
        return max((one - two).abs().max().item() for one, two in pairs)


# ------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class FaultResult:
    """Faults of one phase: how many were made to happen, fired, and left the run the same."""

    phase: str
    points: int
    fired: int
    same: int
    largest_difference: float


def inject_faults(config: Config, num_points: int) -> list[FaultResult]:
    """Run once undisturbed, then once for each point with an allocation that fails there.

    Every third fault strikes the replay as well, so that fewer rows are tried. config: of a short run
    in float64 that evaluates and saves at step 2.
    """
    counters = {phase: FailAtAllocation() for phase in PHASES}
    with _modes(counters):
        reference = _train(config)
    counts = {phase: counter.num_allocations for phase, counter in counters.items()}
    results: dict[str, list[tuple[bool, float]]] = {phase: [] for phase in PHASES}
    for index, (phase, number) in enumerate(stratified_points(counts, num_points)):
        numbers = (number, 2 * number) if index % 3 == 0 and phase != "checkpoint" else (number,)
        fault = FailAtAllocation(*numbers, error=OUT_OF_MEMORY[index % len(OUT_OF_MEMORY)])
        with _modes({phase: fault}):
            outcome = _train(config)
        results[phase].append((fault.fired == list(numbers), outcome.difference(reference)))
    return [
        FaultResult(
            phase, len(mine), sum(fired for fired, _ in mine), sum(gap <= SAME for _, gap in mine),
            max((gap for _, gap in mine), default=0.0),
        )
        for phase, mine in results.items()
    ]  # fmt: skip


@contextmanager
def _modes(modes: dict[str, FailAtAllocation]) -> Iterator[None]:
    """Enter a phase's mode around its work, in step 2 only: not in the warm-up."""
    fit_run, steps = Fit.run, {"now": 0}

    def run(self: Any, phase: str, work: Callable[[int], Any], batch: Size, **options: Any) -> Any:
        steps["now"] += phase == "sample"

        def watched(rows: int) -> Any:
            with modes[phase]:
                return work(rows)

        due = phase in modes and steps["now"] == FAULTY_STEP
        return fit_run(self, phase, watched if due else work, batch, **options)

    def writing(name: str) -> Callable[..., Any]:
        """A part of writing a checkpoint, which makes no tensors: its calls stand for allocations."""
        part = getattr(grpo.run.checkpoint, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if "checkpoint" in modes and steps["now"] == FAULTY_STEP:
                modes["checkpoint"].count()
            return part(*args, **kwargs)

        return wrapped

    parts = {name: writing(name) for name in ("save_file", "_manifest", "_flush")}
    with replaced(Fit, run=run), replaced(grpo.run.checkpoint, **parts):
        yield


def _train(config: Config) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, open_run(replace(config, runs_dir=Path(folder))) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
        return _outcome(run)


def _outcome(run: Run) -> Outcome:
    completions = [
        (line["step"], line["row"], line["completion"]) for line in read_lines(run.folder / COMPLETIONS_FILE)
    ]
    retries = sum(line["retries"] for line in read_lines(run.folder / MEMORY_FILE))
    parameters = [parameter.detach().clone() for parameter in run.policy.model.parameters()]
    return Outcome(parameters, completions, retries)


# ------------------------------------------------------------------------------------ a real limit


@dataclass(frozen=True)
class LimitResult:
    """A run under a limit, or without one: how it ended, its rows and retries, and what it left."""

    name: str
    limit_bytes: int | None
    finished: bool
    error: str
    rows: dict[str, int]
    retries: int
    difference: float


def run_under_limit(config: Config, *, share: float, bias: float) -> list[LimitResult]:
    """The same run unlimited; limited without a plan; with it; and with predictions `bias` times as high.

    The limit leaves `share` of what learning from all rows at once would add. Linux only; each in a
    process of its own. config: of a short run in float64.
    """
    with tempfile.TemporaryDirectory() as folder:
        free = _in_process(config, Path(folder) / "free")
        limit = int(free["process_bytes"] + share * free["learn_bytes"])
        limited = replace(config, memory_limit=str(limit))
        reports = {
            "no limit": free,
            "limit, neither plan nor recovery": _in_process(limited, Path(folder) / "naive", naive=True),
            "limit, planned": _in_process(limited, Path(folder) / "planned"),
            f"limit, predictions x {bias}": _in_process(limited, Path(folder) / "biased", bias=bias),
        }
        reference = torch.load(Path(folder) / "free" / "outcome.pt", weights_only=True)
        return [_limit_result(name, report, limit, reference, folder) for name, report in reports.items()]


def _limit_result(
    name: str, report: dict[str, Any], limit: int, reference: list[Tensor], folder: str
) -> LimitResult:
    difference = float("inf")
    if report["finished"]:
        mine = torch.load(Path(report["folder"]) / "outcome.pt", weights_only=True)
        difference = max((a - b).abs().max().item() for a, b in zip(mine, reference, strict=True))
    return LimitResult(
        name, None if name == "no limit" else limit, report["finished"], report["error"],
        report["rows"], report["retries"], difference,
    )  # fmt: skip


def _in_process(config: Config, folder: Path, *, bias: float = 1.0, naive: bool = False) -> dict[str, Any]:
    """Run `main` below in a new process; its report, or that it died."""
    folder.mkdir()
    write_yaml(replace(config, runs_dir=folder), folder / CONFIG_FILE)
    command = [sys.executable, "-m", __name__, str(folder), str(bias), str(int(naive))]
    done = subprocess.run(command, capture_output=True, text=True, env=worker_environment())
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    except OSError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"finished": False, "error": last, "rows": {}, "retries": 0, "folder": str(folder)}
    return {**report, "folder": str(folder)}


def main(folder: Path, bias: float, naive: bool) -> None:
    """One run of `run_under_limit`, in its own process."""
    config = from_flat(read_yaml(folder / CONFIG_FILE))
    if naive:  # all rows at once, and the first out of memory ends it
        Fit.plan = lambda self, phase, batch, **_: batch.rows  # type: ignore[method-assign]
        fit.survive = lambda work, rows, **_: (work(rows), rows)  # type: ignore[assignment,attr-defined]
    report: dict[str, Any] = {"finished": False, "error": "", "rows": {}, "retries": 0}
    try:
        with open_run(config) as run:
            if bias != 1.0:
                mispredict(run.fit, bias)
            longest = Size(config.num_rows, config.sampling.max_new_tokens, run.longest_prompt)
            report["learn_bytes"] = run.fit.predict("learn", longest)
            report["process_bytes"] = Device(limit_bytes=sys.maxsize).used_bytes()  # as a limit counts it
            Trainer(run, Console(quiet=True)).train(StopRequest())
            outcome = _outcome(run)
            torch.save(outcome.parameters, folder / "outcome.pt")
            report["rows"] = run.fit.planned()
            report |= {"retries": outcome.retries, "finished": True}
    except (RuntimeError, MemoryError, DoesNotFit) as error:
        report["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), bool(int(sys.argv[3])))
