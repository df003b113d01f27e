"""The page of a sweep over batch sizes, and of several side by side."""

from collections.abc import Sequence
from typing import Any

from grpo.memory.budget import GB, readable
from grpo.workbench.report import charts
from grpo.workbench.report.findings import (
    behind,
    best_by_quality,
    common_quality,
    error,
    facts,
    rated,
    seconds_to_reach,
)
from grpo.workbench.report.page import Page, Picture, Section, Table, page, settings_section
from grpo.workbench.report.read import Sweep, points
from grpo.workbench.report.wording import between, cell, duration, fixed, number
from grpo.workbench.sizes import Size, figure


def sweep_page(sweep: Sweep) -> Page:
    known = [("of", "model"), ("on", "device_name"), ("in", "precision")]
    told = [f"{word} {sweep.header[name]}" for word, name in known if sweep.header.get(name)]
    work = f"each with {cell(figure(sweep.header, 'total'))} {sweep.unit}"
    return page(
        f"Batch sizes: {sweep.name}",
        f"{len(sweep.finished)} of {len(sweep.sizes)} batch sizes finished, {' '.join([work, *told])}.",
        Section("What it says", facts=list(facts(sweep))),
        Section("Notes", notes=sweep.notes),
        Section("Results", tables=[results_table(sweep)]),
        Section("Learning curves", pictures=_learning_curves(sweep)),
        Section("Quality and time", tables=[_times_table(sweep)], pictures=[_quality(sweep), *_times(sweep)]),
        Section("Memory", pictures=_memory(sweep)),
        Section("Learning rates tried", tables=[_tuning_table(sweep)]),
        settings_section("What the sizes had in common", sweep.header),
        Section("What is missing", sweep.missing),
    )


def sweeps_page(sweeps: Sequence[Sweep]) -> Page:
    """Results one after another, and held-out quality over batch size where it is of the same kind."""
    kinds = {f"{sweep.quality} over {sweep.unit}" for sweep in sweeps}
    curves = {sweep.name: column(sweep.finished, "final_heldout") for sweep in sweeps}
    sizes = sorted({size.batch_size for sweep in sweeps for size in sweep.finished})
    title, other = f"{sweeps[0].quality.capitalize()} by batch size", f"Not comparable: {', '.join(kinds)}."
    drawn = charts.line(title, curves, x="batch size", y=sweeps[0].quality, log=sizes,
                        looks=dict.fromkeys(curves, "o-"))  # fmt: skip
    return page(
        f"Sweeps compared: {', '.join(sweep.name for sweep in sweeps)}",
        ", ".join(f"{len(sweep.finished)} sizes of {sweep.name}" for sweep in sweeps) + " finished.",
        Section("Quality", pictures=[drawn]) if len(kinds) == 1 else Section("Quality", [other]),
        *(
            Section(f"Results of {each.name}", facts=list(facts(each)), tables=[results_table(each)])
            for each in sweeps
        ),
        Section("What is missing", [f"{sweep.name}: {text}" for sweep in sweeps for text in sweep.missing]),
    )


# ---------------------------------------------------------------------------------------------- tables


def results_table(sweep: Sweep) -> Table:
    """A row for each size, finished or not."""
    is_lm = sweep.header.get("objective") != "grpo"  # whose answers are sampled or greedy
    columns = (
        "size", "status", "updates", "learning rate", "warm-up", "time", f"{sweep.unit} a second", "training",
        "held-out", "best held-out", *(["gap"] if is_lm else []), "memory", "tensors, predicted", "measured",
    )  # fmt: skip
    rows = []
    for size in sweep.sizes:
        train, heldout = size.final_train, size.final_heldout
        gap = None if train is None or heldout is None else sweep.sign * (train - heldout)
        at = f" at {size.best_heldout_at / size.done:.0%}" if size.best_heldout_at else ""
        rows.append((
            str(size.batch_size), size.status, cell(size.updates), cell(size.learning_rate),
            cell(size.warmup_updates), cell(size.seconds, duration), cell(size.rate), cell(train, fixed),
            rated(size), cell(size.best_heldout, fixed) + at, *([cell(gap, fixed)] if is_lm else []),
            cell(size.peak_bytes, readable), cell(size.predicted_bytes, readable),
            cell(size.added_bytes, readable),
        ))  # fmt: skip
    unit, better = sweep.quality_unit or "its own unit", "higher" if sweep.sign > 0 else "lower"
    of_gap = "The gap is how much worse held-out is than training. " if is_lm else ""
    return Table(columns, rows, (
        f"{sweep.quality.capitalize()} in {unit}, {better} is better; ± is 95 % over the held-out rows; the "
        f"best was at so much of the work. {of_gap}Time leaves out evaluation. Memory is the peak; tensors "
        "are what the fullest phase added to it."
    ))  # fmt: skip


def _times_table(sweep: Sweep) -> Table:
    """How far each size is behind the best, and what it took."""
    best, target = best_by_quality(sweep), common_quality(sweep)
    end = best.final_heldout if best else None
    rows = [
        (
            str(size.batch_size), cell(sweep.sign * (end - size.final_heldout) + 0.0, fixed),  # no -0.0
            between(behind(sweep, size, best)) or cell(None), cell(size.seconds, duration),
            cell(size.start_s, duration), cell(size.steady_s, duration),
            cell(seconds_to_reach(sweep, size, target), duration),
        )
        for size in sweep.finished if best and end is not None and size.final_heldout is not None
    ]  # fmt: skip
    columns = ("size", "behind the best", "95 %, paired", "time", "of it the start", "an update, then",
               f"to reach {cell(target, fixed)}")  # fmt: skip
    return Table(columns, rows, (
        "Intervals are over the same held-out rows: one that holds 0 tells no difference from the best. The "
        "start is compiling, loading kernels and counting tensors. The last column is the time to a "
        f"{sweep.quality} that every size reached."
    ))  # fmt: skip


