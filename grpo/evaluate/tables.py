"""Evaluations as tables for people."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.quality import Change
from grpo.evaluate.scores import NO_SHARES


def results_table(evaluation: Evaluation, *, title: str = "") -> Table:
    """Each column's mean and interval."""
    table = Table("", "mean", "interval", "n", title=title, caption=_caption(evaluation))
    for column, scores in evaluation.scores.items():
        mean, low, high = _printed(column, evaluation.mean(column), *evaluation.interval(column))
        table.add_row(column, mean, f"{low} to {high}", str(len(scores)))
    return _to_the_right(table)


def comparison_table(before: Evaluation, after: Evaluation, *, title: str = "") -> Table:
    """The columns both have: means with intervals, and the paired difference (in points) with its own.

    The difference is green or red where its interval leaves out zero. ValueError where the two are
    not of the same prompts.
    """
    table = Table("", "before", "after", "difference", "n", title=title, caption=_caption(after))
    for column in (name for name in before.scores if name in after.scores):
        was, now = (
            "{} ({} to {})".format(*_printed(column, each.mean(column), *each.interval(column)))
            for each in (before, after)
        )
        change, low, high = paired_difference(before, after, column)
        color = "green" if low > 0 else "red" if high < 0 else ""
        moved = "{} ({} to {})".format(*_printed(column, change, low, high, sign="+"))
        table.add_row(column, was, now, Text(moved, color), str(len(after.scores[column])))
    return _to_the_right(table)


def _caption(evaluation: Evaluation) -> str:
    others = [column for column in NO_SHARES if column in evaluation.scores]
    return f"percent{', but for ' if others else ''}{' and '.join(others)}; 95 % intervals"


def _printed(column: str, *values: float, sign: str = "") -> list[str]:
    factor, decimals = (1, NO_SHARES[column]) if column in NO_SHARES else (100, 1)
    return [f"{factor * value:{sign}.{decimals}f}" for value in values]


def _to_the_right(table: Table) -> Table:
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def change_table(found: Sequence[Change], *, num_prompts: int) -> Table:
    """Before and after, sampled and greedy, in hundredths; narrow enough for 80 columns."""
    title = f"Held out, {num_prompts:,} prompts; percent, the reward in hundredths"
    table = Table("", "before", "after", "change", "95 %", title=title, title_justify="left")
    for mode in dict.fromkeys(each.mode for each in found):
        table.add_section()
        table.add_row(Text(mode, "bold"))
        for each in (each for each in found if each.mode == mode):
            color = {"better": "green", "worse": "red", "open": ""}[each.verdict]
            table.add_row(
                f"  {each.name}", f"{each.before:.1f}", f"{each.after:.1f}",
                Text(f"{each.change:+.1f}", color), f"{each.low:+.1f} to {each.high:+.1f}",
            )  # fmt: skip
    return _to_the_right(table)
