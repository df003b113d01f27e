"""The content of a run's page: what it learned, what it cost, what it wrote; and of the page of several runs.

Left out of the latter: curves but held-out quality, which `tensorboard --logdir runs` lays over each other,
and statistics over runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from grpo.evaluate.quality import in_words
from grpo.logs.metrics import chosen_rows
from grpo.workbench.report.boards import answer_card, completion_cards, game_card, logged_completions
from grpo.workbench.report.read import RunFolder, curves, points, prefix_by_run
from grpo.workbench.report.text import NOTHING, Fact, duration, mean, number, show, show_figure, show_interval
from grpo.workbench.sizes import Record, figure

MOST_COMPLETIONS = 300
"""Logged completions that stand on the page."""
_LEDE = ("model", "batch_size", "group_size", "learning_rate", "kl_coef")
_OF_THE_RUN = ("--name", "--runs-dir", "--resume", "--log-level", "--trackers")
"""Settings in which any two runs differ."""


def run_content(run: RunFolder) -> dict[str, Any]:
    """Returns the values that run.html.j2 shows."""
    run = replace(run, steps=with_token_rates(run.steps))
    planned, done = figure(run.settings, "steps"), len(run.steps)
    steps = f"{done:,} steps of {planned:,.0f}" if planned and planned > done else f"{done:,} steps"
    settings = [
        f"{name.replace('_', ' ')} {show(run.settings[name])}" for name in _LEDE if name in run.settings
    ]
    ends = {f"step {record.get('step')}": record for record in (*run.evaluations[:1], *run.evaluations[-1:])}
    answers = [
        (f"position {count}, {when}", f"{when} {count}", example.prompt, getattr(example, when))
        for count, example in enumerate(run.examples, start=1)
        for when in ("before", "after")
    ]
    logged = logged_completions(run)
    phases: dict[str, list[Record]] = {}
    for line in run.memory:
        phases.setdefault(str(line.get("phase")), []).append(line)
    return {
        "summary": f"{steps}; {', '.join(settings)}.",
        "run": run,
        "facts": [*facts(run)],
        "in_words": in_words(run.changes) if run.changes else [],
        "answers": [answer_card(*answer) for answer in answers],
        "heldout": heldout_rows(ends),
        "changes": [
            {**change._asdict(), "change/low": change.low, "change/high": change.high}
            for change in run.changes
        ],
        "completions": completion_cards(run),
        "logged": [logged[row] for row in chosen_rows(MOST_COMPLETIONS, len(logged))],
        "rewards": _early_and_late(logged),
        "starts": _side_by_side(
            "", {f"after step {start.get('step')}": _shown(start) for start in run.starts}
        ),
        "last_game": [game_card(match) for match in run.matches[-1:]],
        "phases": [*map(_fullest, phases.values())],
        "passes": prefix_by_run(phases, "step"),
    }


def runs_content(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Returns the values that runs.html.j2 shows: how runs ended, and where their settings differ."""
    settings = {
        run.name: {f"--{name.replace('_', '-')}": show(value, name) for name, value in run.settings.items()}
        for run in runs
    }
    differing = [row for row in _side_by_side("setting", settings) if len({*row.values()}) > 2]
    ends = {run.name: {fact.what: fact.value for fact in facts(run)} for run in runs}
    return {
        "summary": ", ".join(f"{len(run.steps):,} steps of {run.name}" for run in runs),
        "ends": _side_by_side("", ends),
        "heldout": heldout_rows({run.name: run.evaluations[-1] if run.evaluations else {} for run in runs}),
        "evaluations": prefix_by_run({run.name: run.evaluations for run in runs}, "step"),
        "differing": [row for row in differing if row["setting"] not in _OF_THE_RUN],
    }


