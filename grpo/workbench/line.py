"""Memory over the batch size as a line, where it stops being one, and which sizes are beyond it.

    peak = start + slope * (batch - first)

What an allocator's peak does not show (the context, blocks of fixed sizes, workspaces) is the margin: within
it a size is a risk.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from scipy.stats import linregress

from grpo.memory.budget import CONTEXT_BYTES

LEAST_FOR_A_LINE = 4
"""Sizes: through two there is always a line, and three say little of whether there is."""
OFF_THE_LINE = 0.02
"""Share of its peak by which a size must miss the line through the smaller ones to be off it."""
MARGIN_SHARE = 0.06
"""The share of the device, beside a context's 0.5 GB, that an accelerator's allocator does not show.

The published linear law (14.80 GB at batch 64, 0.2052 GB a sample, a device of 47.4 GB) ran out of memory
at 208, which the line puts at 44.34 GB: there it was at least 3.06 GB.
"""
HOST_MARGIN_SHARE = 0.02
"""On a host the peaks are the process's own: only their scatter is left."""
MARGIN_REASONS = {
    "cpu": "for the scatter of a process's peaks from run to run",
    "accelerator": "for what no allocator shows, by one published case",
}
"""The reason for `safety_margin`, by the type of device."""


@dataclass(frozen=True)
class Line:
    """Through peaks, in bytes; `r_squared` over the points that it was fitted to."""

    first: int
    start_bytes: float
    bytes_per_sample: float
    r_squared: float

    def __call__(self, batch_size: float) -> float:
        """Peak bytes."""
        return self.start_bytes + self.bytes_per_sample * (batch_size - self.first)

    def largest(self, usable_bytes: float) -> int:
        """The largest batch that it puts within so many bytes; 0 for none. It has to rise."""
        return max(0, int(self.first + (usable_bytes - self.start_bytes) / self.bytes_per_sample))

    def risk(self, batch_size: int, total_bytes: float, margin_bytes: float) -> str:
        """Whether a size runs out of memory: certain beyond the device, likely within its margin, or no."""
        peak = self(batch_size)
        if peak > total_bytes:
            return "certain"
        return "likely" if peak > total_bytes - margin_bytes else "no"


def fit_line(peaks: Mapping[int, float]) -> Line | None:
    """Fit peak bytes by batch size by least squares; None for a single size, or where peaks do not rise."""
    if len(peaks) < 2:
        return None
    first = min(peaks)
    line = linregress([size - first for size in peaks], list(peaks.values()))
    if line.slope <= 0:
        return None
    return Line(first, float(line.intercept), float(line.slope), float(line.rvalue**2))


def first_outlier(peaks: Mapping[int, float]) -> int | None:
    """The first size that misses the line through all smaller ones (at least three), or None."""
    sizes = sorted(peaks)
    for count in range(3, len(sizes)):
        line, following = fit_line({size: peaks[size] for size in sizes[:count]}), sizes[count]
        if line and abs(peaks[following] - line(following)) > OFF_THE_LINE * peaks[following]:
            return following
    return None


def safety_margin(total_bytes: float, device_type: str) -> float:
    """Bytes that a device needs beyond the measured peaks, see MARGIN_SHARE."""
    if device_type == "cpu":
        return HOST_MARGIN_SHARE * total_bytes
    return CONTEXT_BYTES + MARGIN_SHARE * total_bytes
