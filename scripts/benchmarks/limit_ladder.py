"""One run a rung: limits from the smallest that is not refused to twice the need."""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from loguru import logger
from rich import box
from rich.table import Table

from benchmarks.limited_runs import How, RunOutcome, run_command
from grpo.memory.budget import GB

RUNGS = 8


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
    said = [
        (outcome.step_s / free[kind], outcome.times_said)
        for kind, _, outcome in rows
        if outcome.step_s and outcome.times_said and free.get(kind)
    ]
    off = max((max(real / told, told / real) for real, told in said), default=1.0)
    return {
        "no traceback": not any(outcome.traceback for _, _, outcome in rows),
        "what is not refused ends with status 0": all(outcome.status == 0 for outcome in done),
        "the smallest limit that is named is enough": all(outcome.step_s for _, _, outcome in rows),
        "no step takes over 3 times the unlimited one's, unless the plan said more than 2": all(
            (outcome.step_s or 0.0) <= 3 * free[kind] * max(1.0, (outcome.times_said or 1) / 2)
            for kind, _, outcome in rows
        ),
        f"what is said of a step's time is {off:.1f} times off at most (below 3)": off < 3,
        "no phase exceeds the worst case": all(outcome.within_worst for outcome in done),
    }
