"""The bytes that a phase's tensors add at its peak, from passes that were measured or traced.

For R rows, whose pass computes S tokens in all,

    bytes = a + b·R + c·S          none of them negative

gradients and what is there whatever the rows; what a row takes however long it is (a line of logits); and
what its tokens do (activations, keys and values). Peaks are the largest of several such formulas, one a
moment of the phase, hence convex in rows; near sizes that were seen what it is off by is corrected.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from grpo.errors import UserError

MEASUREMENTS_PER_SIZE = 5
"""The newest measurements of sizes alike that are kept."""
_ALIKE = 1.25
"""Sizes are alike within this factor."""
_RIDGE = 0.03
"""The reluctance of the fit to say that bytes are not the tokens': only if the measurements do."""


class Formula:
    """Bytes that a phase adds, from what was seen of it: (tokens, rows, bytes), the newest of sizes alike."""

    def __init__(self, seen: Sequence[Sequence[float]] = ()) -> None:
        self._seen: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}
        self.most_tokens = self.most_rows = 0
        """The most tokens and rows of passes that were seen."""
        for tokens, rows, num_bytes in seen:
            self.see(int(rows), int(tokens), num_bytes)

    @property
    def seen(self) -> list[tuple[float, float, float]]:
        return [measured for alike in self._seen.values() for measured in alike]

    @property
    def has_one_size(self) -> bool:
        """Whether all passes had rows alike."""
        return len({rows for rows, _ in self._seen}) == 1

    def see(self, rows: int, tokens: int, num_bytes: float) -> None:
        """A pass over `rows`, of `tokens` in all, has added so much at its peak."""
        alike = int(math.log(rows) / math.log(_ALIKE)), int(math.log(max(1, tokens)) / math.log(_ALIKE))
        measured = self._seen.setdefault(alike, deque(maxlen=MEASUREMENTS_PER_SIZE))
        measured.append((float(tokens), float(rows), float(num_bytes)))
        self.most_tokens, self.most_rows = max(self.most_tokens, tokens), max(self.most_rows, rows)
        self._fitted: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __call__(self, rows: int, tokens: int) -> float:
        """Bytes that such a pass adds. ValueError before anything was seen."""
        if not self._seen:
            raise UserError("nothing was measured yet.")
        if self._fitted is None:
            self._fitted = self._fit()
        coefficients, sizes, errors = self._fitted
        # Peaks bend: at sizes like this one the formula was off by as much.
        far = np.abs(np.log(sizes / np.maximum(1, (tokens, rows)))).max(1)
        near = far < math.log(_ALIKE) if far.min() > 0 else far == 0  # what was seen itself is known
        correction = errors[near].mean().clip(1 / _ALIKE, _ALIKE) if near.any() else 1.0
        return float(coefficients @ (tokens, rows, 1.0) * correction)

    def _fit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the factors of tokens, rows and 1 for M passes: sizes (M, 2), and bytes by size."""
        seen = np.array(self.seen)
        sizes, measured = np.c_[seen[:, :2], np.ones(len(seen))], seen[:, 2]
        scale, most = sizes.max(0), max(1.0, measured.max())
        # Where rows had one length, either of the first two columns explains the bytes: let tokens do.
        reluctance = _RIDGE * np.diag([0.0, 1.0, 1.0])[1:]
        solution, _ = nnls(np.r_[sizes / scale, reluctance], np.r_[measured / most, 0.0, 0.0])
        coefficients = most * solution / scale
        return coefficients, sizes[:, :2], measured / (sizes @ coefficients).clip(min=1e-9)
