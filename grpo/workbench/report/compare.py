"""Several runs side by side: how they ended, their held-out curves, and where their settings differ.

Left out: other curves, which `tensorboard --logdir runs` lays over each other, and statistics over runs.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median

from grpo.workbench.report import charts
from grpo.workbench.report.charts import curve
from grpo.workbench.report.page import Page, Section, Table, page
from grpo.workbench.report.read import Run
from grpo.workbench.report.run import metric_names, with_interval
from grpo.workbench.report.wording import NOTHING, duration, fixed, number, setting

_OWN = ("name", "runs_dir", "resume", "log_level", "trackers")
_CHANCE = (
    "Held-out: the last evaluation. Whether a difference is chance is told on the same prompts, by grpo-lean "
    "evaluate: --json of the one, --before of the other. Training: the last tenth of the steps. Time: the "
    "median."
)
_HELDOUT = "Where prompts, heldout-share, eval-prompts or seed differ, held-out prompts may not be the same."


def runs_page(runs: Sequence[Run]) -> Page:
    curves = {run.name: curve(run.evaluations, "step", "eval_reward", "o-") for run in runs}
    return page(
        f"Runs compared: {', '.join(run.name for run in runs)}",
        ", ".join(f"{len(run.steps):,} steps of {run.name}" for run in runs),
        Section("How they ended", tables=[Table(_ends(runs), _CHANCE)]),
        Section("Held-out quality", pictures=[charts.line("Held-out reward", curves, x="step", y="mean")]),
        Section("Where their settings differ", tables=[Table(_differing(runs), _HELDOUT)]),
        Section("What is missing", [f"{run.name}: {text}" for run in runs for text in run.missing]),
    )


def _ends(runs: Sequence[Run]) -> list[dict[str, str]]:
    """What a run has not logged is a dash."""
    heldout = metric_names((record for run in runs for record in run.evaluations), "eval_")
    rewards = metric_names((step for run in runs for step in run.steps), "rewards/", "/mean")
    last = {run.name: run.evaluations[-1] if run.evaluations else {} for run in runs}
    rows = [
        {"": f"held-out {name.removeprefix('eval_')}"}
        | {run: with_interval(record, name) for run, record in last.items()}
        for name in heldout
    ]
    rows += [
        {"": f"training {name.removesuffix('/mean')}"} | {run.name: _end(run, name, fixed) for run in runs}
        for name in ("reward", *rewards)
    ]
    rows.append({"": "training KL"} | {run.name: _end(run, "kl", number) for run in runs})
    times = {run.name: run.logged("step_time") for run in runs}
    rows.append(
        {"": "time of a step"}
        | {run: duration(median(seconds)) if seconds else NOTHING for run, seconds in times.items()}
    )
    return rows


def _end(run: Run, name: str, how: Callable[[float], str]) -> str:
    """The mean of a metric over the last tenth of the steps."""
    values = run.logged(name)
    return how(fmean(values[-max(1, len(values) // 10) :])) if values else NOTHING


def _differing(runs: Sequence[Run]) -> list[dict[str, str]]:
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _OWN)
    values = {name: {run.name: setting(name, run.settings.get(name)) for run in runs} for name in names}
    return [
        {"setting": f"--{name.replace('_', '-')}"} | row
        for name, row in values.items() if len(set(row.values())) > 1
    ]  # fmt: skip
