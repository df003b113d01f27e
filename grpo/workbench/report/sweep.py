"""The page of a sweep over batch sizes, and of several: the best sizes, what failed, what to mind.

Quality is held-out quality at the end, when every size has done the same work; the best value on the way
would favour whoever was looked at most often.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo.memory.budget import GB, readable
from grpo.workbench.report import charts
from grpo.workbench.report.charts import Curve, curve
from grpo.workbench.report.page import Fact, Page, Picture, Section, Table, page, settings_section
from grpo.workbench.report.read import Sweep
from grpo.workbench.report.wording import NOTHING, between, cell, duration, fixed, number
from grpo.workbench.sizes import Size, figure, paired_difference

ALIKE = 1.1
"""Times as long: what one run of each size, after one another, cannot tell apart."""
_RATES = {
    "none": "the same at every size", "linear": "in proportion to the size",
    "sqrt": "with the square root of the size", "tuned": "tuned at each size",
}  # fmt: skip


def sweep_page(sweep: Sweep) -> Page:
    known = [("of", "model"), ("on", "device_name"), ("in", "precision")]
    words = [f"{word} {sweep.header[name]}" for word, name in known if sweep.header.get(name)]
    work = f"each with {cell(figure(sweep.header, 'total'))} {sweep.unit}"
    return page(
        f"Batch sizes: {sweep.name}",
        f"{len(sweep.finished)} of {len(sweep.sizes)} batch sizes finished, {' '.join([work, *words])}.",
        Section("What it says", facts=list(facts(sweep))),
        Section("Notes", notes=sweep.notes),
        Section("Results", tables=[_results(sweep)], pictures=_quality(sweep)),
        Section("Learning curves", pictures=_learning_curves(sweep)),
        Section("Memory", pictures=_memory(sweep)),
        Section("Learning rates tried", tables=[_rates_tried(sweep)]),
        settings_section("What the sizes had in common", sweep.header),
        Section("What is missing", sweep.missing),
    )


def sweeps_page(sweeps: Sequence[Sweep]) -> Page:
    """Results one after another, and held-out quality over batch size where it is of the same kind."""
    kinds = {f"{sweep.quality} over {sweep.unit}" for sweep in sweeps}
    quality, names = sweeps[0].quality, ", ".join(sweep.name for sweep in sweeps)
    curves = {sweep.name: _over_sizes(sweep.finished, "final_heldout") for sweep in sweeps}
    drawn = [_by_size(f"{quality.capitalize()} by batch size", quality, curves)]
    apart = [f"Not comparable: {', '.join(kinds)}."]
    return page(
        f"Sweeps compared: {names}",
        ", ".join(f"{len(sweep.finished)} sizes of {sweep.name}" for sweep in sweeps) + " finished.",
        Section("Quality", pictures=drawn) if len(kinds) == 1 else Section("Quality", apart),
        *(Section(f"Results of {sweep.name}", facts=list(facts(sweep)), tables=[_results(sweep)])
          for sweep in sweeps),
        Section("What is missing", [f"{sweep.name}: {text}" for sweep in sweeps for text in sweep.missing]),
    )  # fmt: skip


def best_by_quality(sweep: Sweep) -> Size | None:
    """The finished size whose held-out quality ended best."""
    known = [size for size in sweep.finished if size.final_heldout is not None]
    return max(known, key=lambda size: sweep.sign * (size.final_heldout or 0.0), default=None)


def behind(sweep: Sweep, size: Size, best: Size) -> tuple[float, float] | None:
    """95 % interval of how much worse it ended, paired over held-out rows; None where that is not known."""
    better, worse = (best, size) if sweep.sign > 0 else (size, best)
    return None if size is best else paired_difference(better.heldout, worse.heldout)


def not_told_from(sweep: Sweep, best: Size) -> list[Size]:
    """Other sizes that may have ended no worse."""
    known = [size for size in sweep.finished if size.final_heldout is not None]
    return [size for size in known if (ends := behind(sweep, size, best)) and ends[0] <= 0]


def fastest(sizes: Sequence[Size]) -> Size | None:
    """The one that needed the least time for the same work."""
    return min((size for size in sizes if size.seconds), key=lambda size: size.seconds or 0.0, default=None)


def facts(sweep: Sweep) -> Iterator[Fact]:
    """The best sizes, those that failed, and what to mind."""
    best, quick = best_by_quality(sweep), fastest(sweep.finished)
    if best is None:
        yield Fact(f"Best {sweep.quality}", "not known", "", "No size finished with one.")
    else:
        rated = f"{_rated(best)} {sweep.quality_unit}".strip()
        note = "At the end, after equal work. Each size ran once, with one seed."
        yield Fact(f"Best {sweep.quality}", _listed([best]), rated, note)
        if close := not_told_from(sweep, best):
            note = "The 95 % interval of the difference on the same held-out rows holds 0."
            yield Fact("Not told from the best", _listed(close), "", note)
            if choice := fastest([best, *close]):
                note = "The fastest of these and the best."
                yield Fact("Trade-off", _listed([choice]), cell(choice.seconds, duration), note)
    if quick is not None:
        limit = ALIKE * (quick.seconds or 0.0)
        alike = [size for size in sweep.finished if size is not quick and 0 < (size.seconds or 0) <= limit]
        note = f"At most a tenth longer, which one run cannot tell: {_listed(alike)}." if alike else ""
        yield Fact("Fastest", _listed([quick]), cell(quick.seconds, duration), note)
    for size in sweep.sizes:
        if not size.is_finished:
            predicted = f"{readable(size.predicted_bytes)} predicted" if size.predicted_bytes else ""
            yield Fact(_listed([size]).capitalize(), size.status, predicted, size.message)
    how = str(sweep.header.get("scale_lr"))
    note = "Not tuned: what looks like the effect of batch size may be that of its learning rate."
    if how == "none":
        note += " Larger batches usually want a higher one."
    if how == "tuned":
        note = "Differences of quality are those of the size."
        tries = [(size, [rate for rate, _ in size.tuned]) for size in sweep.sizes if len(size.tuned) > 1]
        if edge := [size for size, rates in tries if size.learning_rate in (min(rates), max(rates))]:
            note += f" The best was the lowest or highest tried at {_listed(edge)}: search further."
    rate = cell(figure(sweep.header, "learning_rate"))
    yield Fact("Learning rate", _RATES.get(how, "not known"), rate, note)


def _listed(sizes: Sequence[Size]) -> str:
    return f"size {', '.join(str(size.batch_size) for size in sizes)}"


def _half_interval(size: Size) -> float | None:
    """Half of the 95 % interval of its held-out mean: of its rows' difference from nothing."""
    ends = paired_difference(size.heldout, [0.0] * len(size.heldout))
    return None if ends is None else (ends[1] - ends[0]) / 2


