"""What a run logged step by step: the sections of its rewards, its policy, its time and its memory."""

from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median

from grpo.memory.budget import GB
from grpo.workbench.report.figures import Curve, Look, colored, draw, phase_color, stack
from grpo.workbench.report.read import Record, Run, figure, points
from grpo.workbench.report.sections import Figure, Section, Table
from grpo.workbench.report.wording import cell, duration, listed, number, plural, share, size_cell

INTERVAL_ENDS = ("/low", "/high")
_over_steps = partial(draw, x="step")
_LENGTHS = {
    "mean": "completions/mean_length",
    "longest": "completions/max_length",
    "shortest": "completions/min_length",
}
_CLIPPED = {
    "ratio, below": "clip_ratio/low_mean",
    "ratio, above": "clip_ratio/high_mean",
    "cut off": "completions/clipped_ratio",
}


def metric_names(records: Iterable[Record], prefix: str) -> list[str]:
    """Metrics with this prefix, without the ends of intervals, in the order in which they were written."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefix))
    return [name for name in names if not name.endswith(INTERVAL_ENDS)]


def curves_of(run: Run, names: Mapping[str, str]) -> list[Curve]:
    """By label, metrics over steps. A lone one needs no name beside the picture's."""
    if len(names) == 1:
        return [Curve("", *points(run.steps, "step", name)) for name in names.values()]
    colors = colored(list(names))
    return [
        Curve(label, *points(run.steps, "step", name), color=colors[label]) for label, name in names.items()
    ]


def reward_names(run: Run) -> list[str]:
    """Of the reward functions, after `all`, which is their sum: as their curves are called."""
    names = [name for name in metric_names(run.steps, "rewards/") if name.endswith("/mean")]
    return ["all", *(_part(name) for name in names if name.count("/") == 2)]


def slug(text: str) -> str:
    """Fit for the name of a file."""
    return "".join(letter if letter.isalnum() else "-" for letter in text)


# ------------------------------------------------------------------------------- rewards and the policy


def reward_section(run: Run) -> Section:
    """The reward by function, and each function's components."""
    names = [name for name in metric_names(run.steps, "rewards/") if name.endswith("/mean")]
    functions = {_part(name): name for name in names if name.count("/") == 2}
    figures = _over_steps(
        "reward", "Reward", curves_of(run, {"all": "reward", **functions}), y="mean of a step"
    )
    components = [name for name in names if name.count("/") > 2]
    for task in dict.fromkeys(name.split("/")[1] for name in components):
        mine = {_part(name): name for name in components if name.split("/")[1] == task}
        figures += _over_steps(
            f"reward-{slug(task)}", f"Components of {task}", curves_of(run, mine), y="mean of a step"
        )
    spread = curves_of(run, {"deviation": "reward_std"})
    figures += _over_steps("spread", "Spread within groups", spread, y="standard deviation", from_zero=True,
                           caption="What advantages are made of.")  # fmt: skip
    return Section("Reward", figures=figures)


def _part(name: str) -> str:
    """fen match, of rewards/environment/fen_match/mean."""
    return name.split("/")[-2].replace("_", " ")


