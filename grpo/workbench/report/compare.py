"""Several runs side by side: how they ended, their held-out curves, and where their settings differ.

Left out: other curves, which `tensorboard --logdir runs` lays over each other, and statistics over runs.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median

from grpo.workbench.report.page import Page, Section, Table, page
from grpo.workbench.report.quality import heldout_picture, metric_names, with_interval
from grpo.workbench.report.read import Run, points
from grpo.workbench.report.wording import NOTHING, duration, fixed, number, setting

_OWN = ("name", "runs_dir", "resume", "log_level", "trackers")
_CHANCE = (
    "Held-out: the last evaluation. Whether a difference is chance is told on the same prompts, by grpo-lean "
    "evaluate: --json of the one, --before of the other. Training: the last tenth of the steps. Time: the "
    "median."
)
_HELDOUT = "Where prompts, heldout-share, eval-prompts or seed differ, held-out prompts may not be the same."


def runs_page(runs: Sequence[Run]) -> Page:
    curves = {run.name: (run, "eval_reward") for run in runs}
    return page(
        f"Runs compared: {', '.join(run.name for run in runs)}",
        ", ".join(f"{len(run.steps):,} steps of {run.name}" for run in runs),
        Section("How they ended", tables=[_ends_table(runs)]),
        Section("Held-out quality", pictures=[heldout_picture("Held-out reward", curves)]),
        Section("Where their settings differ", tables=[_differing(runs)]),
        Section("What is missing", [f"{run.name}: {text}" for run in runs for text in run.missing]),
    )


def _ends_table(runs: Sequence[Run]) -> Table:
    """What a run has not logged is a dash."""

    def over_steps(name: str, how: Callable[[list[float]], str]) -> list[str]:
        logged = [points(run.steps, "step", name)[1] for run in runs]
        return [how(values) if values else NOTHING for values in logged]

    def end(values: list[float]) -> float:
        return fmean(values[-max(1, len(values) // 10) :])

    steps = [step for run in runs for step in run.steps]
    rows = [
        (f"held-out {name.removeprefix('eval_')}",
         *(with_interval(run.evaluations[-1], name) if run.evaluations else NOTHING for run in runs))
        for name in metric_names((record for run in runs for record in run.evaluations), "eval_")
    ]  # fmt: skip
    rows += [
        (f"training {name.removesuffix('/mean')}", *over_steps(name, lambda values: fixed(end(values))))
        for name in ("reward", *metric_names(steps, "rewards/", "/mean"))
    ]
    rows.append(("training KL", *over_steps("kl", lambda values: number(end(values), 2))))
    rows.append(("time of a step", *over_steps("step_time", lambda values: duration(median(values)))))
    return Table(("", *(run.name for run in runs)), rows, _CHANCE)


def _differing(runs: Sequence[Run]) -> Table:
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _OWN)
    rows = [
        (f"--{name.replace('_', '-')}", *(setting(name, run.settings.get(name)) for run in runs))
        for name in names
    ]
    return Table(
        ("setting", *(run.name for run in runs)), [row for row in rows if len(set(row[1:])) > 1], _HELDOUT
    )
