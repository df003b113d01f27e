"""The page of a training run: what it learned, what it cost, and what it wrote; and of several side by side.

Left out of several: curves but held-out quality, which `tensorboard --logdir runs` lays over each other, and
statistics over runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from grpo.evaluate.quality import in_words
from grpo.memory.budget import GB, readable
from grpo.workbench.report import charts
from grpo.workbench.report.boards import answer_card, cards, game_card
from grpo.workbench.report.charts import curve
from grpo.workbench.report.page import Fact, Page, Picture, Section, Table, page, settings_section
from grpo.workbench.report.read import Run, points
from grpo.workbench.report.wording import NOTHING, between, cell, duration, fixed, number, setting
from grpo.workbench.sizes import Record, figure

INTERVAL_ENDS = ("/low", "/high")
"""What a metric's name goes on with where the ends of its 95 % interval were logged."""
_POLICY = (
    ("KL to the reference", {"": "kl"}, "nats a token", ""),
    ("Shares clipped", {"ratio, below": "clip_ratio/low_mean", "ratio, above": "clip_ratio/high_mean",
                        "cut off": "completions/clipped_ratio"}, "share",
     "Of tokens, those with a clipped ratio; of completions, those cut off."),
    ("Lengths of completions", {"mean": "completions/mean_length", "longest": "completions/max_length",
                                "shortest": "completions/min_length"}, "tokens", ""),
    ("Learning rate", {"": "learning_rate"}, "rate", ""),
    ("Norm of the gradient", {"": "grad_norm"}, "norm", "Before it was clipped."),
    ("Entropy", {"": "entropy"}, "nats a token", ""),
)  # fmt: skip
"""Title, metrics by label, unit, caption."""
_SHOWN = (
    "Completions of the last logged steps: of each task the three best, then the three worst, by reward. An "
    "arrow is a move, red where it is illegal; squares of a predicted position are red where it is wrong."
)
_OWN = ("name", "runs_dir", "resume", "log_level", "trackers")
_ENDS = (
    "From the first tenth of the steps to the last, or the first evaluation to the last; of KL the last "
    "step's, of times the median."
)
_CHANCE = (
    "The last evaluation. Whether a difference is chance is told on the same prompts, by grpo-lean evaluate: "
    "--json of the one, --before of the other."
)
_HELDOUT = "Where prompts, heldout-share, eval-prompts or seed differ, held-out prompts may not be the same."


def run_page(run: Run) -> Page:
    wanted, done = figure(run.settings, "steps"), len(run.steps)
    settings = [
        f"{name.replace('_', ' ')} {setting(name, run.settings[name])}"
        for name in ("model", "batch_size", "group_size", "learning_rate", "kl_coef") if name in run.settings
    ]  # fmt: skip
    times = _phases(run) | {"all": "step_time"}
    return page(
        f"Training run: {run.name}",
        f"{done:,} steps{f' of {wanted:,.0f}' if wanted and wanted > done else ''}; {', '.join(settings)}.",
        Section("What it says", facts=list(facts(run))),
        _before_after(run),
        _games(run),
        _heldout(run),
        Section("Reward", pictures=_rewards(run)),
        Section("Policy", pictures=[
            _over_steps(run, title, metrics, unit, from_zero=True, caption=caption)
            for title, metrics, unit, caption in _POLICY
        ]),
        Section("What it wrote", [_SHOWN] if run.completions else (), cards=cards(run)),
        Section("Time", pictures=[
            _over_steps(run, "Where a step's time goes", times, "seconds", from_zero=True)
        ]),
        _memory(run),
        settings_section("Settings", run.settings),
        Section("What is missing", run.missing),
    )  # fmt: skip


