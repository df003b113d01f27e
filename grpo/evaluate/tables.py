"""Evaluations as tables for people: a column's mean with its interval, and what moved in colour."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.quality import Change
from grpo.evaluate.scores import decimals


def results_table(evaluations: Mapping[str, Evaluation], *, title: str = "", compared: bool = False) -> Table:
    """Each column's mean and interval in each evaluation, by its name.

    compared: with the first, on the same prompts: green or red where the paired difference leaves out zero.
    """
    first, *_ = evaluations.values()
    table = _table(*evaluations, "n", title=title, caption=_caption(*evaluations.values()))
    for column in dict.fromkeys(name for each in evaluations.values() for name in each.scores):
        cells = []
        for each in evaluations.values():
            low = high = 0.0
            is_paired = column in each.scores and each.prompts[column] == first.prompts.get(column)
            if compared and is_paired and each is not first:
                _, low, high = paired_difference(first, each, column)
            cells.append(Text(_mean(each, column), _color(low, high)))
        counts = dict.fromkeys(str(len(each.scores.get(column, ()))) for each in evaluations.values())
        table.add_row(column, *cells, " ".join(counts))
    return table


def comparison_table(before: Evaluation, after: Evaluation, *, title: str = "") -> Table:
    """The columns both have: means with intervals, and the paired difference (in points) with its own.

    The difference is green or red where its interval leaves out zero. ValueError where the two are
    not of the same prompts.
    """
    table = _table("before", "after", "difference", "n", title=title, caption=_caption(after))
    for column in (name for name in before.scores if name in after.scores):
        change, low, high = paired_difference(before, after, column)
        moved = Text(_spread(column, change, low, high, sign="+"), _color(low, high))
        table.add_row(
            column, _mean(before, column), _mean(after, column), moved, str(len(after.scores[column]))
        )
    return table


def change_table(found: Sequence[Change], *, num_prompts: int) -> Table:
    """Before and after, sampled and greedy, in hundredths; narrow enough for 80 columns."""
    title = f"Held out, {num_prompts:,} prompts; percent, the reward in hundredths"
    table = _table("before", "after", "change", "95 %", title=title, title_justify="left")
    for mode in dict.fromkeys(each.mode for each in found):
        table.add_section()
        table.add_row(Text(mode, "bold"))
        for each in (each for each in found if each.mode == mode):
            moved = Text(f"{each.change:+.1f}", _color(each.low, each.high))
            table.add_row(
                f"  {each.name}", f"{each.before:.1f}", f"{each.after:.1f}", moved,
                f"{each.low:+.1f} to {each.high:+.1f}",
            )  # fmt: skip
    return table


def _table(*headings: str, **options: Any) -> Table:
    """Names to the left, figures to the right."""
    figures = (Column(heading, justify="right") for heading in headings)
    return Table(Column(no_wrap=True), *figures, **options)


def _mean(evaluation: Evaluation, column: str) -> str:
    """40.0 (30.9 to 49.8); "" where it has no such column."""
    if column not in evaluation.scores:
        return ""
    return _spread(column, evaluation.mean(column), *evaluation.interval(column))


def _spread(column: str, mean: float, low: float, high: float, *, sign: str = "") -> str:
    places = decimals(column)
    shown = ((100 * value, 1) if places is None else (value, places) for value in (mean, low, high))
    return "{} ({} to {})".format(*(f"{value:{sign}.{digits}f}" for value, digits in shown))


def _color(low: float, high: float) -> str:
    return "green" if low > 0 else "red" if high < 0 else ""


def _caption(*evaluations: Evaluation) -> str:
    names = (name for each in evaluations for name in each.scores if decimals(name) is not None)
    others = dict.fromkeys("rewards" if "reward" in name else name for name in names)
    return f"percent{', but for ' if others else ''}{' and '.join(others)}; 95 % intervals"
