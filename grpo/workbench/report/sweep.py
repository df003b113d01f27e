"""The page of a sweep over batch sizes: every section from its figures, nothing where there are none."""

from grpo.workbench.report.costs import memory_section, over_sizes, time_section
from grpo.workbench.report.figures import Curve, draw, ramp
from grpo.workbench.report.findings import (
    NORMAL_95,
    best_sentences,
    confound,
    failure_sentences,
    gap,
)
from grpo.workbench.report.read import Size, Sweep, figure, points
from grpo.workbench.report.sections import Figure, Page, Section, Table
from grpo.workbench.report.wording import (
    capital,
    cell,
    duration,
    fixed,
    listed,
    number,
    plural,
    rounded,
    share,
    short,
    size_cell,
    value_text,
)

_IN_COMMON = (
    "model", "num_parameters", "objective", "total", "device_name", "precision", "compile", "tf32", "context",
    "group_size", "learning_rate", "base_batch_size", "scale_lr", "lr_schedule", "min_lr_ratio",
    "warmup_share", "adam_beta1", "adam_beta2", "weight_decay", "seed", "started",
)  # fmt: skip


def sweep_page(sweep: Sweep) -> Page:
    """All sections of one sweep."""
    sections = [
        Section("What it says", [*best_sentences(sweep), *failure_sentences(sweep), confound(sweep)]),
        Section("Notes", notes=sweep.notes),
        Section("Results", _warm_up_sentences(sweep), [results_table(sweep)]),
        Section("Learning curves", figures=_learning_curves(sweep)),
        Section("Quality against batch size", _gap_sentences(sweep), figures=_quality_figures(sweep)),
        time_section(sweep),
        memory_section(sweep),
        Section("Learning rates tried", tables=_tuning_tables(sweep)),
        Section("What the sizes had in common", tables=_settings_tables(sweep), folded=True),
        Section("What is missing", sweep.missing),
    ]
    return Page(f"Batch sizes: {sweep.name}", lede(sweep), [each for each in sections if not each.empty])


def lede(sweep: Sweep) -> str:
    """One sentence: what was done, with what, on what."""
    total = figure(sweep.settings, "total")
    tried = f"{len(sweep.finished)} of {plural(len(sweep.sizes), 'batch size')} finished"
    work = f", each with {number(total)} {sweep.unit}" if total else ""
    known = [("of", "model"), ("on", "device_name"), ("in", "precision")]
    told = [f"{word} {sweep.settings[name]}" for word, name in known if sweep.settings.get(name)]
    return f"{tried}{work}{', ' if told else ''}{' '.join(told)}."


def results_table(sweep: Sweep) -> Table:
    """A row for each size, finished or not."""
    columns = (
        "size", "status", "updates", "learning rate", "warm-up", "time", f"{sweep.unit} a second",
        "training", "held-out", "best held-out", "gap", "memory",
    )  # fmt: skip
    rows = [
        (
            str(size.batch_size), size.status, cell(size.updates), cell(size.learning_rate, short),
            cell(size.warmup_updates), cell(size.seconds, duration), cell(size.rate, short),
            cell(size.final_train, fixed), _with_error(size), _best(size), cell(gap(size, sweep), fixed),
            size_cell(size.peak_bytes),
        )
        for size in sweep.sizes
    ]  # fmt: skip
    unit = f" in {sweep.quality_unit}" if sweep.quality_unit else ""
    caption = (
        f"{capital(sweep.quality)}{unit}, {'higher' if sweep.sign > 0 else 'lower'} is better. The gap is "
        "how much worse held-out is than training, both at the end; ± is 95 % over the held-out set; the "
        f"best is at so many {sweep.unit}. Time leaves out evaluation; memory is the peak."
    )
    return Table(columns, rows, caption)


def _with_error(size: Size) -> str:
    error = _error(size)
    return cell(size.final_heldout, fixed) + ("" if error is None else f" ± {fixed(error)}")


def _best(size: Size) -> str:
    at = size.best_heldout_at
    return cell(size.best_heldout, fixed) + ("" if at is None else f" at {rounded(at)}")


def _error(size: Size) -> float | None:
    return None if size.heldout_stderr is None else NORMAL_95 * size.heldout_stderr


