"""What a phase of unknown work adds at its peak, from what its passes have held.

For R rows of T tokens, bytes are about  a + b·R + c·R·T,  none of them negative: gradients, what a row takes
however long it is (a line of the vocabulary's logits), and what its tokens do.
"""

from collections import defaultdict, deque

import numpy as np
from scipy.optimize import nnls

from grpo.memory.predictor import LEAST_ERROR, UNCALIBRATED_ERROR

ONE_SIZE_ERROR = 0.1
"""Relative error stated as long as all passes were of one size."""
REMEMBERED = 5
"""Measurements of sizes alike, the newest."""
_ALIKE = 1.25
"""Sizes are alike within this factor."""
_RELUCTANCE = 0.03
"""Of the fit to say that bytes are not the tokens': only if the measurements do."""


class Observed:
    """The formula of one phase, better after each `add`."""

    def __init__(self) -> None:
        self._seen: defaultdict[tuple[int, int], deque[tuple[float, float, float]]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        self.most_rows = 0
        """The most rows at once that were measured."""
        self.most_tokens = 0
        """Rows times tokens of the largest pass that was measured."""

    def __len__(self) -> int:
        return sum(map(len, self._seen.values()))

    @property
    def sizes(self) -> int:
        """Numbers of rows that were measured, those alike counted once."""
        return len({rows for rows, _ in self._seen})

    def add(self, rows: int, tokens: int, num_bytes: float) -> None:
        """A pass over `rows`, the longest of which had `tokens`, has added so much at its peak."""
        alike = int(np.log(rows) / np.log(_ALIKE)), int(np.log(tokens) / np.log(_ALIKE))
        self._seen[alike].append((rows * tokens, rows, num_bytes))
        self.most_rows, self.most_tokens = max(self.most_rows, rows), max(self.most_tokens, rows * tokens)

    def predict(self, rows: int, tokens: int) -> tuple[float, float]:
        """Bytes that such a pass adds, and the error to count with.

        ValueError before anything was measured.
        """
        if not self._seen:
            raise ValueError("nothing was measured yet.")
        seen = np.array([each for alike in self._seen.values() for each in alike])
        sizes, measured = np.c_[seen[:, :2], np.ones(len(seen))], seen[:, 2]
        scale, most = sizes.max(0), max(1.0, measured.max())
        # Where all rows had one length, either of the first two columns explains the bytes: let tokens do.
        reluctance = _RELUCTANCE * np.diag([0.0, 1.0, 1.0])[1:]
        found, _ = nnls(np.r_[sizes / scale, reluctance], np.r_[measured / most, 0.0, 0.0])
        formula = most * found / scale
        predicted = float(formula @ (rows * tokens, rows, 1.0))
        beyond = max(1.0, rows * tokens / self.most_tokens)
        return predicted, beyond * self._error(seen, sizes @ formula) * predicted

    def _error(self, seen: np.ndarray, fitted: np.ndarray) -> float:
        """Relative: the 95 % quantile of what the formula misses, and more while it rests on few."""
        if self.sizes < 2:
            return ONE_SIZE_ERROR
        measured = seen[:, 2]
        large = measured >= measured.max() / 2
        missed = np.abs(measured[large] / fitted[large].clip(min=1.0) - 1)
        return max(LEAST_ERROR, float(np.quantile(missed, 0.95)) + UNCALIBRATED_ERROR / (1 + large.sum()))
