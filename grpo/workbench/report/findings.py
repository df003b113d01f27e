"""What a sweep's figures say: the best sizes, what failed, what to mind.

Quality is held-out quality at the end, when every size has done the same work; the best value on the way
would favour whoever was looked at most often.
"""

from collections.abc import Iterator, Sequence

from grpo.memory.budget import readable
from grpo.workbench.report.page import Fact
from grpo.workbench.report.read import Sweep, points
from grpo.workbench.report.wording import cell, duration, fixed
from grpo.workbench.sizes import Size, figure, paired_difference

ALIKE = 1.1
"""Times as long: what one run of each size, after one another, cannot tell apart."""
_RATES = {
    "none": "the same at every size", "linear": "in proportion to the size",
    "sqrt": "with the square root of the size", "tuned": "tuned at each size",
}  # fmt: skip


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


def common_quality(sweep: Sweep) -> float | None:
    """The quality that every finished size reached at its end: the worst of them."""
    ends = [sweep.sign * size.final_heldout for size in sweep.finished if size.final_heldout is not None]
    return sweep.sign * min(ends) if len(ends) > 1 else None


def seconds_to_reach(sweep: Sweep, size: Size, quality: float | None) -> float | None:
    """Training time at the first evaluation that is at least as good; the untrained model counts for none."""
    trained = [point for point in size.curve if point["done"]]
    later = zip(*points(trained, "seconds", "heldout"), strict=True)
    return next((at for at, value in later if sweep.sign * (value - (quality or 0.0)) >= 0), None)


def facts(sweep: Sweep) -> Iterator[Fact]:
    """The best sizes, those that failed, and what to mind."""
    best, quick = best_by_quality(sweep), fastest(sweep.finished)
    if best is None:
        yield Fact(f"Best {sweep.quality}", "not known", "", "No size finished with one.")
    else:
        note = "At the end, after equal work. Each size ran once, with one seed."
        yield Fact(
            f"Best {sweep.quality}", _listed([best]), f"{rated(best)} {sweep.quality_unit}".strip(), note
        )
        if close := not_told_from(sweep, best):
            note = "The 95 % interval of the difference on the same held-out rows holds 0."
            yield Fact("Not told from the best", _listed(close), "", note)
            if choice := fastest([best, *close]):
                note = "The fastest of these and the best."
                yield Fact("Trade-off", _listed([choice]), cell(choice.seconds, duration), note)
    if quick is not None and quick.seconds is not None:
        alike = [size for size in sweep.finished if size is not quick and size.seconds
                 and size.seconds <= ALIKE * quick.seconds]  # fmt: skip
        note = f"At most a tenth longer, which one run cannot tell: {_listed(alike)}." if alike else ""
        yield Fact("Fastest", _listed([quick]), duration(quick.seconds), note)
    for size in sweep.sizes:
        if not size.is_finished:
            told = f"{readable(size.predicted_bytes)} predicted" if size.predicted_bytes else ""
            yield Fact(_listed([size]).capitalize(), size.status, told, size.message)
    yield _learning_rate(sweep)


def _learning_rate(sweep: Sweep) -> Fact:
    """What it has to do with differences of quality between sizes."""
    how = str(sweep.header.get("scale_lr"))
    note = "Not tuned: what looks like the effect of batch size may be that of its learning rate."
    if how == "tuned":
        edge = [size for size in sweep.sizes if len(size.tuned) > 1
                and size.learning_rate in (min(size.tuned)[0], max(size.tuned)[0])]  # fmt: skip
        search = f" The best was the lowest or highest tried at {_listed(edge)}: search further."
        note = f"Differences of quality are those of the size.{search if edge else ''}"
    elif how == "none":
        note += " Larger batches usually want a higher one."
    rate = cell(figure(sweep.header, "learning_rate"))
    return Fact("Learning rate", _RATES.get(how, "not known"), rate, note)


def _listed(sizes: Sequence[Size]) -> str:
    return f"size {', '.join(str(size.batch_size) for size in sizes)}"


def error(size: Size) -> float | None:
    """Half the 95 % interval of its held-out mean: of its rows' difference from nothing."""
    ends = paired_difference(size.heldout, [0.0] * len(size.heldout))
    return None if ends is None else (ends[1] - ends[0]) / 2


def rated(size: Size) -> str:
    """2.300 ± 0.012"""
    half = error(size)
    return cell(size.final_heldout, fixed) + ("" if half is None else f" ± {fixed(half)}")
