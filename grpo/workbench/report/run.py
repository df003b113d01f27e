"""The page of a training run: what it learned, what it cost, and what it wrote."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from grpo.memory.budget import GB, readable
from grpo.workbench.report import charts
from grpo.workbench.report.boards import cards
from grpo.workbench.report.page import Fact, Page, Picture, Section, Table, page, settings_section
from grpo.workbench.report.quality import (
    before_after,
    games,
    heldout,
    interval,
    metric_names,
    over_steps,
    rewards,
)
from grpo.workbench.report.read import Run, points
from grpo.workbench.report.wording import between, cell, duration, fixed, number, setting
from grpo.workbench.sizes import Record, figure

_EXPECTED = {
    "reward": "rewards", "kl": "KL", "step_time": "times", "completions/mean_length": "lengths",
    "learning_rate": "learning rate",
}  # fmt: skip
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


def run_page(run: Run) -> Page:
    wanted, done = figure(run.settings, "steps"), len(run.steps)
    told = [
        f"{name.replace('_', ' ')} {setting(name, run.settings[name])}"
        for name in ("model", "batch_size", "group_size", "learning_rate", "kl_coef") if name in run.settings
    ]  # fmt: skip
    return page(
        f"Training run: {run.name}",
        f"{done:,} steps{f' of {wanted:,.0f}' if wanted and wanted > done else ''}; {', '.join(told)}.",
        Section("What it says", facts=list(facts(run))),
        before_after(run),
        games(run.matches),
        heldout(run),
        rewards(run),
        Section("Policy", pictures=[
            over_steps(run, title, metrics, unit, from_zero=True, caption=caption)
            for title, metrics, unit, caption in _POLICY
        ]),
        Section("What it wrote", [_SHOWN] if run.completions else (), cards=cards(run)),
        Section("Time", pictures=[charts.stack(
            "Where a step's time goes", [step["step"] for step in run.steps], _phase_times(run), "seconds"
        )]),
        _memory(run),
        settings_section("Settings", run.settings),
        Section("What is missing", [*run.missing, *_not_logged(run)]),
    )  # fmt: skip


def facts(run: Run) -> Iterator[Fact]:
    """What changed and what it cost, as far as it was logged."""

    def logged(name: str) -> list[float]:
        return points(run.steps, "step", name)[1]

    learned = "reward" if logged("reward") else "loss"  # which of GRPO says nothing
    if values := logged(learned):
        count = max(1, len(values) // 10)
        ends = [fixed(fmean(some)) for some in (values[:count], values[-count:])]
        note = f"Means of the first and the last {count} of {len(values)} steps."
        yield Fact(f"Training {learned}", " → ".join(ends), "", note)
    yield from _heldout_facts(run, learned)
    if kl := logged("kl"):
        note = f"At the end; the highest of a step was {number(max(kl), 2)}."
        yield Fact("KL to the reference", f"{number(kl[-1], 2)} nats a token", "", note)
    if dull := fmean(logged("frac_reward_zero_std") or [0.0]):
        note = "They teach nothing but the KL." if run.settings.get("kl_coef") else "They teach nothing."
        yield Fact("Groups of equal rewards", f"{dull:.0%}", "", note)
    if skipped := sum(logged("skipped")):
        yield Fact("Updates left out", number(skipped), "", "Their gradients were not finite.")
    if times := logged("step_time"):
        phases = {phase: sum(seconds) for phase, seconds in _phase_times(run).items()}
        shares = sorted(
            ((time / sum(phases.values()), phase) for phase, time in phases.items()), reverse=True
        )
        note = ", ".join(f"{phase} {share:.0%}" for share, phase in shares if share >= 0.01)
        yield Fact("Time of a step", duration(median(times)), f"{duration(sum(times))} in all", note)
    if run.memory:
        retried = [f"{line['phase']} at step {line['step']}" for line in run.memory if line.get("retries")]
        note = f"And went on with fewer rows: {', '.join(retried[:5])}." if retried else ""
        yield Fact("Phases that ran out of memory", number(len(retried)), "", note)
    if "leak" in run.leak:
        yield Fact("Leak test", "memory grew" if run.leak["leak"] else "no leak")


def _heldout_facts(run: Run, learned: str) -> Iterator[Fact]:
    name = f"eval_{learned}"
    rated = [(record, value) for record in run.evaluations if (value := figure(record, name)) is not None]
    if rated:
        (first, was), (last, now) = rated[0], rated[-1]
        ends = interval(last, name)
        note = f"At step {first.get('step')} and at step {last.get('step')}"
        note += "; the 95 % interval is the last one's." if ends else "."
        yield Fact(f"Held-out {learned}", f"{fixed(was)} → {fixed(now)}", between(ends), note)


def _not_logged(run: Run) -> list[str]:
    logged = {name for step in run.steps for name in step if figure(step, name) is not None}
    expected = {} if "loss" in logged and "reward" not in logged else _EXPECTED  # of language modelling
    lacking = [what for name, what in expected.items() if name not in logged]
    lacking += [] if run.evaluations else ["evaluations"]
    return [f"The run logged no {' and no '.join(lacking)}."] if lacking else []


# ------------------------------------------------------------------------------------- time and memory


def _phase_times(run: Run) -> dict[str, list[float]]:
    """Seconds of each phase, a value a step; 0 where a step did not have it."""
    return {
        name.removeprefix("timing/").removesuffix("_s"): [figure(step, name) or 0.0 for step in run.steps]
        for name in metric_names(run.steps, "timing/")
    }


def _memory(run: Run) -> Section:
    """By phase the pass whose tensors added most, beside what had been predicted for it."""
    phases: dict[str, list[Record]] = {}
    for record in run.memory:
        phases.setdefault(str(record.get("phase")), []).append(record)
    rows = []
    for phase, records in phases.items():
        fullest = max(records, key=lambda record: figure(record, "added_bytes") or 0.0)
        predicted, added = figure(fullest, "predicted_bytes"), figure(fullest, "added_bytes")
        held = [record["process_bytes"] for record in records if figure(record, "process_bytes")]
        rows.append((
            phase, cell(figure(fullest, "rows")), cell(predicted, readable), cell(added, readable),
            f"{100 * (predicted / added - 1):+.1f} %" if predicted and added else cell(None),
            cell(max(held, default=None), readable),
            number(sum(record.get("retries") or 0 for record in records)),
        ))  # fmt: skip
    columns = (
        "phase", "rows at once", "tensors, predicted", "measured", "predicted is off by", "process, at most",
        "retries",
    )  # fmt: skip
    caption = "Of the step in which a phase's tensors took most; predicted before it was measured."
    return Section("Memory", tables=[Table(columns, rows, caption)], pictures=_memory_pictures(phases))


def _memory_pictures(phases: Mapping[str, Sequence[Record]]) -> list[Picture | None]:
    def by_phase(name: str, mark: str = "") -> dict[str, charts.Points]:
        return {f"{mark}{phase}": points(records, "step", name, GB) for phase, records in phases.items()}

    colors = dict(zip(phases, charts.PALETTE, strict=False)) | charts.PHASE_COLORS
    predicted = by_phase("predicted_bytes", "_")
    return [
        charts.line("Tensors by phase", by_phase("added_bytes") | predicted, x="step", y="GB, peak",
                    looks=dict.fromkeys(phases, "o") | dict.fromkeys(predicted, "--"),
                    colors=colors | {f"_{phase}": color for phase, color in colors.items()}, from_zero=True,
                    caption="What each phase added: dots measured, dashed what had been predicted."),
        charts.line("Memory of the process", by_phase("process_bytes"), x="step", y="GB, peak",
                    colors=colors, caption="By phase. 1 GB is 2^30 bytes."),
    ]  # fmt: skip
