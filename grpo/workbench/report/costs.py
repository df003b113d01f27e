"""What batch sizes cost: the sections of a sweep's time and memory."""

from collections.abc import Sequence
from dataclasses import replace

from grpo.memory.budget import GB, readable
from grpo.workbench.report.figures import PALETTE, Curve, Look, draw
from grpo.workbench.report.findings import (
    behind,
    best_by_quality,
    common_quality,
    memory_sentences,
    quality_text,
    seconds_to_reach,
)
from grpo.workbench.report.read import Size, Sweep
from grpo.workbench.report.sections import Figure, Section, Table
from grpo.workbench.report.trend import off_trend, seconds_per_update, time_line, trend_sentences
from grpo.workbench.report.wording import cell, duration, fixed, size_cell, sizes

FAILED = PALETTE[6]


def time_section(sweep: Sweep) -> Section:
    """Throughput, seconds of an update beside their trend, and the time to the quality all reached."""
    return Section("Time", trend_sentences(sweep), _time_tables(sweep), _time_figures(sweep))


def memory_section(sweep: Sweep) -> Section:
    """Measured peaks beside the predicted curve, and by component the budget of what failed."""
    return Section("Memory", memory_sentences(sweep), _memory_tables(sweep), _memory_figures(sweep))


def over_sizes(label: str, sized: Sequence[Size], name: str, look: Look = "both", unit: float = 1.0) -> Curve:
    """The figure `name` of those sizes that have it, in `unit`s."""
    pairs = [(size.batch_size, value / unit) for size in sized if (value := getattr(size, name)) is not None]
    return Curve(label, [size for size, _ in pairs], [value for _, value in pairs], look=look)


def _time_figures(sweep: Sweep) -> list[Figure]:
    line, strange = time_line(sweep), [size for size, _ in off_trend(sweep)]
    timed = [(size, each) for size in sweep.finished if (each := seconds_per_update(size))]
    named = [size.batch_size for size in sweep.finished]
    curves = [
        Curve("measured", [size.batch_size for size, _ in timed], [each for _, each in timed], look="dots")
    ]
    if line is not None:
        curves.append(Curve("trend", named, [line(size) for size in named], look="dashed"))
    marked = [(size.batch_size, each) for size, each in timed if size in strange]
    curves.append(Curve("off the trend", [at for at, _ in marked], [each for _, each in marked], look="rings",
                        color=FAILED))  # fmt: skip
    return [
        *draw("throughput", "Throughput", [over_sizes("", sweep.finished, "rate")], x="batch size",
              y=f"{sweep.unit} a second", sizes=named, from_zero=True,
              caption="Once it runs."),
        *draw("seconds", "Seconds of an update", curves, x="batch size", y="seconds", sizes=named,
              from_zero=True, caption=f"The training time, {sweep.start} included, divided by the updates."),
    ]  # fmt: skip


def _time_tables(sweep: Sweep) -> list[Table]:
    target, best = common_quality(sweep), best_by_quality(sweep)
    if target is None or best is None:
        return []
    rows = [
        (
            str(size.batch_size), cell(size.seconds, duration), cell(size.compile_s, duration),
            cell(seconds_per_update(size), duration), cell(size.steady_s_per_update, duration),
            cell(None if size.final_heldout is None else behind(sweep, size, best), fixed),
            cell(seconds_to_reach(sweep, size, target), duration),
        )
        for size in sweep.finished
    ]  # fmt: skip
    reached = f"to reach {quality_text(sweep, target)}"
    columns = (
        "size",
        "time",
        f"of it {sweep.start}",
        "an update",
        "once it runs",
        "behind the best",
        reached,
    )
    return [
        Table(columns, rows, f"The last column is the time to a {sweep.quality} that every size reached.")
    ]


def _memory_figures(sweep: Sweep) -> list[Figure]:
    predicted = [size for size in sweep.sizes if size.predicted_bytes]
    said = [size.predicted_bytes or 0.0 for size in predicted]
    curves = [
        Curve("predicted", [size.batch_size for size in predicted], [each / GB for each in said]),
        over_sizes("measured", sweep.finished, "peak_bytes", "dots", GB),
    ]  # fmt: skip
    failed = over_sizes("ran out", [size for size in predicted if size.status == "out of memory"],
                        "predicted_bytes", "crosses", GB)  # fmt: skip
    curves.append(replace(failed, color=FAILED))
    usable, highest = sweep.usable_bytes, max(said, default=0.0)
    far = bool(usable and usable > 2 * highest)  # a line there would press all else flat
    return draw(
        "memory", "Memory by batch size", curves, x="batch size", y="GB, peak", from_zero=True,
        sizes=[size.batch_size for size in sweep.sizes],
        limit=(usable / GB, "usable") if usable and not far else None,
        caption=f"{readable(usable)} are usable." if usable and far else "1 GB is 2^30 bytes.",
    )  # fmt: skip


def _memory_tables(sweep: Sweep) -> list[Table]:
    """The budget by component, of the sizes that failed beside the largest that did not."""
    failed = [size for size in sweep.sizes if size.status == "out of memory" and size.parts]
    shown = [*[size for size in sweep.finished if size.parts][-1:], *failed]
    if not shown:
        return []
    names = dict.fromkeys(name for size in shown for name in size.parts)
    rows = [(name, *(size_cell(size.parts.get(name)) for size in shown)) for name in names]
    rows.append(("predicted", *(size_cell(sum(size.parts.values())) for size in shown)))
    rows.append(("measured", *(size_cell(size.peak_bytes) for size in shown)))
    if sweep.usable_bytes:
        rows.append(("usable", *(size_cell(sweep.usable_bytes) for _ in shown)))
    columns = ("component", *(f"size {size.batch_size}, {size.status}" for size in shown))
    return [Table(columns, rows, f"Predicted by component, {sizes(size.batch_size for size in shown)}.")]