def _tuning_table(sweep: Sweep) -> Table:
    tuned = {size.batch_size: dict(size.tuned) for size in sweep.sizes if size.tuned}
    rates = sorted({rate for tries in tuned.values() for rate in tries})
    rows = [(str(size), *(cell(tries.get(rate), fixed) for rate in rates)) for size, tries in tuned.items()]
    return Table(("size", *map(number, rates)), rows, f"{sweep.quality.capitalize()} by learning rate.")


# -------------------------------------------------------------------------------------------- pictures


def column(sizes: Sequence[Size], name: str, unit: float = 1.0) -> charts.Points:
    """The figure `name` of those sizes that have it, in `unit`s, over batch size."""
    pairs = [(each.batch_size, value / unit) for each in sizes if (value := getattr(each, name)) is not None]
    return [size for size, _ in pairs], [value for _, value in pairs]


def _over_sizes(
    sweep: Sweep, title: str, y: str, curves: dict[str, charts.Points], **how: Any
) -> Picture | None:
    sizes = [size.batch_size for size in sweep.sizes]
    looks = dict.fromkeys(curves, "o-") | how.pop("looks", {})
    return charts.line(title, curves, x="batch size", y=y, log=sizes, looks=looks, **how)


def _learning_curves(sweep: Sweep) -> list[Picture | None]:
    falls, train = sweep.sign < 0, sweep.quality.replace("held-out", "training")
    caption = f"By batch size.{' A steep start that would hide the rest is cut off.' if falls else ''}"
    colors = charts.ramp([str(size.batch_size) for size in sweep.sizes])
    return [
        charts.line(
            f"{quality.capitalize()} over {over}",
            {str(size.batch_size): points(size.curve, x, name) for size in sweep.sizes},
            x=over, y=quality, colors=colors, zoom=falls, caption=caption,
        )
        for quality, over, x, name in (
            (sweep.quality, sweep.unit, "done", "heldout"), (train, sweep.unit, "done", "train"),
            (sweep.quality, "seconds of training", "seconds", "heldout"),
        )
    ]  # fmt: skip


def _quality(sweep: Sweep) -> Picture | None:
    sizes = [size for size in sweep.finished if size.final_heldout is not None]
    curves = {
        "held-out, at the end": column(sizes, "final_heldout"),
        "held-out, best": column(sizes, "best_heldout"),
        "training, at the end": column(sizes, "final_train"),
    }  # fmt: skip
    errors = [error(size) or 0.0 for size in sizes]
    ends = zip(curves["held-out, at the end"][1], errors, strict=True)
    band = zip(*((value - half, value + half) for value, half in ends), strict=True)
    return _over_sizes(
        sweep, f"{sweep.quality.capitalize()} by batch size", sweep.quality, curves,
        looks={"held-out, best": "--"}, bands={"held-out, at the end": list(band)} if any(errors) else {},
        caption="Bars are 95 % intervals over the held-out rows, where known.",
    )  # fmt: skip


def _times(sweep: Sweep) -> list[Picture | None]:
    timed = [size for size in sweep.finished if size.final_heldout is not None and size.seconds is not None]
    in_time = [size.seconds or 0.0 for size in timed], [size.final_heldout or 0.0 for size in timed]
    corner = f"A point a size; {'upper' if sweep.sign > 0 else 'lower'} left is better."
    return [
        charts.line("Quality against time", {"": in_time}, looks={"": "o"}, x="seconds of training",
                    y=sweep.quality, tags=[size.batch_size for size in timed], caption=corner),
        *(
            _over_sizes(sweep, title, y, {"": column(sweep.finished, name)}, from_zero=True, caption=caption)
            for title, y, name, caption in (
                ("Throughput", f"{sweep.unit} a second", "rate", "Once it runs."),
                ("Training time", "seconds", "seconds", "Of the same work, without evaluations."),
                ("Time of an update", "seconds", "steady_s", "Once it runs."),
            )
        ),
    ]  # fmt: skip


def _memory(sweep: Sweep) -> list[Picture | None]:
    """What tensors added, and were to add; the peak beside what is usable."""
    failed = [size for size in sweep.sizes if size.status == "out of memory"]
    tensors = {
        "predicted": column(sweep.sizes, "predicted_bytes", GB),
        "measured": column(sweep.sizes, "added_bytes", GB),
        "ran out": column(failed, "predicted_bytes", GB),
    }
    peaks, usable = column(sweep.sizes, "peak_bytes", GB), (sweep.usable_bytes or 0.0) / GB
    near = usable <= 2 * max(peaks[1], default=0.0)  # a line far above would press all else flat
    return [
        _over_sizes(sweep, "Tensors by batch size", "GB, peak", tensors, from_zero=True,
                    looks={"predicted": "--", "measured": "o", "ran out": "x"},
                    colors={"ran out": charts.FAILED},
                    caption="Added by the fullest phase; predicted before it was measured."),
        _over_sizes(sweep, "Memory by batch size", "GB, peak", {"": peaks}, from_zero=True,
                    level=(usable, "usable") if usable and near else None,
                    caption=f"{f'{usable:.2f} GB are usable. ' if usable else ''}1 GB is 2^30 bytes."),
    ]  # fmt: skip
