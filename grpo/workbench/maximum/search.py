"""The largest batch that fits, by real training steps, each size in a process of its own.

`predict` lets the memory model propose a size, tries it, corrects the model by what was measured, and
proposes again. `classic` is the manual recipe: 16 more after a success, half after running out of memory.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loguru import logger
from rich.table import Table

from grpo.memory.budget import GB, readable
from grpo.workbench.maximum.trial import TRIAL_STEPS, TrialTask
from grpo.workbench.predict import StepMemory
from grpo.workbench.processes import Status, run_worker

MAX_TRIALS = 4
"""Of `predict`."""
POINTS_OF_A_LINE = 3
_PLAUSIBLE = 1.5
"""The memory model's slope is never further off; small sizes are noisy."""
INCREMENT = 16
"""Rows more after a success in the classic recipe."""


@dataclass(frozen=True)
class TrialResult:
    """One size: how it went, its peaks in bytes, and its steps' losses and seconds."""

    batch_size: int
    status: Status
    message: str | None = None
    predicted_bytes: float | None = None
    peak_bytes: int | None = None
    """Most that the process held (on an accelerator: of the device)."""
    allocated_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.status == "ok"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Search = Generator[int, TrialResult, None]
"""Yields sizes to try, and is sent what came of each."""


def try_size(task: TrialTask) -> TrialResult:
    """Real steps at `task.batch_size`, in a fresh process."""
    records: list[Mapping[str, Any]] = []
    limited = task.memory_limit_bytes is not None
    ended = run_worker("grpo.workbench.maximum.trial", asdict(task), records.append, limited=limited)
    return TrialResult(
        task.batch_size, ended.status, ended.message, task.predicted_bytes,
        max((record["process_bytes"] for record in records), default=None),
        max((record["allocated_bytes"] for record in records), default=None),
        [record["loss"] for record in records],
        [record["seconds"] for record in records],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ search


def classic_sizes(start: int, *, multiple: int, at_most: int) -> Search:
    """`start`, then INCREMENT more after each success and half after each failure, until both are known."""
    size = min(at_most, _rounded(max(start, multiple), multiple))
    fitted, failed = 0, at_most + 1
    while size not in (fitted, failed):
        result = yield size
        if result.fits:
            fitted = max(fitted, size)
            size = min(at_most, size + max(multiple, _rounded(INCREMENT, multiple)))
        else:
            failed = min(failed, size)
            size = fitted or _rounded(size // 2, multiple)
        if size >= failed or not size:
            return


def predicted_sizes(
    memory: StepMemory,
    usable_bytes: float,
    *,
    start: int,
    multiple: int,
    at_most: int,
    max_trials: int = MAX_TRIALS,
) -> Search:
    """A small size to correct the memory model by, then what it proposes, corrected after each trial.

    Where that leaves trials and fewer than three sizes that fit, a small one more shows the line.
    """
    results: list[TrialResult] = []
    while len(results) < max_trials:
        proposed = _propose(memory, usable_bytes, results, multiple=multiple, at_most=at_most)
        if not results:
            proposed = min(_rounded(max(start, multiple), multiple), max(multiple, proposed), at_most)
        tried = {result.batch_size for result in results}
        if proposed in tried or not proposed:
            break
        results.append((yield proposed))
    fitted = sorted(result.batch_size for result in results if result.fits)
    if len(results) < max_trials and 0 < len(fitted) < POINTS_OF_A_LINE:
        between = _rounded((fitted[0] + fitted[-1]) // 2, multiple)
        size = between if between not in fitted else _rounded(fitted[0] // 2, multiple)
        if size:
            yield size  # for the line only


def _propose(
    memory: StepMemory, usable_bytes: float, results: list[TrialResult], *, multiple: int, at_most: int
) -> int:
    """The largest size that the corrected model puts within the bytes there are, below all that failed."""
    failed = min((result.batch_size for result in results if not result.fits), default=at_most + 1)
    fitted = max((result.batch_size for result in results if result.fits), default=0)
    ceiling = _rounded(failed - 1, multiple)
    factor, offset = correction(memory, results)
    size = memory.largest_batch((usable_bytes - offset) / factor, at_most=ceiling)
    if failed <= at_most and size >= ceiling > fitted:
        # It ran out where the model saw room: the truth lies between, nobody knows where.
        size = max(fitted, _rounded((fitted + failed) // 2, multiple))
    return max(size, fitted)


def correction(memory: StepMemory, results: Sequence[TrialResult]) -> tuple[float, float]:
    """Factor and bytes by which the model's predictions become what was measured.

    From one size that fitted: bytes more or less. From several: the line through the two that differ most.
    """
    known = sorted((r.batch_size, r.peak_bytes) for r in results if r.fits and r.peak_bytes is not None)
    if not known:
        return 1.0, 0.0
    predicted = {size: memory.largest_phase(size)[1].peak_bytes for size, _ in known}
    (small, least), (large, most) = known[0], known[-1]
    factor = 1.0
    if large > small:
        factor = (most - least) / (predicted[large] - predicted[small])
        factor = min(max(factor, 1 / _PLAUSIBLE), _PLAUSIBLE)
    return factor, most - factor * predicted[large]


def _rounded(size: int, multiple: int) -> int:
    return size // multiple * multiple


def run_search(
    search: Search, attempt: Callable[[int, Sequence[TrialResult]], TrialResult]
) -> list[TrialResult]:
    """All trials of a search, in order. attempt: is given the size, and what came of those before."""
    results: list[TrialResult] = []
    try:
        size = next(search)
        while True:
            logger.info("batch {}: {} training steps in a new process", size, TRIAL_STEPS)
            result = attempt(size, results)
            results.append(result)
            logger.info("batch {}: {}", size, _said(result))
            size = search.send(result)
    except StopIteration:
        return results


def _said(result: TrialResult) -> str:
    if not result.fits:
        return f"{result.status} ({result.message})" if result.message else result.status
    peak = readable(result.peak_bytes or 0)
    predicted = f", predicted {readable(result.predicted_bytes)}" if result.predicted_bytes else ""
    return f"peak {peak}{predicted}, loss {result.losses[-1]:.4f}, {min(result.step_s):.2f} s a step"


def trials_table(results: Sequence[TrialResult]) -> Table:
    """A row a trial."""
    table = Table(title="Trials", title_justify="left")
    for column in ("batch", "status", "predicted, GB", "peak, GB", "loss", "s a step"):
        table.add_column(column, justify="left" if column == "status" else "right")
    for result in results:
        measured = ("", "", "")
        if result.fits:
            peak, loss = (result.peak_bytes or 0) / GB, result.losses[-1]
            measured = (f"{peak:.3f}", f"{loss:.4f}", f"{min(result.step_s):.2f}")
        predicted = "" if result.predicted_bytes is None else f"{result.predicted_bytes / GB:.3f}"
        table.add_row(str(result.batch_size), result.status, predicted, *measured)
    return table
