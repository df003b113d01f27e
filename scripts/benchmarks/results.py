"""Contenders in turns, tables of figures, verdicts on them, and the exit status."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.table import Table

from grpo.logs import tables
from grpo.logs.screen import plain_console
from grpo.logs.tables import Row
from grpo.statistics import ratio_interval

T = TypeVar("T")
CONSOLE = plain_console(width=180)  # tables are for docs/measurements.md, whatever the terminal


def in_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Returns the results of each, round by round, in an order that changes: what slows the machine slows
    all."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in contenders if turn % 2 else reversed(contenders):
            results[name].append(contenders[name]())
    return results


def times_as_much(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Theirs over ours: geometric mean over the rounds, and its 95 % interval, infinite for a single one."""
    ratios = np.divide(theirs, ours)
    return float(np.exp(np.log(ratios).mean())), *ratio_interval(ratios)


def table(rows: Iterable[Row], title: str = "") -> Table:
    """A table that can be copied into docs/measurements.md."""
    return tables.table([*rows], title, box=box.MARKDOWN)


def conclude(verdicts: Mapping[str, bool]) -> int:
    """Print each sentence, and whether it holds; the exit status: 1 if one does not."""
    for sentence, holds in verdicts.items():
        CONSOLE.print(f"{'met   ' if holds else 'MISSED'} {sentence}", highlight=False)
    return int(not all(verdicts.values()))


def write(output: Path | None, content: Any) -> None:
    """As JSON, where a file is named; its folder is made."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
