"""How a sweep's time grows with the batch size, which size does not fit, and what was measured of why.

An update costs a start and so much for each row of the batch. What compiling costs once is, spread over the
updates of equal work, in proportion to the batch size, and so is in the line as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from grpo.memory.budget import readable
from grpo.workbench.report.read import Size, Sweep
from grpo.workbench.report.wording import capital, duration, share

OFF_TREND = 1.3
"""A time is off the trend by more than this factor, either way."""
FULL = 0.95
"""Of the usable memory: from here on allocators and the system spend time on finding room."""
LEAST_FOR_TREND = 4


@dataclass(frozen=True)
class Line:
    """Seconds of an update: `start` and `slope` for each of its samples or sequences."""

    start: float
    slope: float

    def __call__(self, batch_size: float) -> float:
        return self.start + self.slope * batch_size


def fit_line(batch_sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line that minimises the sum of |log(seconds / line)|, of those through two of the points.

    Least absolute deviations pass through two points, and one wild size does not pull them. Neither
    the start nor the slope is below 0. At least two different sizes.
    """
    given = list(zip(batch_sizes, seconds, strict=True))
    lines = [Line(median(y for _, y in given), 0.0), Line(0.0, median(y / x for x, y in given))]
    for (x, y), (other_x, other_y) in combinations(given, 2):
        if x != other_x:
            slope = (other_y - y) / (other_x - x)
            lines.append(Line(y - slope * x, slope))
    lines = [line for line in lines if line.start >= 0 and line.slope >= 0]
    return min(lines, key=lambda line: sum(abs(math.log(y / line(x))) for x, y in given))


def seconds_per_update(size: Size) -> float | None:
    """Of the whole training time."""
    return size.seconds / size.updates if size.seconds and size.updates else None


def time_line(sweep: Sweep) -> Line | None:
    """The trend of seconds an update over batch size; None for fewer than four sizes."""
    timed = [(size.batch_size, each) for size in sweep.finished if (each := seconds_per_update(size))]
    if len(timed) < LEAST_FOR_TREND:
        return None
    return fit_line([size for size, _ in timed], [each for _, each in timed])


def off_trend(sweep: Sweep) -> list[tuple[Size, float]]:
    """Finished sizes whose time is off the trend, with the factor."""
    line = time_line(sweep)
    if line is None:
        return []
    factors = [
        (size, each / line(size.batch_size)) for size in sweep.finished if (each := seconds_per_update(size))
    ]
    return [(size, factor) for size, factor in factors if not 1 / OFF_TREND <= factor <= OFF_TREND]


def causes(sweep: Sweep, size: Size, expected_s: float) -> list[str]:
    """What was measured that may explain why `size` took longer than `expected_s` seconds in all."""
    assert size.seconds is not None
    excess, found = size.seconds - expected_s, []
    if size.compile_s and size.compile_s >= excess / 2:
        fits = size.seconds - size.compile_s <= OFF_TREND * expected_s
        text = f"{sweep.start} took {duration(size.compile_s)} of its {duration(size.seconds)}"
        found.append(text + ", and without it the size fits" * fits)
    usable = sweep.usable_bytes
    if usable and size.peak_bytes and size.peak_bytes >= FULL * usable:
        found.append(
            f"memory peaked at {share(size.peak_bytes / usable)} of the {readable(usable)} usable, "
            "where finding room takes time"
        )
    return found


def trend_sentences(sweep: Sweep) -> list[str]:
    line = time_line(sweep)
    if line is None:
        return [f"Fewer than {LEAST_FOR_TREND} sizes finished: too few for a trend of time."]
    what = "sample" if sweep.unit == "samples" else "sequence"
    said = [
        f"An update takes {duration(line.start)} and {duration(line.slope)} for each {what} of the batch: "
        "the line of least absolute deviation through the sizes that finished."
    ]
    strange = off_trend(sweep)
    if not strange:
        said.append(f"No size is off it by more than {OFF_TREND} times.")
    for size, factor in strange:
        assert size.updates is not None
        text = f"Size {size.batch_size} does not fit: it takes {factor:.1f} times what the line says. "
        if factor < 1:
            said.append(f"{text}It is faster, and no cause of that was measured.")
            continue
        found = causes(sweep, size, size.updates * line(size.batch_size))
        said.append(text + (f"{capital('; '.join(found))}." if found else "No cause of that was measured."))
    return said
