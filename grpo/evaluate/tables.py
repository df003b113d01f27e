"""Evaluations as tables for people."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.quality import Change
from grpo.evaluate.scores import decimals


def results_table(evaluations: Mapping[str, Evaluation], *, title: str = "", compared: bool = False) -> Table:
    """Each column's mean and interval in each evaluation, by its name.

    compared: with the first, on the same prompts: green or red where the paired difference leaves out zero.
    """
    names = dict.fromkeys(name for each in evaluations.values() for name in each.scores)
    first, *_ = evaluations.values()
    table = Table("", *evaluations, "n", title=title, caption=_caption(*evaluations.values()))
    for column in names:
        cells = [_cell(each, column, first if compared else each) for each in evaluations.values()]
        counts = dict.fromkeys(str(len(each.scores.get(column, ()))) for each in evaluations.values())
        table.add_row(column, *cells, " ".join(counts))
    return _to_the_right(table)


def _cell(evaluation: Evaluation, column: str, other: Evaluation) -> Text:
    """A mean with its interval, in the color of its difference to another evaluation's."""
    if column not in evaluation.scores:
        return Text("")
    text = "{} ({} to {})".format(*_printed(column, evaluation.mean(column), *evaluation.interval(column)))
    if evaluation is other or evaluation.prompts[column] != other.prompts.get(column):
        return Text(text)
    _, low, high = paired_difference(other, evaluation, column)
    return Text(text, _color(low, high))


def _color(low: float, high: float) -> str:
    return "green" if low > 0 else "red" if high < 0 else ""


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
        moved = "{} ({} to {})".format(*_printed(column, change, low, high, sign="+"))
        table.add_row(column, was, now, Text(moved, _color(low, high)), str(len(after.scores[column])))
    return _to_the_right(table)


def _caption(*evaluations: Evaluation) -> str:
    names = dict.fromkeys(name for each in evaluations for name in each.scores)
    kinds = dict.fromkeys(_kind(name) for name in names if decimals(name) is not None)
    return f"percent{', but for ' if kinds else ''}{' and '.join(kinds)}; 95 % intervals"


def _kind(column: str) -> str:
    return "rewards" if "reward" in column else column


def _printed(column: str, *values: float, sign: str = "") -> list[str]:
    places = decimals(column)
    factor = 100 if places is None else 1
    return [f"{factor * value:{sign}.{1 if places is None else places}f}" for value in values]


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
