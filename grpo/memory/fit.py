"""Peak bytes of a phase as a formula of its shape (shape.py), fitted to traces at a few shapes.

Each moment of a phase has coefficients of its own; the largest counts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from grpo.memory.shape import Shape, pass_features

_NEAR_THE_PEAK = 0.7
"""Share of the peak. Moments that never come as near count only if the formula holds for them."""
_HOLDS = 0.005
"""Largest relative error of a formula that holds."""


Moment = tuple[str, int]
"""An operation by name, and how many of those that are done equally often at every shape came before."""


def align(logs: Sequence[Sequence[tuple[str, int]]]) -> list[dict[Moment, int]]:
    """Logs of the same work at several shapes (see `LiveBytes.log`) as bytes by moment.

    Operations that are done equally often at every shape divide the work. Between two of them may be
    loops, over chunks or tokens, that run as often as the shape has it: of these, the most that each
    kind of operation held.
    """
    counts = [Counter(name for name, _ in log) for log in logs]
    as_often = {name for name in counts[0] if len({count[name] for count in counts}) == 1}
    moments = []
    for log in logs:
        held: dict[Moment, int] = {}
        before = 0
        for name, num_bytes in log:
            held[name, before] = max(held.get((name, before), 0), num_bytes)
            before += name in as_often
        moments.append(held)
    return moments


class PhaseFit:
    """A formula for each moment at which the peak may stand; the largest counts.

    Which moment that is changes with the shape (attention's for long texts, the first layer's gradients
    for short ones), and each has coefficients of its own, found by least squares in relative error.
    """

    def __init__(
        self,
        traces: Sequence[tuple[Shape, Mapping[Moment, float]]],
        features: Callable[[Shape], np.ndarray] = pass_features,
    ) -> None:
        """traces: (shape, bytes by moment, see `align`). features: what coefficients stand before.

        ValueError without traces.
        """
        if not traces:
            raise ValueError("a fit needs at least one traced shape.")
        self._features = features
        seen = np.array([features(shape) for shape, _ in traces])  # (traces, features)
        scale = np.abs(seen).max(0).clip(min=1.0)  # features differ by orders of magnitude
        highest = [max(peaks.values()) for _, peaks in traces]
        everywhere = set[Moment].intersection(*(set(peaks) for _, peaks in traces))

        def solve(peaks: np.ndarray) -> tuple[np.ndarray, bool]:
            """The formula's coefficients for a moment, and whether it holds."""
            relative = seen / scale / peaks[:, None]
            solution = np.linalg.lstsq(relative, np.ones(len(peaks)))[0]
            return solution / scale, bool(np.abs(relative @ solution - 1).max() < _HOLDS)

        formulas = []
        for moment in everywhere:
            peaks = np.array([max(1.0, trace[moment]) for _, trace in traces])
            formula, holds = solve(peaks)
            if holds or (peaks / highest).max() > _NEAR_THE_PEAK:
                formulas.append(formula)
        self._formulas = np.array(formulas)  # (moments, features)

    def __call__(self, shape: Shape) -> float:
        """Peak bytes."""
        return max(0.0, float((self._formulas @ self._features(shape)).max()))
