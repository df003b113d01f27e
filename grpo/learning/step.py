"""One optimizer step as a transaction: it happens whole, or the weights stay as they were."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from loguru import logger
from torch import nn

from grpo.distributed import World, sum_of_bits
from grpo.distributed.shard import is_sharded, whole
from grpo.learning.loss_scale import LossScale
from grpo.learning.masters import LOW_BITS, master_dtype, step_with_masters

MAX_SKIPPED_IN_A_ROW = 3


class Diverged(RuntimeError):
    """Several steps in a row were not finite: going on would only waste time."""


class GuardedOptimizer:
    """Applies accumulated gradients, and refuses those that are not finite.

    A step whose loss, KL or gradient is not finite is dropped, counted and reported; three in a
    row raise `Diverged`, with this `remedy`. `updating` is entered around clipping and the optimizer's step.
    loss_scale: what gradients are multiplied by when they come; a step that it makes too large for fp16 is
    left out and halves it, which is no such failure.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        *,
        updating: Callable[[], AbstractContextManager[object]] = nullcontext,
        loss_scale: LossScale | None = None,
        remedy: str = "lower --learning-rate or raise --kl-coef",
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._sharded = is_sharded(model)
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm or math.inf
        self._updating, self._remedy, self._loss_scale = updating, remedy, loss_scale
        self.moved = False
        """Whether the weights have moved since the caller last set this."""
        self.num_skipped = 0
        self.skipped_in_a_row = 0

    def step(self, accumulate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run `accumulate` (backward passes; returns metrics, `loss` among them) and apply it.

        Returns its metrics with `grad_norm`, before clipping, and `skipped`, 0 or 1.
        """
        self._optimizer.zero_grad(set_to_none=True)
        metrics = accumulate()
        with self._updating():
            if self._loss_scale is not None:
                metrics["loss_scale"] = self._loss_scale.value
                self._loss_scale.unscale(self.parameters)
            norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm)).item()
            watched = {"loss": metrics["loss"], "kl": metrics.get("kl", 0.0), "grad_norm": norm}
            broken = [f"{name} is {value}" for name, value in watched.items() if not math.isfinite(value)]
            overflows = self._loss_scale is not None and broken == [f"grad_norm is {norm}"]
            if broken:
                if not (overflows and self._halve()):
                    self._skip(", ".join(broken))
            else:
                self.moved = True
                step_with_masters(self._optimizer)
                self.skipped_in_a_row = 0
                if self._loss_scale is not None:
                    self._loss_scale.note_good_step()
        self._optimizer.zero_grad(set_to_none=True)
        return {**metrics, "grad_norm": norm, "skipped": float(bool(broken))}

    @torch.no_grad()
    def keep_together(self, world: World) -> None:
        """See to it that all processes have the same weights and moments.

        Their steps are the same, but kernels of unlike cards round differently, which adds up in time.
        Of a sharded model each process has weights that no other has.
        """
        if world.size == 1 or self._sharded:
            return
        kept = [self._optimizer.state[parameter] for parameter in self.parameters]
        states = [value for state in kept for value in state.values()]
        low_bits = [state[LOW_BITS] for state in kept if LOW_BITS in state]
        sums = [sum_of_bits(numbers) for numbers in (*self.parameters, *low_bits)]
        if any(other != sums for other in world.exchange("the comparison of weights", sums)):
            logger.info("the processes' weights have drifted apart by rounding: all take the first one's")
            world.copy_from_main([*self.parameters, *filter(torch.is_tensor, states)])

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        state = {"num_skipped": self.num_skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return state if self._loss_scale is None else state | {"loss_scale": self._loss_scale.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_skipped, self.skipped_in_a_row = state["num_skipped"], state["skipped_in_a_row"]
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.restore(state["loss_scale"])

    def _halve(self) -> bool:
        """Leaves out a step whose gradient was scaled beyond fp16; False where less would not help."""
        assert self._loss_scale is not None
        if not self._loss_scale.halve():
            return False
        self.num_skipped += 1
        text = "step skipped: its gradient is too large for fp16; the loss scale is {:g} now ({} skipped)"
        logger.info(text, self._loss_scale.value, self.num_skipped)
        return True

    def _skip(self, fault: str) -> None:
        self.num_skipped += 1
        self.skipped_in_a_row += 1
        logger.warning("step skipped: {} ({} skipped so far)", fault, self.num_skipped)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row were not finite ({fault}): {self._remedy}."
            )


def begin_gradients(model: nn.Module) -> None:
    """On a CPU, make the gradients that are not there yet: zeros, to be added to.

    Among activations they would tear malloc's heap apart.
    """
    if is_sharded(model) or next(model.parameters()).device.type != "cpu":
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=master_dtype(parameter))