def _side_by_side(heading: str, values: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    """A row for each name in any of the columns `values`."""
    names = dict.fromkeys(name for column in values.values() for name in column)
    return [
        {heading: name} | {run: column.get(name, NOTHING) for run, column in values.items()} for name in names
    ]


def _shown(start: Record) -> dict[str, str]:
    return {name: show(value) for name, value in start.items() if name != "step"}


def with_token_rates(steps: Sequence[Record]) -> list[Record]:
    """The steps with `tokens_per_s`, from the running count of tokens; the first of a start may have none."""
    rated, before = [], 0.0
    for step in steps:
        count, seconds = figure(step, "num_tokens"), figure(step, "step_time")
        if count is not None and seconds:
            step = {**step, "tokens_per_s": (count - before) / seconds}
        before = count or before
        rated.append(step)
    return rated


def _early_and_late(completions: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Rewards of the first and the last fifth of the steps that have completions."""
    steps = sorted({row["step"] for row in completions})
    count = max(1, len(steps) // 5)
    chosen = (
        {"first": set(steps[:count]), "last": set(steps[-count:])} if len(steps) > 1 else {"all": {*steps}}
    )
    return {
        label: [row["reward"] for row in completions if row["step"] in of] for label, of in chosen.items()
    }


def facts(run: RunFolder) -> Iterator[Fact]:
    """Yields what changed and what it cost, as far as it was logged."""
    learned = "reward" if run.logged("reward") else "loss"  # which of GRPO says nothing
    if values := run.logged(learned):
        count = max(1, len(values) // 10)
        note = f"Means of the first and the last {count} of {len(values)} steps."
        yield Fact(f"Training {learned}", _from_to(fmean(values[:count]), fmean(values[-count:])), "", note)
    metric = f"eval_{learned}"
    if rated := [record for record in run.evaluations if figure(record, metric) is not None]:
        first, last = rated[0], rated[-1]
        interval = show_interval(last, metric)
        note = f"At step {first.get('step')} and at step {last.get('step')}"
        note += "; the 95 % interval is the last one's." if interval else "."
        yield Fact(f"Held-out {learned}", _from_to(first[metric], last[metric]), interval, note)
    if kl := run.logged("kl"):
        note = f"At the end; the highest of a step was {max(kl):.2g}."
        yield Fact("KL to the reference", f"{kl[-1]:.2g} nats a token", "", note)
    if equal := fmean(run.logged("frac_reward_zero_std") or [0.0]):
        note = "They teach nothing but the KL." if run.settings.get("kl_coef") else "They teach nothing."
        yield Fact("Groups of equal rewards", f"{equal:.0%}", "", note)
    if skipped := sum(run.logged("skipped")):
        yield Fact("Updates left out", number(skipped), "", "Their gradients were not finite.")
    if times := run.logged("step_time"):
        seconds = {
            phase: sum(run.logged(name)) for phase, name in curves(run.steps, r"timing/(.+)_s").items()
        }
        ranked = sorted(seconds, key=lambda phase: -seconds[phase])
        shares = ((phase, seconds[phase] / (sum(seconds.values()) or 1)) for phase in ranked)
        note = ", ".join(f"{phase} {share:.0%}" for phase, share in shares if share >= 0.01)
        yield Fact("Time of a step", duration(median(times)), f"{duration(sum(times))} in all", note)
    if rates := run.logged("tokens_per_s"):
        yield Fact("Tokens a second", number(round(median(rates))), "", "The median, prompts included.")
    if run.memory:
        retried = [f"{line['phase']} at step {line['step']}" for line in run.memory if line.get("retries")]
        note = f"And went on with fewer rows: {', '.join(retried[:5])}." if retried else ""
        yield Fact("Phases that ran out of memory", number(len(retried)), "", note)
    if "leak" in run.leak:
        yield Fact("Leak test", "memory grew" if run.leak["leak"] else "no leak")


def _from_to(first: float, last: float) -> str:
    return f"{mean(first)} → {mean(last)}"


def heldout_rows(evaluations: Mapping[str, Record]) -> list[dict[str, str]]:
    """A row for each held-out column of the evaluations, which are by heading."""
    return [
        {"column": column} | {heading: show_figure(record, name) for heading, record in evaluations.items()}
        for column, name in curves(evaluations.values(), "eval_(.+)").items()
    ]


def _fullest(lines: Sequence[Record]) -> dict[str, Any]:
    """Returns the pass of a phase whose tensors added most, and how far its prediction was off."""
    fullest = max(lines, key=lambda line: figure(line, "added_bytes") or 0.0)
    predicted, measured = figure(fullest, "predicted_bytes"), figure(fullest, "added_bytes")
    off = f"{100 * (predicted / measured - 1):+.1f} %" if predicted and measured else None
    process = max((size for (size,) in points(lines, "process_bytes")), default=None)
    retries = sum(line.get("retries") or 0 for line in lines)
    return {**fullest, "off": off, "process_bytes": process, "retries": retries}
