"""Peak bytes of a phase: a fit to what was traced, corrected by what is measured.

What exists all along (weights, optimizer, …) the caller counts exactly. What a phase adds is traced at
a few shapes, with fake tensors, so that nothing is computed, and fitted (fit.py). Measured peaks then
correct the fit by a factor, and their scatter becomes the stated error.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo.memory.phase import ADDED, Footprint
from grpo.memory.shape import Shape

UNCALIBRATED_ERROR = 0.05
"""Relative error stated before anything was measured; scripts/benchmark_memory.py prints the true one."""
LEAST_ERROR, LEAST_ERROR_BYTES = 0.01, 64 * 2**10
"""No stated error is less, relative or in bytes."""
REMEMBERED = 50
"""Measurements a phase is corrected by, the newest."""


class Predictor:
    """Peak bytes of each phase, better after each `observe`.

    fits: by phase, a function of the shape such as a `PhaseFit`.
    scratch_bytes: by phase, what kernels may hold that neither a trace nor a measurement sees; no error of
    the phase is less.
    first_error: relative, stated before anything was measured; None: UNCALIBRATED_ERROR.
    bias: multiplies every prediction; for tests that want a wrong one.
    """

    def __init__(
        self,
        fits: Mapping[str, Callable[[Shape], float]],
        *,
        scratch_bytes: Mapping[str, float] | None = None,
        first_error: float | None = None,
        bias: float = 1.0,
    ) -> None:
        self._scratch_bytes = dict(scratch_bytes or {})
        self._fits = dict(fits)
        self._bias = bias
        self._first_error = UNCALIBRATED_ERROR if first_error is None else first_error
        self._seen: dict[str, deque[tuple[float, float]]] = {
            phase: deque(maxlen=REMEMBERED) for phase in fits
        }

    def predict(self, phase: str, shape: Shape, *, refined: bool = True) -> Footprint:
        """What `phase` adds at its peak. KeyError for a phase that has no fit.

        refined: by what was measured.
        """
        peak = self._bias * self._fits[phase](shape)
        seen = self._seen[phase] if refined else ()
        least_error = max(LEAST_ERROR_BYTES, self._scratch_bytes.get(phase, 0.0))
        if not seen:
            return Footprint({ADDED: peak}, max(least_error, self._first_error * peak))
        factor = _factor(seen)
        corrected = peak + (factor - 1) * _share_in_error(seen, factor, peak) * peak
        return Footprint({ADDED: corrected}, max(least_error, _error(seen, factor) * corrected))

    def observe(self, phase: str, shape: Shape, measured_bytes: float) -> None:
        """Correct `phase` by the peak that was measured at `shape`."""
        predicted = self._bias * self._fits[phase](shape)
        if predicted > 0 and measured_bytes > 0:
            self._seen[phase].append((measured_bytes, predicted))

    def state(self) -> dict[str, Any]:
        """What was measured so far, for a checkpoint: pairs of measured and predicted bytes."""
        return {phase: [list(pair) for pair in seen] for phase, seen in self._seen.items()}

    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        for phase in self._seen:
            pairs = ((measured, predicted) for measured, predicted in state.get(phase, ()))
            self._seen[phase] = deque(pairs, maxlen=REMEMBERED)


def _factor(seen: Sequence[tuple[float, float]]) -> float:
    """Measured over predicted: the median, where a shape weighs as its bytes do (small ones are noisy)."""
    measured, predicted = np.asarray(seen).T
    order = np.argsort(measured / predicted)
    weight = predicted[order].cumsum()
    middle = np.searchsorted(weight, weight[-1] / 2)
    return float((measured / predicted)[order][middle])


def _share_in_error(seen: Sequence[tuple[float, float]], factor: float, peak: float) -> float:
    """The share of `peak` that `factor` corrects.

    A factor far from 1 means a wrong slope: all of it. One near 1 means some bytes more or less, which
    do not grow beyond the largest shape that was measured.
    """
    if abs(factor - 1) > UNCALIBRATED_ERROR or peak <= 0:
        return 1.0
    return min(1.0, max(predicted for _, predicted in seen) / peak)


def _error(seen: Sequence[tuple[float, float]], factor: float) -> float:
    """95 % quantile of the relative scatter, wider while it rests on few measurements."""
    pairs = np.asarray(seen)
    large = pairs[pairs[:, 1] >= pairs[:, 1].max() / 2]
    spread = np.abs(large[:, 0] / (factor * large[:, 1]) - 1)
    few = UNCALIBRATED_ERROR / (1 + len(large))
    return max(LEAST_ERROR, float(np.quantile(spread, 0.95)) + few)
