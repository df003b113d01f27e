"""Peak bytes of a phase as a formula of its shape, fitted to traces at a few shapes.

    peak = a + s * min(K, chunk) + R * (b0 + b1*P + b2*C + b3*P*C + b4*C**2 + b5*P**2)

for R rows of P prompt and C new tokens, K of them scored in all: rows are independent, so all is
affine in them; attention that keeps its weights is quadratic in tokens; the vocabulary head holds at
most one chunk of tokens. Each moment of a phase has a formula of its own; the largest counts.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

_NEAR_THE_PEAK, _FAR_FROM_IT = 0.7, 0.4
"""Shares of the peak. Moments that never come as near as the first count only if the formula holds for
them; those that never come as near as the second do not count."""
_HOLDS = 0.005
"""Largest relative error of a formula that holds."""


class Shape(NamedTuple):
    """What a phase's memory depends on: rows at once, and tokens of the longest row."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    scored_tokens: int | None = None
    """New tokens of all rows that go through the vocabulary head; None: all are of full length."""


def design_shapes(longest: Shape, *, group_size: int, chunk_tokens: int | None = None) -> list[Shape]:
    """Eleven shapes up to `longest` from which all of the formula's coefficients follow.

    Three are small, as other moments may be the peak there. The others have rows enough to fill the
    head's chunk, however short completions are: below it, what a token adds to the chunk and to the
    rest cannot be told apart.
    """
    long_prompt, long_new = longest.prompt_tokens, longest.new_tokens
    short_prompt, short_new = max(1, long_prompt // 6), max(2, long_new // 8)
    middle_prompt, middle_new = (short_prompt + long_prompt) // 2, (short_new + long_new) // 2
    g = group_size * max(1, -(-(chunk_tokens or 0) // (group_size * long_new)))
    return [
        Shape(2 * group_size, short_prompt, short_new),
        Shape(2 * group_size, long_prompt, long_new),
        Shape(5 * group_size, middle_prompt, middle_new),
        Shape(8 * g, short_prompt, short_new),
        Shape(2 * g, long_prompt, short_new),
        Shape(4 * g, long_prompt, long_new),
        Shape(2 * g, middle_prompt, middle_new),
        Shape(4 * g, short_prompt, long_new),
        Shape(8 * g, middle_prompt, middle_new),
        Shape(4 * g, long_prompt, middle_new),
        Shape(3 * g, middle_prompt, long_new),
    ]


Moment = tuple[str, int | None]
"""An operation by name, and its place from the start (0, 1, …) or the end (-1, …); None: any place."""


def align(logs: Sequence[Sequence[tuple[str, int]]]) -> list[dict[Moment, int]]:
    """Logs of the same work at several shapes (see `LiveBytes.log`) as bytes by moment.

    Work starts and ends alike at every shape: there, each operation is a moment of its own. Between
    are the loops, over chunks or tokens, that run as often as the shape has it: of these, the most that
    each kind of operation held.
    """
    names = [[name for name, _ in log] for log in logs]
    start = _num_alike(names)
    end = _num_alike([list(reversed(each[start:])) for each in names])
    moments = []
    for log in logs:
        middle = len(log) - end
        held: dict[Moment, int] = {}
        for position, (name, num_bytes) in enumerate(log):
            if start <= position < middle:
                held[name, None] = max(held.get((name, None), 0), num_bytes)
            else:
                held[name, position if position < start else position - len(log)] = num_bytes
        moments.append(held)
    return moments


def _highest(trace: Mapping[Moment, float], name: str) -> float:
    """The most that is held at any operation of this name."""
    return max(1.0, *(num_bytes for (operation, _), num_bytes in trace.items() if operation == name))


def _num_alike(sequences: Sequence[Sequence[str]]) -> int:
    """How many elements all sequences share at their start."""
    together = takewhile(lambda each: len(set(each)) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in together)


class PhaseFit:
    """The formula above for each moment at which the peak may stand; the largest counts.

    Which moment that is changes with the shape (attention's for long texts, the first layer's gradients
    for short ones), and each has coefficients of its own, found by least squares in relative error.
    """

    def __init__(
        self, traces: Sequence[tuple[Shape, Mapping[Moment, float]]], *, chunk_tokens: int | None = None
    ) -> None:
        """traces: (shape, bytes by moment, see `align`). ValueError without any."""
        if not traces:
            raise ValueError("a fit needs at least one traced shape.")
        self._chunk_tokens = chunk_tokens
        features = np.array([self._features(shape) for shape, _ in traces])  # (traces, 8)
        scale = np.abs(features).max(0).clip(min=1.0)  # features differ by orders of magnitude
        highest = [max(peaks.values()) for _, peaks in traces]
        everywhere = set[Moment].intersection(*(set(peaks) for _, peaks in traces))
        loops = {name for name, place in everywhere if place is None}

        def solve(peaks: np.ndarray) -> tuple[np.ndarray, bool]:
            """The formula's coefficients for a moment, and whether it holds."""
            relative = features / scale / peaks[:, None]
            solution = np.linalg.lstsq(relative, np.ones(len(peaks)))[0]
            return solution / scale, bool(np.abs(relative @ solution - 1).max() < _HOLDS)

        formulas = []
        for name, place in everywhere:
            peaks = np.array([max(1.0, trace[name, place]) for _, trace in traces])
            if place is not None and (peaks / highest).max() > _FAR_FROM_IT:
                formula, holds = solve(peaks)
                if holds:
                    formulas.append(formula)
                else:  # a loop's first or last round, which has another size
                    loops.add(name)
        for name in loops:
            peaks = np.array([_highest(trace, name) for _, trace in traces])
            formula, holds = solve(peaks)
            if (peaks / highest).max() > (_FAR_FROM_IT if holds else _NEAR_THE_PEAK):
                formulas.append(formula)
        self._formulas = np.array(formulas)  # (moments, 8)

    def __call__(self, shape: Shape) -> float:
        """Peak bytes."""
        return max(0.0, float((self._formulas @ self._features(shape)).max()))

    def _features(self, shape: Shape) -> np.ndarray:
        r, p, c = (float(each) for each in shape[:3])
        scored = r * c if shape.scored_tokens is None else shape.scored_tokens
        chunk = 0.0 if self._chunk_tokens is None else min(scored, self._chunk_tokens)
        return np.array([1.0, chunk, r, r * p, r * c, r * p * c, r * c * c, r * p * p])
