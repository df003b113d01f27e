"""Memory over the batch size as a line, where it stops being one, and which sizes are beyond it.

    peak = start + slope * (batch - first)

Fitted by least squares to what was measured, on whatever card. What an allocator's peak does not show
(the context, blocks of fixed sizes, workspaces) is the margin: within it a size is a risk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from grpo.memory.budget import CONTEXT_BYTES

OFF_THE_LINE = 0.02
"""Share of its peak by which a size must miss the line through the smaller ones to be off it."""
MARGIN_SHARE = 0.06
"""Of the device, beside a context's 0.5 GB: what an accelerator's allocator does not show.

The published linear law (14.80 GB at batch 64, 0.2052 GB a sample, a device of 47.4 GB) ran out of memory
at 208, which the line puts at 44.34 GB: there it was at least 3.06 GB.
"""
HOST_MARGIN_SHARE = 0.02
"""On a host the peaks are the process's own: only their scatter is left."""
Risk = Literal["fits", "likely", "certain"]


@dataclass(frozen=True)
class Law:
    """A line through measured peaks. Bytes; `r_squared` over the points that it was fitted to."""

    first: int
    start_bytes: float
    bytes_per_sample: float
    r_squared: float

    def __call__(self, batch_size: float) -> float:
        """Peak bytes."""
        return self.start_bytes + self.bytes_per_sample * (batch_size - self.first)

    def largest(self, usable_bytes: float, *, multiple: int = 1) -> int:
        """The largest batch that the line puts within `usable_bytes`; 0 for none."""
        if self.bytes_per_sample <= 0:
            raise ValueError("memory does not grow with the batch in what was measured: try larger sizes.")
        size = self.first + (usable_bytes - self.start_bytes) / self.bytes_per_sample
        return max(0, int(size // multiple) * multiple)


def fit_law(peaks: Mapping[int, float]) -> Law:
    """The line through peak bytes by batch size. ValueError for fewer than two sizes."""
    if len(peaks) < 2:
        raise ValueError(f"a line needs two measured batch sizes, and there are {len(peaks)}.")
    sizes = np.array(sorted(peaks), float)
    bytes_of = np.array([peaks[int(size)] for size in sizes])
    first = int(sizes[0])
    slope, start = np.polyfit(sizes - first, bytes_of, 1)
    law = Law(first, float(start), float(slope), 1.0)
    return Law(first, law.start_bytes, law.bytes_per_sample, r_squared(law, peaks))


def r_squared(law: Law, peaks: Mapping[int, float]) -> float:
    """Share of the variance of `peaks` that the line explains; 1 where they do not vary."""
    measured = np.array(list(peaks.values()))
    residual = measured - np.array([law(size) for size in peaks])
    total = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float((residual**2).sum()) / total if total > 0 else 1.0


def leaves_the_line(peaks: Mapping[int, float]) -> int | None:
    """The first size that misses the line through all smaller ones (at least three), or None."""
    sizes = sorted(peaks)
    for count in range(3, len(sizes)):
        law = fit_law({size: peaks[size] for size in sizes[:count]})
        following = sizes[count]
        if abs(peaks[following] - law(following)) > OFF_THE_LINE * peaks[following]:
            return following
    return None


def unseen_margin(total_bytes: float, device_type: str) -> float:
    """Bytes of a device that peaks do not show: see MARGIN_SHARE."""
    if device_type == "cpu":
        return HOST_MARGIN_SHARE * total_bytes
    return CONTEXT_BYTES + MARGIN_SHARE * total_bytes


def risk(law: Law, batch_size: int, total_bytes: float, margin_bytes: float) -> Risk:
    """Whether a size runs out of memory: certainly beyond the device, likely within the margin of it."""
    peak = law(batch_size)
    if peak > total_bytes:
        return "certain"
    return "likely" if peak > total_bytes - margin_bytes else "fits"


def explaining_margin(law: Law, failed: Sequence[int], total_bytes: float) -> float | None:
    """The least margin that would have told the sizes that ran out of memory; None where none did."""
    return total_bytes - law(min(failed)) if failed else None
