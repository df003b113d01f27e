"""What the page of a sweep over batch sizes shows, and of several: the best sizes, what failed, what to mind.

Quality is held-out quality at the end, when every size has done the same work; the best value on the way
would favour whoever was looked at most often.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from grpo.memory.budget import readable
from grpo.workbench.report.charts import BATCH_SIZE
from grpo.workbench.report.read import Sweep
from grpo.workbench.report.text import Fact, show, show_figure
from grpo.workbench.sizes import Size, figure, paired_difference

FIGURES = (
    "status", "is_finished", "final_train", "final_heldout", "best_heldout", "seconds", "rate", "peak_bytes",
    "predicted_bytes", "added_bytes", "updates", "learning_rate", "warmup_updates", "start_s",
)  # fmt: skip
"""Of a size, shown as they are."""
ALIKE = 1.1
"""Times as long: what one run of each size, after one another, cannot tell apart."""
_UNTUNED = "Not tuned: what looks like the effect of batch size may be that of its learning rate."
_RATES = {
    "none": ("the same at every size", f"{_UNTUNED} Larger batches usually want a higher one."),
    "linear": ("in proportion to the size", _UNTUNED),
    "sqrt": ("with the square root of the size", _UNTUNED),
    "tuned": ("tuned at each size", "Differences of quality are those of the size."),
}
"""By --scale-lr: what the learning rate was, and what that means."""


def sweep_content(sweep: Sweep) -> dict[str, Any]:
    """What sweep.html.j2 writes down."""
    known = [("of", "model"), ("on", "device_name"), ("in", "precision")]
    words = [f" {word} {sweep.header[name]}" for word, name in known if sweep.header.get(name)]
    work = f"each with {show(figure(sweep.header, 'total'))} {sweep.unit}{''.join(words)}"
    tuned = {str(size.batch_size): dict(size.tuned) for size in sweep.sizes if size.tuned}
    rates = sorted({rate for tries in tuned.values() for rate in tries})
    return {
        "title": f"Batch sizes: {sweep.name}",
        "lede": f"{len(sweep.finished)} of {len(sweep.sizes)} batch sizes finished, {work}.",
        "sweep": sweep,
        "facts": [*facts(sweep)],
        "sizes": size_records(sweep),
        "points": [
            {sweep.unit: point["done"], "seconds of training": point["seconds"]}
            | {f"{size.batch_size}/{name}": point[name] for name in ("heldout", "train")}
            for size in sweep.sizes
            for point in size.curve
        ],
        "tries": [
            {"size": size} | {show(rate): show(tries.get(rate), "final_heldout") for rate in rates}
            for size, tries in tuned.items()
        ],
        "missing": sweep.missing,
    }


def sweeps_content(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """What sweeps.html.j2 writes down: one after another, and held-out quality where it is of one kind."""
    return {
        "title": f"Sweeps compared: {', '.join(sweep.name for sweep in sweeps)}",
        "lede": ", ".join(f"{len(sweep.finished)} sizes of {sweep.name}" for sweep in sweeps) + " finished.",
        "sweeps": [(sweep, [*facts(sweep)], size_records(sweep)) for sweep in sweeps],
        "kinds": {f"{sweep.quality} over {sweep.unit}" for sweep in sweeps},
        "quality": sweeps[0].quality,
        "names": {sweep.name: sweep.name for sweep in sweeps},
        "ends": [
            {BATCH_SIZE: size.batch_size, sweep.name: size.final_heldout}
            for sweep in sweeps
            for size in sweep.finished
        ],
        "missing": [f"{sweep.name}: {text}" for sweep in sweeps for text in sweep.missing],
    }


def size_records(sweep: Sweep) -> list[dict[str, Any]]:
    """Figures of each size by name, with the ends of their 95 % intervals as NAME/low and NAME/high.

    behind: how much worse than the best it ended. gap: how much worse held-out is than training, which tells
    nothing where training samples and evaluations are greedy. ran out: what had been predicted for a size
    without memory enough. SIZE/end: `final_heldout` in a figure of its own.
    """
    records, best, is_lm = [], best_by_quality(sweep), sweep.header.get("objective") != "grpo"
    highest = max((size.peak_bytes or 0 for size in sweep.sizes), default=0)
    is_near = 0 < sweep.usable_bytes <= 2 * highest  # a line far above would press all else flat
    for size in sweep.sizes:
        heldout, train = size.final_heldout, size.final_train
        record = {name: getattr(size, name) for name in FIGURES} | {BATCH_SIZE: size.batch_size}
        record["seconds of training"] = size.seconds
        record["usable"] = sweep.usable_bytes if size.peak_bytes and is_near else None
        record["ran out"] = size.predicted_bytes if size.status == "out of memory" else None
        record["best_at"] = f"{size.best_heldout_at / size.done:.0%}" if size.best_heldout_at else None
        record[f"{size.batch_size}/end"] = heldout if size.is_finished else None
        record |= _ends("final_heldout", mean_interval(size))
        if heldout is not None and train is not None and is_lm:
            record["gap"] = sweep.sign * (train - heldout)
        if heldout is not None and size.is_finished and best and best.final_heldout is not None:
            record["behind"] = sweep.sign * (best.final_heldout - heldout) + 0.0  # no -0.0
            record |= _ends("behind", behind(sweep, size, best))
        records.append(record)
    return records


def _ends(name: str, interval: tuple[float, float] | None) -> dict[str, float]:
    return {} if interval is None else {f"{name}/low": interval[0], f"{name}/high": interval[1]}


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


def mean_interval(size: Size) -> tuple[float, float] | None:
    """95 % interval of its held-out mean: of its rows' difference from nothing."""
    return paired_difference(size.heldout, [0.0] * len(size.heldout))


