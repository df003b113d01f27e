"""What a run learned: sections of its held-out quality, its rewards, its matches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.evaluate.quality import in_words
from grpo.play.record import Match
from grpo.workbench.report import charts
from grpo.workbench.report.boards import answer_card, game_card
from grpo.workbench.report.page import Picture, Section, Table
from grpo.workbench.report.read import Run, points
from grpo.workbench.report.wording import between, cell, fixed
from grpo.workbench.sizes import Record, figure

INTERVAL_ENDS = ("/low", "/high")
"""What a metric's name goes on with where the ends of its 95 % interval were logged."""


def metric_names(records: Iterable[Record], prefix: str, suffix: str = "") -> list[str]:
    """Metrics with this prefix, without the ends of intervals, in the order in which they were written."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefix))
    return [name for name in names if name.endswith(suffix) and not name.endswith(INTERVAL_ENDS)]


def interval(record: Record, name: str) -> tuple[float, float] | None:
    low, high = (figure(record, f"{name}{end}") for end in INTERVAL_ENDS)
    return None if low is None or high is None else (low, high)


def with_interval(record: Record, name: str) -> str:
    """0.788 (0.741 to 0.835), or without what is in brackets."""
    text, ends = cell(figure(record, name), fixed), interval(record, name)
    return f"{text} ({between(ends)})" if ends else text


def heldout_picture(title: str, curves: Mapping[str, tuple[Run, str]]) -> Picture | None:
    """Metrics over evaluations by label, with their intervals where each evaluation has one."""
    bands, drawn = {}, {}
    for label, (run, name) in curves.items():
        rated = [record for record in run.evaluations if figure(record, name) is not None]
        drawn[label] = points(rated, "step", name)
        ends = [both for record in rated if (both := interval(record, name))]
        if ends and len(ends) == len(rated):
            bands[label] = ([low for low, _ in ends], [high for _, high in ends])
    return charts.line(title, drawn, x="step", y="mean", bands=bands, looks=dict.fromkeys(drawn, "o-"))


def heldout(run: Run) -> Section:
    """Evaluations, eval_TASK[/COLUMN]: the first and the last in a table, all of them as curves by task."""
    names = metric_names(run.evaluations, "eval_")
    shown = [*run.evaluations[:1], *run.evaluations[1:][-1:]]
    rows = [(name[len("eval_") :], *(with_interval(record, name) for record in shown)) for name in names]
    tasks: dict[str, dict[str, tuple[Run, str]]] = {}
    for name in names:
        task, _, column = name.removeprefix("eval_").removesuffix("/mean").partition("/")
        tasks.setdefault(task, {})[column.replace("_", " ")] = (run, name)
    caption = (
        "Greedy answers to the same held-out prompts each time; in brackets 95 % intervals over prompts."
    )
    table = Table(("column", *(f"step {record.get('step')}" for record in shown)), rows, caption)
    pictures = [heldout_picture(f"Held-out {task}", curves) for task, curves in tasks.items()]
    return Section("Held-out quality", tables=[table], pictures=pictures)


def before_after(run: Run) -> Section:
    """What was measured before training and after it, and some answers, as `make demo` does."""
    tables = [
        Table((mode, "before", "after", "change", "95 %"), [
            (each.name, f"{each.before:.1f}", f"{each.after:.1f}", f"{each.change:+.1f}",
             f"{each.low:+.1f} to {each.high:+.1f}")
            for each in run.changes if each.mode == mode
        ], "Percent; the reward in hundredths.")
        for mode in dict.fromkeys(each.mode for each in run.changes)
    ]  # fmt: skip
    answers = [
        answer_card(f"position {number}, {when}", f"example {number} {when}", example.prompt, text)
        for number, example in enumerate(run.examples, start=1)
        for when, text in (("before", example.before), ("after", example.after))
    ]
    words = in_words(run.changes) if run.changes else ()
    return Section("Before and after", words, tables=tables, cards=answers, row=2)


def games(matches: Sequence[Match]) -> Section:
    """All matches of this model in a table, and how the last game ended."""
    columns = (
        "against", "temperature", "nodes", "illegal moves", "games", "won", "drawn", "lost", "score",
        "Elo difference", "illegal a game", "first at",
    )  # fmt: skip
    how = ("temperature", "nodes", "illegal_moves")
    rows = [
        (
            match.players[1], *(str(match.settings.get(name) or cell(None)) for name in how),
            *map(str, (match.score.games, *match.score)), match.score.share_in_words(),
            match.score.elo_in_words(), f"{match.illegal_a_game(0):.2f}", cell(match.first_illegal(0)),
        )
        for match in matches
    ]  # fmt: skip
    caption = (
        "Intervals are 95 %: one that holds 50 % or 0 Elo is too close to tell. Illegal answers, and the "
        "half-move of the first one (median), are this model's."
    )
    last = [game_card(match) for match in matches[-1:]]
    return Section("Games", tables=[Table(columns, rows, caption)], cards=last)


def over_steps(run: Run, title: str, metrics: Mapping[str, str], y: str, **how: Any) -> Picture | None:
    curves = {label: points(run.steps, "step", name) for label, name in metrics.items()}
    return charts.line(title, curves, x="step", y=y, **how)


def rewards(run: Run) -> Section:
    """The reward by function, and each function's components: rewards/FUNCTION[/COMPONENT]/mean."""
    functions: dict[str, str] = {}
    components: dict[str, dict[str, str]] = {}
    for name in metric_names(run.steps, "rewards/", "/mean"):
        _, function, *component = name.replace("_", " ").split("/")[:-1]
        of = components.setdefault(function, {}) if component else functions
        of[component[0] if component else function] = name
    unit, caption = "mean of a step", "What advantages are made of."
    drawn = [over_steps(run, "Reward", functions | {"all": "reward"}, unit)]
    drawn += [over_steps(run, f"Components of {name}", each, unit) for name, each in components.items()]
    drawn.append(over_steps(run, "Spread within groups", {"": "reward_std"}, "standard deviation",
                             from_zero=True, caption=caption))  # fmt: skip
    if not any(drawn):
        drawn.append(over_steps(run, "Loss", {"": "loss"}, "loss", zoom=True))
    return Section("Reward", pictures=drawn)
