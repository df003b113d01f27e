"""How noisy a step's gradient is, in rows: the batch from which on a larger one is hardly better.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1: the squared norm of a gradient of B rows is in
expectation |mu|² + S/B, of the true gradient and its variance, and the noise scale is S / |mu|². A part of
the step that is a random share of its groups, such as a process's or the first half of the micro-batches,
gives the second norm; numerator and denominator are averaged apart, as in the paper.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

AVERAGED = 50
"""Measurements that count."""
WORTH_SAYING = 10
"""Measurements after which the scale is good enough to give advice."""
FAR_OFF = 4.0
"""Times that a batch is smaller or larger than the noise scale, where something is said."""


class NoiseScale:
    """Of a run's steps of `num_rows` rows each."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.measured = 0
        self._squared = self._signal = 0.0
        self._said = False

    def observe(self, norm: float, parts: Mapping[str, float]) -> None:
        """A step's gradient has this norm, and its parts are as `part_of` says, added up."""
        share, share_squared = parts["part/share"], parts["part/share_squared"]
        if share_squared >= share:  # a part that is all of it
            return
        decay = 1 - 1 / AVERAGED
        signal = (share * norm**2 - parts["part/squared"]) / (share - share_squared)
        self._squared = decay * self._squared + norm**2
        self._signal = decay * self._signal + signal
        self.measured += 1

    @property
    def rows(self) -> float | None:
        """The noise scale; None where the gradient cannot be told from noise as yet."""
        if self._signal <= 0:
            return None
        return self._num_rows * max(0.0, self._squared / self._signal - 1)

    def advice(self) -> str | None:
        """Once, what to do about a batch far from the scale; None where it is not, or not known yet."""
        scale = self.rows
        if self._said or self.measured < WORTH_SAYING or scale is None:
            return None
        self._said = True
        known = f"the gradient's noise scale is about {scale:,.0f} rows"
        if self._num_rows * FAR_OFF < scale:
            return (
                f"{known}, and a step has {self._num_rows}: most of a step is noise; a larger --batch-size "
                "learns more from it, and a lower --learning-rate is safer"
            )
        if self._num_rows > FAR_OFF * scale:
            return (
                f"{known}, and a step has {self._num_rows}: a smaller --batch-size learns nearly as much in "
                "less time"
            )
        return None

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"measured": self.measured, "squared": self._squared, "signal": self._signal}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.measured = int(state["measured"])
        self._squared, self._signal = float(state["squared"]), float(state["signal"])


@torch.no_grad()
def part_of(model: nn.Module, share: float) -> dict[str, Tensor]:
    """What `NoiseScale.observe` wants, to be added up, of the gradient that is there of a part of the step.

    share: of the step's groups, that the part has.
    """
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    squared = torch.stack([_product(gradient, gradient) for gradient in gradients]).sum()
    numbers = {"part/share": share, "part/share_squared": share**2}
    return {**{name: squared.new_tensor(value) for name, value in numbers.items()}, "part/squared": squared}


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Sum of products, without a tensor of their size where both are in order."""
    if one.is_contiguous() and other.is_contiguous():
        return torch.dot(one.view(-1), other.view(-1))
    return (one * other).sum()