def _rated(size: Size) -> str:
    """2.300 ± 0.012, as far as it is known."""
    half, end = _half_interval(size), cell(size.final_heldout, fixed)
    return end if half is None or end == NOTHING else f"{end} ± {fixed(half)}"


def _results(sweep: Sweep) -> Table:
    """A row for each size, finished or not."""
    is_lm = sweep.header.get("objective") != "grpo"  # whose answers are sampled or greedy
    best, sign = best_by_quality(sweep), sweep.sign
    rows = []
    for size in sweep.sizes:
        train, heldout, gap, late = size.final_train, size.final_heldout, NOTHING, NOTHING
        if heldout is not None and train is not None:
            gap = fixed(sign * (train - heldout))
        if best and size.is_finished and heldout is not None and best.final_heldout is not None:
            ends = behind(sweep, size, best)
            late = fixed(sign * (best.final_heldout - heldout) + 0.0)  # no -0.0
            late += f" ({between(*ends)})" if ends else ""
        at = f" at {size.best_heldout_at / size.done:.0%}" if size.best_heldout_at else ""
        rows.append({
            "size": str(size.batch_size), "status": size.status, "held-out": _rated(size),
            "behind the best": late, "time": cell(size.seconds, duration),
            f"{sweep.unit} a second": cell(size.rate), "memory": cell(size.peak_bytes, readable),
            "tensors, predicted": cell(size.predicted_bytes, readable),
            "measured": cell(size.added_bytes, readable), "training": cell(train, fixed),
            **({"gap": gap} if is_lm else {}), "best held-out": cell(size.best_heldout, fixed) + at,
            "updates": cell(size.updates), "learning rate": cell(size.learning_rate),
            "warm-up": cell(size.warmup_updates), "start": cell(size.start_s, duration),
        })  # fmt: skip
    unit, better = sweep.quality_unit or "its own unit", "higher" if sign > 0 else "lower"
    of_gap = "The gap is how much worse held-out is than training. " if is_lm else ""
    caption = (
        f"{sweep.quality.capitalize()} in {unit}, {better} is better; ± is 95 % over the held-out rows, the "
        "interval behind the best 95 % of the difference on the same rows: one that holds 0 tells none. The "
        f"best was at so much of the work. {of_gap}Time leaves out evaluation; the start, a part of it, is "
        "compiling, loading kernels and counting tensors. Memory is the peak; tensors are what the fullest "
        "phase added."
    )
    return Table(rows, caption)


