"""The content of a sweep's page, and of several sweeps': the best sizes, what failed, what to mind.

Quality is held-out quality at the end, when every size has done the same work; the best value on the way
would favour whoever was looked at most often.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grpo.statistics import mean_interval, neighbours_interval
from grpo.workbench.report.charts import BATCH_SIZE
from grpo.workbench.report.read import SweepFolder, prefix_by_run
from grpo.workbench.report.text import Fact, show, show_figure
from grpo.workbench.sizes import Record, figure

ALIKE = 1.1
"""Times as long: what one run of each size, after one another, cannot tell apart."""
_ALIKE = "One run of each cannot tell these apart: at most a tenth longer."
_UNTUNED = "Not tuned: what looks like the effect of batch size may be that of its learning rate."
_RATES = {
    "none": ("the same at every size", f"{_UNTUNED} Larger batches usually want a higher one."),
    "linear": ("in proportion to the size", _UNTUNED),
    "sqrt": ("with the square root of the size", _UNTUNED),
    "tuned": ("tuned at each size", "A difference of quality is not one of learning rates."),
}
"""By --scale-lr: what the learning rate was, and what that means."""


def sweep_content(sweep: SweepFolder) -> dict[str, Any]:
    """Returns the values that sweep.html.j2 shows."""
    parts = [("of", "model"), ("on", "device_name"), ("in", "precision")]
    words = [f" {word} {sweep.header[name]}" for word, name in parts if sweep.header.get(name)]
    work = f"each with {show(figure(sweep.header, 'total'))} {sweep.unit}{''.join(words)}"
    tuned = {str(size.batch_size): dict(size.tuned) for size in sweep.sizes if size.tuned}
    rates = sorted({rate for tries in tuned.values() for rate in tries})
    sizes = size_records(sweep)
    return {
        "summary": f"{len(sweep.finished)} of {len(sweep.sizes)} batch sizes finished, {work}.",
        "sweep": sweep,
        "facts": [*facts(sweep, sizes)],
        "sizes": sizes,
        "points": prefix_by_run(
            {str(size.batch_size): size.curve for size in sweep.sizes}, "done", "seconds"
        ),
        "tries": [
            {"size": size} | {show(rate): show(tries.get(rate), "final_heldout") for rate in rates}
            for size, tries in tuned.items()
        ],
    }


def sweeps_content(sweeps: Sequence[SweepFolder]) -> dict[str, Any]:
    """Returns the values that sweep.html.j2 shows of one sweep, or of several and where their held-out
    quality ended."""
    parts = [sweep_content(sweep) for sweep in sweeps]
    ended = {part["sweep"].name: [size for size in part["sizes"] if size["is_finished"]] for part in parts}
    ledes = [f"{part['sweep'].name}: {part['summary']}" for part in parts]
    return parts[0] | {
        "summary": " ".join(ledes) if len(parts) > 1 else parts[0]["summary"],
        "parts": parts,
        "kinds": {f"{sweep.quality} over {sweep.unit}" for sweep in sweeps},
        "ends": prefix_by_run(ended, BATCH_SIZE),
    }


def size_records(sweep: SweepFolder) -> list[dict[str, Any]]:
    """Figures of each size by name, with the ends of their 95 % intervals as NAME/low and NAME/high.

    behind: how much worse than the best it ended. gap: how much worse held-out is than training, which tells
    nothing where training samples and evaluations are greedy. ran out: what had been predicted for a size
    without memory enough. SIZE/end: `final_heldout` in a figure of its own.
    """
    rated = [size for size in sweep.finished if size.final_heldout is not None]
    best = max(rated, key=lambda size: sweep.sign * (size.final_heldout or 0.0), default=None)
    highest = max((size.peak_bytes or 0 for size in sweep.sizes), default=0)
    is_near = 0 < sweep.usable_bytes <= 2 * highest  # a line far above would press all else flat
    records = []
    for size in sweep.sizes:
        heldout, train = size.final_heldout, size.final_train
        record = {**vars(size), BATCH_SIZE: size.batch_size}
        record["is_best"] = size is best
        record["usable"] = sweep.usable_bytes if size.peak_bytes and is_near else None
        record["ran out"] = size.predicted_bytes if size.status == "out of memory" else None
        record["best_at"] = f"{size.best_heldout_at / size.done:.0%}" if size.best_heldout_at else None
        record[f"{size.batch_size}/end"] = heldout if size.is_finished else None
        record |= _interval(sweep, "final_heldout", size.heldout)
        if heldout is not None and train is not None and sweep.header.get("objective") != "grpo":
            record["gap"] = sweep.sign * (train - heldout)
        if heldout is not None and size.is_finished and best and best.final_heldout is not None:
            record["behind"] = sweep.sign * (best.final_heldout - heldout) + 0.0  # no -0.0
            if size is not best:
                better, worse = (best, size) if sweep.sign > 0 else (size, best)
                record |= _interval(sweep, "behind", better.heldout, worse.heldout)
        records.append(record)
    return records


def _interval(
    sweep: SweepFolder, name: str, ours: Sequence[float], theirs: Sequence[float] | None = None
) -> dict[str, float]:
    """The interval of the mean of ours - theirs on the same held-out rows, where it is known.

    Rows are prompts, or windows of a text, which are like their neighbours.
    """
    theirs = theirs or [0.0] * len(ours)
    if len(ours) != len(theirs) or len(ours) < 2:
        return {}
    interval = mean_interval if sweep.header.get("objective") == "grpo" else neighbours_interval
    low, high = interval(np.subtract(ours, theirs))
    return {f"{name}/low": low, f"{name}/high": high}


def facts(sweep: SweepFolder, sizes: Sequence[Record]) -> Iterator[Fact]:
    """The best sizes, those that failed, and what to mind. sizes: of `size_records`."""
    finished = [size for size in sizes if size["is_finished"]]
    best = next((size for size in finished if size["is_best"]), None)
    if best is None:
        yield Fact(f"Best {sweep.quality}", "not known", "", "No size finished with one.")
    else:
        rated = f"{show_figure(best, 'final_heldout')} {sweep.quality_unit}".strip()
        note = "At the end, after equal work. Each size ran once, with one seed."
        yield Fact(f"Best {sweep.quality}", _named(best), rated, note)
        if close := [size for size in finished if size.get("behind/low", 1.0) <= 0]:
            note = "The 95 % interval of the difference on the same held-out rows holds 0."
            yield Fact("Not told from the best", _named(*close), "", note)
            if quick := _fastest([best, *close]):
                note = f"The fastest of these and the best. {_ALIKE if len(quick) > 1 else ''}".strip()
                yield Fact("Trade-off", _named(*quick), show_figure(quick[0], "seconds"), note)
    if quick := _fastest(finished):
        note = _ALIKE if len(quick) > 1 else ""
        yield Fact("Fastest", _named(*quick), show_figure(quick[0], "seconds"), note)
    for size in sizes:
        if not size["is_finished"]:
            predicted = f"{show_figure(size, 'predicted_bytes')} predicted" if size["predicted_bytes"] else ""
            yield Fact(_named(size).capitalize(), size["status"], predicted, size["message"])
    how, note = _RATES.get(str(sweep.header.get("scale_lr")), ("not known", _UNTUNED))
    tries = [(size, [rate for rate, _ in size["tuned"]]) for size in sizes if len(size["tuned"]) > 1]
    if edge := [size for size, rates in tries if size["learning_rate"] in (min(rates), max(rates))]:
        note += f" The best was the lowest or highest tried at {_named(*edge)}: search further."
    yield Fact("Learning rate", how, show(figure(sweep.header, "learning_rate")), note)


def _fastest(sizes: Sequence[Record]) -> list[Record]:
    """The sizes that one run cannot tell from the fastest, which comes first: at most a tenth longer."""
    by_time = sorted((size for size in sizes if size["seconds"]), key=lambda size: size["seconds"])
    return [size for size in by_time if size["seconds"] <= ALIKE * by_time[0]["seconds"]]


def _named(*sizes: Record) -> str:
    return f"size {', '.join(str(size[BATCH_SIZE]) for size in sizes)}"
