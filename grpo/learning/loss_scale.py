"""The loss scale of training in fp16, whose smallest numbers gradients of a mean would fall below.

It is torch's `GradScaler` with its usual numbers, for a loss that is never there as one tensor: the
derivative by each log-prob is multiplied where the backward pass begins, and gradients are divided before
they are clipped.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 1.0
GOOD_STEPS = 2000
"""In a row, after which the scale doubles."""


class LossScale:
    """Halves when a gradient is not finite, and doubles after `GOOD_STEPS` steps whose gradients are."""

    def __init__(self, value: float = FIRST) -> None:
        self.value, self._good_steps = value, 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divides the gradients of parameters by the scale, in their place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.value)

    def halve(self) -> bool:
        """Halves it, for a gradient that is not finite; returns False where it cannot become less."""
        self._good_steps = 0
        can_halve = self.value > SMALLEST
        self.value = max(SMALLEST, self.value / 2)
        return can_halve

    def note_good_step(self) -> None:
        """Counts a step whose gradient was finite."""
        self._good_steps += 1
        if self._good_steps == GOOD_STEPS:
            self.value, self._good_steps = min(LARGEST, 2 * self.value), 0

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it."""
        return {"value": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Becomes what was saved."""
        self.value, self._good_steps = state["value"], state["good_steps"]