def facts(sweep: Sweep) -> Iterator[Fact]:
    """The best sizes, those that failed, and what to mind."""
    best, quick = best_by_quality(sweep), fastest(sweep.finished)
    if best is None:
        yield Fact(f"Best {sweep.quality}", "not known", "", "No size finished with one.")
    else:
        record = {"final_heldout": best.final_heldout} | _ends("final_heldout", mean_interval(best))
        rated = f"{show_figure(record, 'final_heldout')} {sweep.quality_unit}".strip()
        note = "At the end, after equal work. Each size ran once, with one seed."
        yield Fact(f"Best {sweep.quality}", _named(best), rated, note)
        if close := not_told_from(sweep, best):
            note = "The 95 % interval of the difference on the same held-out rows holds 0."
            yield Fact("Not told from the best", _named(*close), "", note)
            if choice := fastest([best, *close]):
                note = "The fastest of these and the best."
                yield Fact("Trade-off", _named(choice), show(choice.seconds, "seconds"), note)
    if quick is not None:
        limit = ALIKE * (quick.seconds or 0.0)
        alike = [size for size in sweep.finished if size is not quick and 0 < (size.seconds or 0) <= limit]
        note = f"At most a tenth longer, which one run cannot tell: {_named(*alike)}." if alike else ""
        yield Fact("Fastest", _named(quick), show(quick.seconds, "seconds"), note)
    for size in sweep.sizes:
        if not size.is_finished:
            predicted = f"{readable(size.predicted_bytes)} predicted" if size.predicted_bytes else ""
            yield Fact(_named(size).capitalize(), size.status, predicted, size.message)
    how, note = _RATES.get(str(sweep.header.get("scale_lr")), ("not known", _UNTUNED))
    tries = [(size, [rate for rate, _ in size.tuned]) for size in sweep.sizes if len(size.tuned) > 1]
    if edge := [size for size, rates in tries if size.learning_rate in (min(rates), max(rates))]:
        note += f" The best was the lowest or highest tried at {_named(*edge)}: search further."
    yield Fact("Learning rate", how, show(figure(sweep.header, "learning_rate")), note)


def _named(*sizes: Size) -> str:
    return f"size {', '.join(str(size.batch_size) for size in sizes)}"