def facts(run: Run) -> Iterator[Fact]:
    """What changed and what it cost, as far as it was logged."""
    learned = "reward" if run.logged("reward") else "loss"  # which of GRPO says nothing
    if values := run.logged(learned):
        count = max(1, len(values) // 10)
        ends = f"{fixed(fmean(values[:count]))} → {fixed(fmean(values[-count:]))}"
        note = f"Means of the first and the last {count} of {len(values)} steps."
        yield Fact(f"Training {learned}", ends, "", note)
    name = f"eval_{learned}"
    if rated := [record for record in run.evaluations if figure(record, name) is not None]:
        first, last = rated[0], rated[-1]
        ends = f"{cell(figure(first, name), fixed)} → {cell(figure(last, name), fixed)}"
        note = f"At step {first.get('step')} and at step {last.get('step')}"
        note += "; the 95 % interval is the last one's." if interval(last, name) else "."
        yield Fact(f"Held-out {learned}", ends, interval(last, name), note)
    if kl := run.logged("kl"):
        note = f"At the end; the highest of a step was {number(max(kl), 2)}."
        yield Fact("KL to the reference", f"{number(kl[-1], 2)} nats a token", "", note)
    if dull := fmean(run.logged("frac_reward_zero_std") or [0.0]):
        note = "They teach nothing but the KL." if run.settings.get("kl_coef") else "They teach nothing."
        yield Fact("Groups of equal rewards", f"{dull:.0%}", "", note)
    if skipped := sum(run.logged("skipped")):
        yield Fact("Updates left out", number(skipped), "", "Their gradients were not finite.")
    if times := run.logged("step_time"):
        seconds = {phase: sum(run.logged(name)) for phase, name in _phases(run).items()}
        ranked = sorted(((time, phase) for phase, time in seconds.items() if time), reverse=True)
        shares = ((phase, time / sum(seconds.values())) for time, phase in ranked)
        note = ", ".join(f"{phase} {share:.0%}" for phase, share in shares if share >= 0.01)
        yield Fact("Time of a step", duration(median(times)), f"{duration(sum(times))} in all", note)
    if run.memory:
        retried = [f"{line['phase']} at step {line['step']}" for line in run.memory if line.get("retries")]
        note = f"And went on with fewer rows: {', '.join(retried[:5])}." if retried else ""
        yield Fact("Phases that ran out of memory", number(len(retried)), "", note)
    if "leak" in run.leak:
        yield Fact("Leak test", "memory grew" if run.leak["leak"] else "no leak")


def metric_names(records: Iterable[Record], prefix: str, suffix: str = "") -> list[str]:
    """Metrics with this prefix, without the ends of intervals, in the order in which they were written."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefix))
    return [name for name in names if name.endswith(suffix) and not name.endswith(INTERVAL_ENDS)]


def interval(record: Record, name: str) -> str:
    """0.741 to 0.835, the 95 % interval of a metric; "" where it was not logged."""
    low, high = (figure(record, f"{name}{end}") for end in INTERVAL_ENDS)
    return "" if low is None or high is None else between(low, high)


def _before_after(run: Run) -> Section:
    """What was measured before training and after it, and some answers, as `make demo` does."""
    tables = [
        Table([
            {mode: change.name, "before": f"{change.before:.1f}", "after": f"{change.after:.1f}",
             "change": f"{change.change:+.1f}", "95 %": f"{change.low:+.1f} to {change.high:+.1f}"}
            for change in run.changes if change.mode == mode
        ], "Percent; the reward in hundredths.")
        for mode in dict.fromkeys(change.mode for change in run.changes)
    ]  # fmt: skip
    answers = [
        answer_card(f"position {count}, {when}", f"example {count} {when}", example.prompt, text)
        for count, example in enumerate(run.examples, start=1)
        for when, text in (("before", example.before), ("after", example.after))
    ]
    words = in_words(run.changes) if run.changes else ()
    return Section("Before and after", words, tables=tables, cards=answers, row=2)


def _games(run: Run) -> Section:
    """All matches of this model in a table, and how the last game ended."""
    rows = [
        {"against": match.players[1]}
        | {name.replace("_", " "): match.settings.get(name) or NOTHING
           for name in ("temperature", "nodes", "illegal_moves")}
        | {"games": str(match.score.games), "won": str(match.score.wins), "drawn": str(match.score.draws),
           "lost": str(match.score.losses), "score": match.score.share_in_words(),
           "Elo difference": match.score.elo_in_words(), "illegal a game": f"{match.illegal_a_game(0):.2f}",
           "first at": cell(match.first_illegal(0))}
        for match in run.matches
    ]  # fmt: skip
    caption = (
        "Intervals are 95 %: one that holds 50 % or 0 Elo is too close to tell. Illegal answers, and the "
        "half-move of the first one (median), are this model's."
    )
    last = [game_card(match) for match in run.matches[-1:]]
    return Section("Games", tables=[Table(rows, caption)], cards=last)


def _heldout(run: Run) -> Section:
    """Evaluations, eval_TASK[/COLUMN]: the first and the last in a table, all of them as curves by task."""
    ends = {f"step {record.get('step')}": record for record in (*run.evaluations[:1], *run.evaluations[-1:])}
    tasks: dict[str, dict[str, charts.Curve]] = {}
    for metric in metric_names(run.evaluations, "eval_"):
        task, _, column = metric.removeprefix("eval_").removesuffix("/mean").partition("/")
        drawn = curve(run.evaluations, "step", metric, "o-")
        tasks.setdefault(task, {})[column.replace("_", " ")] = drawn
    caption = (
        "Greedy answers to the same held-out prompts each time; in brackets 95 % intervals over prompts."
    )
    pictures = [charts.line(f"Held-out {task}", drawn, x="step", y="mean") for task, drawn in tasks.items()]
    return Section("Held-out quality", tables=[_heldout_table(ends, caption)], pictures=pictures)


def _heldout_table(evaluations: Mapping[str, Record], caption: str) -> Table:
    """Columns of evaluations by heading: 0.788 (0.741 to 0.835), or without what is in brackets."""
    rows = []
    for metric in metric_names(evaluations.values(), "eval_"):
        row = {"column": metric.removeprefix("eval_")}
        for heading, record in evaluations.items():
            ends = interval(record, metric)
            row[heading] = cell(figure(record, metric), fixed) + (f" ({ends})" if ends else "")
        rows.append(row)
    return Table(rows, caption)


def _rewards(run: Run) -> list[Picture | None]:
    """The reward by function, and each function's components: rewards/FUNCTION[/COMPONENT]/mean."""
    parts: dict[str, dict[str, str]] = {"": {}}
    for name in metric_names(run.steps, "rewards/", "/mean"):
        function, _, component = name[len("rewards/") : -len("/mean")].replace("_", " ").partition("/")
        parts.setdefault(function if component else "", {})[component or function] = name
    unit, caption = "mean of a step", "What advantages are made of."
    drawn = [_over_steps(run, "Reward", parts.pop("") | {"all": "reward"}, unit)]
    drawn += [_over_steps(run, f"Components of {name}", metrics, unit) for name, metrics in parts.items()]
    drawn.append(_over_steps(run, "Spread within groups", {"": "reward_std"}, "standard deviation",
                             from_zero=True, caption=caption))  # fmt: skip
    return drawn if any(drawn) else [_over_steps(run, "Loss", {"": "loss"}, "loss", zoom=True)]


def _over_steps(run: Run, title: str, metrics: Mapping[str, str], y: str, **how: Any) -> Picture | None:
    """Metrics by label; a phase has its colour."""
    curves = {label: curve(run.steps, "step", name, color=charts.PHASE_COLORS.get(label))
              for label, name in metrics.items()}  # fmt: skip
    return charts.line(title, curves, x="step", y=y, **how)


def _phases(run: Run) -> dict[str, str]:
    """The metric of each phase's seconds."""
    names = metric_names(run.steps, "timing/")
    return {name.removeprefix("timing/").removesuffix("_s"): name for name in names}


def _memory(run: Run) -> Section:
    """By phase the pass whose tensors added most, beside what had been predicted for it."""
    phases: dict[str, list[Record]] = {}
    for record in run.memory:
        phases.setdefault(str(record.get("phase")), []).append(record)
    rows, tensors, process = [], {}, {}
    for phase, records in phases.items():
        color = charts.PHASE_COLORS.get(phase)
        fullest = max(records, key=lambda record: figure(record, "added_bytes") or 0.0)
        predicted, measured = figure(fullest, "predicted_bytes"), figure(fullest, "added_bytes")
        most = max((value for (value,) in points(records, "process_bytes")), default=None)
        rows.append({
            "phase": phase, "rows at once": cell(figure(fullest, "rows")),
            "tensors, predicted": cell(predicted, readable), "measured": cell(measured, readable),
            "predicted is off by":
                f"{100 * (predicted / measured - 1):+.1f} %" if predicted and measured else NOTHING,
            "process, at most": cell(most or None, readable),
            "retries": number(sum(record.get("retries") or 0 for record in records)),
        })  # fmt: skip
        tensors[phase] = curve(records, "step", "added_bytes", "o", unit=GB, color=color)
        tensors[f"_{phase}"] = curve(records, "step", "predicted_bytes", "--", unit=GB, color=color)
        process[phase] = curve(records, "step", "process_bytes", unit=GB, color=color)
    caption = "Of the step in which a phase's tensors took most; predicted before it was measured."
    pictures = [
        charts.line("Tensors by phase", tensors, x="step", y="GB, peak", from_zero=True,
                    caption="What each phase added: dots measured, dashed what had been predicted."),
        charts.line("Memory of the process", process, x="step", y="GB, peak",
                    caption="By phase. 1 GB is 2^30 bytes."),
    ]  # fmt: skip
    return Section("Memory", tables=[Table(rows, caption)], pictures=pictures)


def runs_page(runs: Sequence[Run]) -> Page:
    """The facts of all beside each other, their last evaluations, and where their settings differ."""
    curves = {run.name: curve(run.evaluations, "step", "eval_reward", "o-") for run in runs}
    by_run = {run.name: {fact.what: fact.value for fact in facts(run)} for run in runs}
    names = dict.fromkeys(what for values in by_run.values() for what in values)
    rows = [{"": what} | {run: values.get(what, NOTHING) for run, values in by_run.items()} for what in names]
    last = {run.name: run.evaluations[-1] if run.evaluations else {} for run in runs}
    return page(
        f"Runs compared: {', '.join(run.name for run in runs)}",
        ", ".join(f"{len(run.steps):,} steps of {run.name}" for run in runs),
        Section("How they ended", tables=[Table(rows, _ENDS)]),
        Section("Held-out quality", tables=[_heldout_table(last, _CHANCE)],
                pictures=[charts.line("Held-out reward", curves, x="step", y="mean")]),
        Section("Where their settings differ", tables=[Table(_differing(runs), _HELDOUT)]),
        Section("What is missing", [f"{run.name}: {text}" for run in runs for text in run.missing]),
    )  # fmt: skip


def _differing(runs: Sequence[Run]) -> list[dict[str, str]]:
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _OWN)
    values = {name: {run.name: setting(name, run.settings.get(name)) for run in runs} for name in names}
    return [
        {"setting": f"--{name.replace('_', '-')}"} | row
        for name, row in values.items() if len(set(row.values())) > 1
    ]  # fmt: skip
