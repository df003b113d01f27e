"""Evaluations as tables for people: a column's mean with its interval, and what moved in colour."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.quality import Change
from grpo.evaluate.scores import decimals
from grpo.logs.tables import Row, table


def results_table(evaluations: Mapping[str, Evaluation], *, title: str = "", compared: bool = False) -> Table:
    """Each column's mean and interval in each evaluation, by its name, and of how many prompts.

    compared: each of the others with the first: the paired difference (in points) with its own interval,
    green or red where that leaves out zero.
    """
    first, *_ = evaluations.values()
    rows = []
    for column in dict.fromkeys(name for them in evaluations.values() for name in them.scores):
        row: Row = {"": column}
        for name, evaluation in evaluations.items():
            row[name] = _mean(evaluation, column)
            if compared and evaluation is not first:
                heading = "difference" if len(evaluations) == 2 else f"difference of {name}"
                row[heading] = _difference(first, evaluation, column)
        scored = (them.scores[column] for them in evaluations.values() if column in them.scores)
        row["n"] = " ".join(dict.fromkeys(str(len(scores)) for scores in scored))
        rows.append(row)
    return table(rows, title, caption=_caption(evaluations.values()))


def change_table(changes: Sequence[Change], *, num_prompts: int) -> Table:
    """Before and after, sampled and greedy, in percent; narrow enough for 80 columns."""
    title = f"Held out, {num_prompts:,} prompts; percent (of the reward: of its most)"
    rows: list[Row | None] = []
    mode = ""
    for change in changes:
        if change.mode != mode:
            rows += [None, {"": Text(mode := change.mode, "bold")}]
        rows.append(
            {
                "": f"  {change.name}",
                "before": f"{change.before:.1f}",
                "after": f"{change.after:.1f}",
                "change": Text(f"{change.change:+.1f}", _color(change.low, change.high)),
                "95 %": f"{change.low:+.1f} to {change.high:+.1f}",
            }
        )
    return table(rows[1:], title)


def _mean(evaluation: Evaluation, column: str) -> str:
    """A column's mean as 40.0 (30.9 to 49.8); "" where the evaluation lacks it."""
    if column not in evaluation.scores:
        return ""
    return _spread(column, evaluation.mean(column), *evaluation.interval(column))


def _difference(first: Evaluation, other: Evaluation, column: str) -> Text:
    """The difference as +15.0 (+5.0 to +25.0); nothing where one of them lacks the column."""
    if column not in first.scores or column not in other.scores:
        return Text()
    if column in first.of_other_prompts(other):
        return Text("other prompts", "red")
    change, low, high = paired_difference(first, other, column)
    return Text(_spread(column, change, low, high, sign="+"), _color(low, high))


def _spread(column: str, mean: float, low: float, high: float, *, sign: str = "") -> str:
    places = decimals(column)
    shown = ((100 * value, 1) if places is None else (value, places) for value in (mean, low, high))
    return "{} ({} to {})".format(*(f"{value:{sign}.{digits}f}" for value, digits in shown))


def _color(low: float, high: float) -> str:
    return "green" if low > 0 else "red" if high < 0 else ""


def _caption(evaluations: Iterable[Evaluation]) -> str:
    columns = (column for them in evaluations for column in them.scores if decimals(column) is not None)
    others = dict.fromkeys("rewards" if "reward" in column else column for column in columns)
    return f"percent{', but for ' if others else ''}{' and '.join(others)}; 95 % intervals"