def policy_section(run: Run) -> Section:
    """KL, clipping, lengths, the learning rate, the gradient, entropy."""
    return Section("Policy", figures=[
        *_over_steps("kl", "KL to the reference", curves_of(run, {"kl": "kl"}), y="nats a token"),
        *_over_steps("clip", "Shares clipped", curves_of(run, _CLIPPED), y="share", from_zero=True,
                     caption="Of tokens, those with a clipped ratio; of completions, those cut off."),
        *_over_steps("lengths", "Lengths of completions", curves_of(run, _LENGTHS), y="tokens",
                     from_zero=True),
        *_over_steps("rate", "Learning rate", curves_of(run, {"rate": "learning_rate"}), y="rate",
                     from_zero=True),
        *_over_steps("gradient", "Norm of the gradient", curves_of(run, {"norm": "grad_norm"}), y="norm",
                     from_zero=True, caption="Before it was clipped."),
        *_over_steps("entropy", "Entropy", curves_of(run, {"": "entropy"}), y="nats a token", from_zero=True),
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------ time


def time_section(run: Run) -> Section:
    """Where a step's time goes."""
    steps = [figure(step, "step") or 0.0 for step in run.steps]
    return Section("Time", _time_sentences(run), figures=stack(
        "time", "Where a step's time goes", steps, phases_of(run), y="seconds"
    ))  # fmt: skip


def phases_of(run: Run) -> dict[str, list[float]]:
    """Seconds of each phase, a value a step; 0 where a step did not have it."""
    return {
        name.removeprefix("timing/").removesuffix("_s"): [figure(step, name) or 0.0 for step in run.steps]
        for name in metric_names(run.steps, "timing/")
    }


def _time_sentences(run: Run) -> list[str]:
    _, times = points(run.steps, "step", "step_time")
    if not times:
        return []
    text = f"A step took {duration(median(times))} in the median, and all of them {duration(sum(times))}"
    totals = sorted(((sum(values), phase) for phase, values in phases_of(run).items()), reverse=True)
    whole = sum(total for total, _ in totals)
    parts = [f"{share(total / whole)} {phase}" for total, phase in totals if whole and total >= 0.01 * whole]
    return [f"{text}{': ' if parts else ''}{listed(parts)}."]


# ---------------------------------------------------------------------------------------------- memory


def memory_section(run: Run) -> Section:
    """By phase, what was predicted and what was measured."""
    return Section("Memory", _memory_sentences(run), memory_tables(run), _memory_figures(run))


def by_phase(run: Run) -> dict[str, list[Record]]:
    """The lines of memory.jsonl."""
    phases: dict[str, list[Record]] = {}
    for record in run.memory:
        phases.setdefault(str(record.get("phase")), []).append(record)
    return phases


def memory_tables(run: Run) -> list[Table]:
    """For each phase the pass whose tensors added most, beside what was predicted for it."""
    rows = []
    for phase, records in by_phase(run).items():
        highest = max(
            records,
            key=lambda record: (figure(record, "added_bytes") or 0.0, figure(record, "process_bytes") or 0.0),
        )
        predicted, used = figure(highest, "predicted_bytes"), figure(highest, "added_bytes")
        process = max(figure(record, "process_bytes") or 0.0 for record in records)
        error = f"{100 * (predicted / used - 1):+.1f} %" if predicted and used else cell(None)
        retries = sum(figure(record, "retries") or 0.0 for record in records)
        rows.append((phase, cell(figure(highest, "rows")), size_cell(predicted), size_cell(used), error,
                     size_cell(process), number(retries)))  # fmt: skip
    columns = (
        "phase", "rows at once", "tensors, predicted", "measured", "predicted is off by", "process, at most",
        "retries",
    )  # fmt: skip
    return [Table(columns, rows, "The step in which each phase's tensors took most.")] if rows else []


def _memory_sentences(run: Run) -> list[str]:
    retried = [record for record in run.memory if figure(record, "retries")]
    if not retried:
        return ["No phase ran out of memory."] if run.memory else []
    named = [f"{record.get('phase')} at step {record.get('step')}" for record in retried[:5]]
    more = f" and {len(retried) - 5} more" if len(retried) > 5 else ""
    count = plural(len(retried), "phase")
    return [f"{count} ran out of memory and went on with fewer rows: {listed(named)}{more}."]


def _memory_figures(run: Run) -> list[Figure]:
    columns: tuple[tuple[str, Look], ...] = (("process_bytes", "line"), ("predicted_bytes", "dashed"))
    curves = []
    for phase, records in by_phase(run).items():
        for name, look in columns:
            steps, sizes = points(records, "step", name)
            label = phase if look == "line" else ""
            curves.append(
                Curve(label, steps, [size / GB for size in sizes], look=look, color=phase_color(phase))
            )
    return _over_steps("memory", "Memory by phase", curves, y="GB, peak",
                       caption="Dashed: what tensors were to add. 1 GB is 2^30 bytes.")  # fmt: skip