def _rates_tried(sweep: Sweep) -> Table:
    tuned = {str(size.batch_size): dict(size.tuned) for size in sweep.sizes if size.tuned}
    rates = sorted({rate for tries in tuned.values() for rate in tries})
    rows = [{"size": size} | {number(rate): cell(tries.get(rate), fixed) for rate in rates}
            for size, tries in tuned.items()]  # fmt: skip
    return Table(rows, f"{sweep.quality.capitalize()} by learning rate.")


def _over_sizes(sizes: Sequence[Size], name: str, look: str = "o-", **how: Any) -> Curve:
    """The figure `name` of those sizes that have it, over batch size."""
    figures = [{"size": size.batch_size, name: getattr(size, name)} for size in sizes]
    return curve(figures, "size", name, look, **how)


def _by_size(
    title: str, y: str, curves: Mapping[str, Curve], caption: str = "", **how: Any
) -> Picture | None:
    return charts.line(title, curves, x="batch size", y=y, by_size=True, caption=caption, **how)


def _colors(sweep: Sweep) -> dict[int, str]:
    sizes = [size.batch_size for size in sweep.sizes]
    return dict(zip(sizes, charts.ramp(len(sizes)), strict=True))


def _learning_curves(sweep: Sweep) -> list[Picture | None]:
    falls, train, colors = sweep.sign < 0, sweep.quality.replace("held-out", "training"), _colors(sweep)
    caption = f"By batch size.{' A steep start that would hide the rest is cut off.' if falls else ''}"
    pictures = []
    for quality, name, over, x in (
        (sweep.quality, "heldout", sweep.unit, "done"),
        (train, "train", sweep.unit, "done"),
        (sweep.quality, "heldout", "seconds of training", "seconds"),
    ):
        curves = {str(size.batch_size): curve(size.curve, x, name, color=colors[size.batch_size])
                  for size in sweep.sizes}  # fmt: skip
        title = f"{quality.capitalize()} over {over}"
        pictures.append(charts.line(title, curves, x=over, y=quality, zoom=falls, caption=caption))
    return pictures


def _quality(sweep: Sweep) -> list[Picture | None]:
    known = [size for size in sweep.finished if size.final_heldout is not None]
    end, halves = _over_sizes(known, "final_heldout"), [_half_interval(size) or 0.0 for size in known]
    low, high = ([y + sign * half for y, half in zip(end.y, halves, strict=True)] for sign in (-1, 1))
    curves = {
        "held-out, at the end": end._replace(low=low, high=high),
        "held-out, best": _over_sizes(known, "best_heldout", "--"),
        "training, at the end": _over_sizes(known, "final_train"),
    }
    in_time = {}
    for size in known:
        point, color = {"x": size.seconds, "y": size.final_heldout}, _colors(sweep)[size.batch_size]
        in_time[str(size.batch_size)] = curve([point], "x", "y", "o", color=color)
    corner = f"A point a size; {'upper' if sweep.sign > 0 else 'lower'} left is better."
    rate, quality = {"": _over_sizes(sweep.finished, "rate")}, sweep.quality
    return [
        _by_size(f"{quality.capitalize()} by batch size", quality, curves,
                 "Bars are 95 % intervals over the held-out rows, where known."),
        charts.line("Quality against time", in_time, x="seconds of training", y=quality, caption=corner),
        _by_size("Throughput", f"{sweep.unit} a second", rate, "Once it runs.", from_zero=True),
    ]  # fmt: skip


def _memory(sweep: Sweep) -> list[Picture | None]:
    """What tensors added, and were to add; the peak beside what is usable."""
    failed = [size for size in sweep.sizes if size.status == "out of memory"]
    tensors = {
        "predicted": _over_sizes(sweep.sizes, "predicted_bytes", "--", unit=GB),
        "measured": _over_sizes(sweep.sizes, "added_bytes", "o", unit=GB),
        "ran out": _over_sizes(failed, "predicted_bytes", "x", unit=GB, color=charts.FAILED),
    }
    peaks = _over_sizes(sweep.sizes, "peak_bytes", unit=GB)
    usable = (figure(sweep.header, "memory_limit_bytes") or figure(sweep.header, "usable_bytes") or 0.0) / GB
    curves = {"": peaks}
    if 0 < usable <= 2 * max(peaks.y, default=0.0):  # a line far above would press all else flat
        curves["usable"] = Curve(peaks.x, [usable] * len(peaks.x), ":", charts.INK)
    of_tensors = "Added by the fullest phase; predicted before it was measured."
    of_all = f"{f'{usable:.2f} GB are usable. ' if usable else ''}1 GB is 2^30 bytes."
    return [
        _by_size("Tensors by batch size", "GB, peak", tensors, of_tensors, from_zero=True),
        _by_size("Memory by batch size", "GB, peak", curves, of_all, from_zero=True),
    ]