def _warm_up_sentences(sweep: Sweep) -> list[str]:
    warm = [
        (size.batch_size, size.warmup_updates, size.updates)
        for size in sweep.finished
        if size.warmup_updates is not None and size.updates
    ]
    if not warm:
        return ["How long the learning rate warmed up is not known."]
    shares = [updates / of for _, updates, of in warm]
    if max(shares) == 0:
        return ["No size warmed up its learning rate."]
    of_all = " to ".join(dict.fromkeys(share(each) for each in (min(shares), max(shares))))
    counts = (f"{updates:,.0f} of {of:,.0f} at size {size}" for size, updates, of in (warm[0], warm[-1]))
    return [f"The learning rate warmed up for {of_all} of the updates: {listed(dict.fromkeys(counts))}."]


def _learning_curves(sweep: Sweep) -> list[Figure]:
    if not any(size.curve for size in sweep.sizes):
        return []
    colors, train = ramp(len(sweep.sizes)), sweep.quality.replace("held-out", "training")
    shown = []
    for name, quality, x, over, column in (
        ("heldout-work", sweep.quality, "done", sweep.unit, "heldout"),
        ("heldout-time", sweep.quality, "seconds", "seconds of training", "heldout"),
        ("train-work", train, "done", sweep.unit, "train"),
    ):
        curves = [
            Curve(str(size.batch_size), *points(size.curve, x, column), color=color)
            for size, color in zip(sweep.sizes, colors, strict=True)
        ]
        falls = sweep.sign < 0  # a loss, from far above
        caption = (
            "By batch size; a steep start that would hide the rest is cut off." if falls else "By batch size."
        )
        title = f"{capital(quality)} over {over}"
        shown += draw(name, title, curves, x=over, y=quality, zoom=falls, caption=caption)
    return shown


def _quality_figures(sweep: Sweep) -> list[Figure]:
    """Quality over batch size, and over time."""
    rated = [size for size in sweep.finished if size.final_heldout is not None]
    ends = [size.final_heldout or 0.0 for size in rated]
    errors = [_error(size) or 0.0 for size in rated]
    low = [end - error for end, error in zip(ends, errors, strict=True)] if any(errors) else []
    high = [end + error for end, error in zip(ends, errors, strict=True)] if any(errors) else []
    named = [size.batch_size for size in rated]
    timed = [size for size in rated if size.seconds]
    in_time = Curve(
        "", [size.seconds or 0.0 for size in timed], [size.final_heldout or 0.0 for size in timed],
        look="dots", tags=[str(size.batch_size) for size in timed],
    )  # fmt: skip
    return [
        *draw("quality", f"{capital(sweep.quality)} by batch size", [
            Curve("held-out, at the end", named, ends, low, high, look="both"),
            over_sizes("held-out, best", sweep.finished, "best_heldout", "dashed"),
            over_sizes("training, at the end", sweep.finished, "final_train", "both"),
        ], x="batch size", y=sweep.quality, sizes=[size.batch_size for size in sweep.finished],
            caption="Bars are 95 % intervals over the held-out set, where known."),
        *draw("trade-off", "Quality against time", [in_time], x="seconds of training", y=sweep.quality,
              caption=f"A point a size; {'upper' if sweep.sign > 0 else 'lower'} left is better."),
    ]  # fmt: skip


def _gap_sentences(sweep: Sweep) -> list[str]:
    gaps = [(value, size.batch_size) for size in sweep.finished if (value := gap(size, sweep)) is not None]
    if not gaps:
        return ["The gap between training and held-out data is not known."]
    if len(gaps) == 1:
        return [f"Held-out ended {fixed(gaps[0][0])} worse than training."]
    (least, small), (most, large) = min(gaps), max(gaps)
    if fixed(least) == fixed(most):
        return [f"The gap between training and held-out is {fixed(least)} at every size."]
    return [
        f"The gap between training and held-out is least at size {small} ({fixed(least)}) and largest at "
        f"size {large} ({fixed(most)})."
    ]


def _tuning_tables(sweep: Sweep) -> list[Table]:
    tuned = [size for size in sweep.sizes if size.tuned]
    rates = sorted({rate for size in tuned for rate, _ in size.tuned})
    rows = [
        (str(size.batch_size), *(cell(dict(size.tuned).get(rate), fixed) for rate in rates)) for size in tuned
    ]
    columns = ("size", *(short(rate) for rate in rates))
    return [Table(columns, rows, f"{capital(sweep.quality)} by learning rate.")] if rows else []


def _settings_tables(sweep: Sweep) -> list[Table]:
    known: list[tuple[str, object]] = [(name, sweep.settings.get(name)) for name in _IN_COMMON]
    versions = sweep.settings.get("versions")
    known += versions.items() if isinstance(versions, dict) else []
    rows = [(name.replace("_", " "), value_text(value)) for name, value in known if value is not None]
    return [Table(("setting", "value"), rows)] if rows else []
