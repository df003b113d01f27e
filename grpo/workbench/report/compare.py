"""Several runs, or several sweeps, side by side. What one of them lacks is compared among the others.

Left out: statistics over runs. Runs that differ in more than their seed are no sample of anything.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from grpo.workbench.report.costs import over_sizes
from grpo.workbench.report.figures import Curve, draw
from grpo.workbench.report.findings import best_by_quality, fastest, quality_text, trade_off
from grpo.workbench.report.gallery import card, reward_weights
from grpo.workbench.report.read import Record, Run, Size, Sweep, figure, points
from grpo.workbench.report.run import EVAL, EVAL_REWARD, ends, heldout_curve, with_interval
from grpo.workbench.report.sections import Card, Figure, Page, Section, Table
from grpo.workbench.report.steps import INTERVAL_ENDS, metric_names, slug
from grpo.workbench.report.wording import NOTHING, capital, duration, fixed, listed, plural, short, value_text

POSITIONS = 4
"""Prompts whose completions are shown side by side."""
_OWN = ("name", "runs_dir", "resume", "log_level", "trackers")
_OF_HELDOUT = ("prompts", "heldout_share", "eval_prompts", "seed")
_DRAWN = {
    "reward": ("Reward", "mean of a step"), "kl": ("KL to the reference", "nats a token"),
    "completions/mean_length": ("Mean length of completions", "tokens"),
    "clip_ratio/region_mean": ("Tokens clipped", "share"), "learning_rate": ("Learning rate", "rate"),
    "step_time": ("Time of a step", "seconds"), "memory/peak_gb": ("Peak memory", "GB"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ runs


def runs_page(runs: Sequence[Run]) -> Page:
    """Two or more runs: how they ended, where their settings differ, their curves, the same prompts."""
    sections = [
        Section("What it says", verdict(runs)),
        Section("How they ended", tables=[_ends_table(runs)]),
        Section("Curves", figures=_curves(runs)),
        _same_prompts(runs),
        Section("Where their settings differ", *_settings(runs)),
        Section("What is missing", lacking(runs)),
    ]
    counts = listed(f"{plural(len(run.steps), 'step')} of {run.name}" for run in runs)
    title = f"Runs compared: {listed(run.name for run in runs)}"
    return Page(title, f"{counts}.", [each for each in sections if not each.empty])


def verdict(runs: Sequence[Run]) -> list[str]:
    """Whose held-out reward ended highest, and by how much."""
    lasts = [(run, run.evaluations[-1]) for run in runs if run.evaluations]
    known = [(value, run, last) for run, last in lasts if (value := figure(last, EVAL_REWARD)) is not None]
    if len(known) < 2:
        return ["Fewer than two of the runs have a held-out reward, so that their quality does not compare."]
    best, winner, last = max(known, key=lambda each: each[0])
    said = [f"{winner.name} ended with the highest held-out reward, {with_interval(last, EVAL_REWARD)}."]
    for value, run, its in known:
        if run is winner:
            continue
        if value == best:
            said.append(f"{run.name} ended as high.")
        else:
            said.append(f"{run.name} ended {fixed(best - value)} lower, {with_interval(its, EVAL_REWARD)}.")
    if any(value < best for value, *_ in known):
        said.append(
            "Whether by chance is told by the difference on the same prompts, which grpo-lean evaluate "
            "gives: --json of the one, --before of the other."
        )
    different = [
        name for name in _OF_HELDOUT if len({value_text(run.settings.get(name)) for run in runs}) > 1
    ]
    if different:
        said.append(f"They differ in {listed(different)}: their held-out prompts may not be the same.")
    return said


def _ends_table(runs: Sequence[Run]) -> Table:
    def last(name: str) -> Callable[[Run], str]:
        return lambda run: with_interval(run.evaluations[-1], name) if run.evaluations else NOTHING

    def of_steps(name: str, how: Callable[[Sequence[float]], str]) -> Callable[[Run], str]:
        def text(run: Run) -> str:
            _, values = points(run.steps, "step", name)
            return how(values) if values else NOTHING

        return text

    steps = [step for run in runs for step in run.steps]
    evaluated = metric_names((record for run in runs for record in run.evaluations), EVAL)
    rewarded = ["reward", *(name for name in metric_names(steps, "rewards/") if name.endswith("/mean"))]
    rows = [(f"held-out {name.removeprefix(EVAL)}", *map(last(name), runs)) for name in evaluated]
    rows += [
        (f"training {name.removesuffix('/mean')}", *map(of_steps(name, lambda v: fixed(ends(v)[1])), runs))
        for name in rewarded
    ]
    rows.append(("training kl", *map(of_steps("kl", lambda v: short(ends(v)[1])), runs)))
    rows.append(("a step's time", *map(of_steps("step_time", lambda v: duration(median(v))), runs)))
    caption = (
        "Held-out: the last evaluation, with its 95 % interval where that was logged. Training: the mean of "
        "the last tenth of the steps. Time: the median."
    )
    return Table(("", *(run.name for run in runs)), rows, caption)


def _curves(runs: Sequence[Run]) -> list[Figure]:
    heldout = [heldout_curve(run, EVAL_REWARD, run.name) for run in runs]
    figures = draw("heldout-reward", "Held-out reward", heldout, x="step", y="mean")
    for name, (title, y) in _DRAWN.items():
        curves = [Curve(run.name, *points(run.steps, "step", name)) for run in runs]
        figures += draw(slug(name), title, curves, x="step", y=y)
    return figures


def _same_prompts(runs: Sequence[Run]) -> Section:
    """Of the last step that all runs logged, completions of prompts that all of them had."""
    steps = set.intersection(*({figure(each, "step") for each in run.completions} for run in runs)) - {None}
    if not steps:
        return Section("The same prompts")
    last = max(step for step in steps if step is not None)
    written: list[dict[str, Record]] = [
        {str(each.get("prompt")): each for each in reversed(run.completions) if figure(each, "step") == last}
        for run in runs
    ]
    shared = [prompt for prompt in reversed(written[0]) if all(prompt in each for each in written)]
    shown: list[Card] = [
        card(each[prompt], f"card-{place}-{index}", reward_weights(run), run=run.name)
        for place, prompt in enumerate(shared[:POSITIONS])
        for index, (run, each) in enumerate(zip(runs, written, strict=True))
    ]
    told = [f"What each wrote to the same prompts at step {last:.0f}, the last that all of them logged."]
    return Section("The same prompts", told if shown else (), cards=shown, row=len(runs))


def _settings(runs: Sequence[Run]) -> tuple[list[str], list[Table]]:
    """Sentences, and a table of the settings that are not the same."""
    known = [run for run in runs if run.settings]
    if len(known) < 2:
        return [], []
    names = dict.fromkeys(name for run in known for name in run.settings if name not in _OWN)
    rows = [
        (f"--{name.replace('_', '-')}", *(value_text(run.settings.get(name)) for run in known))
        for name in names
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return ["All settings are the same, so that differences are chance or the machine's."], []
    return [], [Table(("setting", *(run.name for run in known)), differing)]


def lacking(runs: Sequence[Run]) -> list[str]:
    """Metrics that some of the runs have and others have not, and what is missing in each."""
    logged = {run.name: _metrics(run) for run in runs}
    said = []
    for run in runs:
        others = sorted(set().union(*logged.values()) - logged[run.name])
        if others:
            said.append(f"{run.name} has no {', '.join(others)}.")
        said += [f"{run.name}: {text}" for text in run.missing]
    return said


def _metrics(run: Run) -> set[str]:
    names = {name for record in (*run.steps, *run.evaluations) for name in record}
    return {"intervals" if name.endswith(INTERVAL_ENDS) else name for name in names}


# ---------------------------------------------------------------------------------------------- sweeps


def sweeps_page(sweeps: Sequence[Sweep]) -> Page:
    """Two or more sweeps: their best sizes, quality and throughput over batch size."""
    bests: Iterable[tuple[str, Callable[[Sweep], Size | None]]] = (
        ("best by quality", best_by_quality), ("fastest", fastest), ("trade-off", trade_off),
    )  # fmt: skip
    rows = [(what, *(_size_text(sweep, choose(sweep)) for sweep in sweeps)) for what, choose in bests]
    alike = len({(sweep.quality, sweep.unit) for sweep in sweeps}) == 1
    first = sweeps[0]
    figures = [
        *draw("quality", f"{capital(first.quality)} by batch size", _curves_of(sweeps, "final_heldout"),
              x="batch size", y=first.quality, sizes=_all_sizes(sweeps)),
        *draw("throughput", "Throughput", _curves_of(sweeps, "rate"), x="batch size",
              y=f"{first.unit} a second", sizes=_all_sizes(sweeps), from_zero=True),
        *draw("seconds", "Training time", _curves_of(sweeps, "seconds"), x="batch size", y="seconds",
              sizes=_all_sizes(sweeps), from_zero=True),
    ]  # fmt: skip
    kinds = listed(f"{sweep.name} has {sweep.quality} over {sweep.unit}" for sweep in sweeps)
    missing = [f"{sweep.name}: {text}" for sweep in sweeps for text in sweep.missing]
    sections = [
        Section("What it says", [] if alike else [f"They do not measure the same: {kinds}."],
                [Table(("", *(sweep.name for sweep in sweeps)), rows)]),
        Section("Curves", figures=figures if alike else ()),
        Section("What is missing", missing),
    ]  # fmt: skip
    counts = listed(f"{plural(len(sweep.finished), 'size')} of {sweep.name}" for sweep in sweeps)
    title = f"Sweeps compared: {listed(sweep.name for sweep in sweeps)}"
    return Page(title, f"{counts} finished.", [each for each in sections if not each.empty])


def _size_text(sweep: Sweep, size: Size | None) -> str:
    if size is None:
        return NOTHING
    told = [str(size.batch_size)]
    told += [] if size.final_heldout is None else [quality_text(sweep, size.final_heldout)]
    told += [] if size.seconds is None else [duration(size.seconds)]
    return ", ".join(told)


def _curves_of(sweeps: Sequence[Sweep], name: str) -> list[Curve]:
    return [over_sizes(sweep.name, sweep.finished, name) for sweep in sweeps]


def _all_sizes(sweeps: Sequence[Sweep]) -> list[int]:
    return sorted({size.batch_size for sweep in sweeps for size in sweep.finished})
