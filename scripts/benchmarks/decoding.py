"""Sampling alone, of a model of Qwen's kind: our decoders, Hugging Face's generate with both caches."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.speed import Case, Outcome, race, ratio_text
from benchmarks.speed_worker import Contender

_CONTENDERS: tuple[Contender, ...] = ("sampling", "generic sampling", "static", "growing")
_BAR = 3.0
"""Times as fast as the static cache."""


def race_decoders(rows: int, rounds: int, folder: Path) -> Outcome:
    """So many completions at once: 128 tokens each, of prompts of 120."""
    case = Case(
        f"{rows} rows", "Qwen's kind without end", 120, rows, rounds, (_BAR, _BAR), batch_size=rows,
        max_new_tokens=128,
    )  # fmt: skip
    return race(case, folder, contenders=_CONTENDERS)


def decoding_table(outcomes: Sequence[Outcome]) -> Table:
    """Ratios are of the contender's seconds, and of its process's peak, to our native decoder's."""
    table = Table("rows", "decoder", "ms a token", "against it", "process's peak, GB", box=box.MARKDOWN)
    for outcome in outcomes:
        for name, steps in outcome.steps.items():
            token = float(np.median([step.seconds for step in steps])) / outcome.case.max_new_tokens
            ratio = "" if name == outcome.base else ratio_text(*outcome.ratio(name))
            peak = f"{steps[-1].peak_bytes / 2**30:.2f}"
            table.add_row(str(outcome.case.batch_size), name, f"{1000 * token:.1f}", ratio, peak)
    return table


def decoding_verdicts(outcomes: Sequence[Outcome]) -> Mapping[str, bool]:
    ratios = {outcome.case.name: outcome.ratio("static")[0] for outcome in outcomes}
    return {
        f"{name}: {ratio:.2f} times static (bar {_BAR:g})": ratio >= _BAR for name, ratio in ratios.items()
    }
