"""How a sweep's time grows with the batch size, and which size does not fit.

An update costs a start and so much for each row of the batch. What compiling costs once is, spread over the
updates of equal work, in proportion to the batch size, and so is in the line as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from grpo.workbench.report.read import Size, Sweep
from grpo.workbench.report.wording import duration

OFF_TREND = 1.3
"""A time is off the trend by more than this factor, either way."""
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
        said.append(f"Size {size.batch_size} does not fit: it takes {factor:.1f} times what the line says.")
    return said
