"""What FSDP2 holds of a sharded model, held on a whole one: for tracing memory in one process.

A layer's weights as they are gathered and the buffer they come through, the weights gathered
beforehand while gradients flow, gradients until they are reduced, and the buffer of that. The sizes
and the moments are those of torch 2.13's `fully_shard` as `shard.py` calls it. Left out: what is
rounded up where a weight does not divide evenly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from grpo.distributed.shard import decoder_layers, gather_by


class Gathering:
    """Makes `model` hold during a pass what one of `processes` processes would hold, beside its own weights.

    Gradients leave the parameters as they are reduced; this process's part of them stays here until
    `forget`. reduce_dtype: what they are added up in. copies: whether what goes between processes is
    copied on the way, as gloo does on the CPU.
    """

    def __init__(
        self, model: PreTrainedModel, processes: int, reduce_dtype: torch.dtype, *, copies: bool
    ) -> None:
        self._processes, self._reduce_dtype, self._copies = processes, reduce_dtype, copies
        layers = list(decoder_layers(model.base_model))
        inner = {parameter for layer in layers for parameter in layer.parameters()}
        self._root = _Unit([parameter for parameter in model.parameters() if parameter not in inner])
        self._units = [self._root, *(_Unit(list(layer.parameters())) for layer in layers)]
        for layer, unit in zip(layers, self._units[1:], strict=True):
            layer.register_forward_pre_hook(partial(self._before_layer, unit), with_kwargs=True)
            layer.register_forward_hook(partial(self._after_layer, unit))
        self.forget()
        gather_by(model, self._run_inside)

    def forget(self, *, gradients: bool = False) -> None:
        """Let go of everything. gradients: whether this process's parts of all of them are there already."""
        self._buffer: Tensor | None = None  # what the last gathering went through
        self._reducing: Tensor | None = None
        self._passes: list[_Unit] = []
        for unit in self._units:
            unit.weights, unit.buffer, unit.gradient, unit.passes = None, None, None, []
            unit.has_gradient = gradients

    @property
    def gradient_bytes(self) -> int:
        """This process's part of all gradients."""
        numel = sum(self._part(unit) for unit in self._units)
        return numel * self._reduce_dtype.itemsize

    def _part(self, unit: "_Unit") -> int:
        return -(-unit.flat.numel() // self._processes)

    # ------------------------------------------------------------------------------ forward

    def _run_inside(self, work: Callable[[], Any]) -> Any:
        self._gather(self._root)
        result = work()
        self._buffer = None
        self._after_pass(self._root, result)
        return result

    def _before_layer(
        self, unit: "_Unit", _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._gather(unit)
        hidden, *others = args
        if hidden.requires_grad:
            hidden = hidden.view_as(hidden)  # whose gradient is there when all of the layer's are
            hidden.register_hook(partial(self._after_backward, unit))
        return (hidden, *others), kwargs

    def _after_layer(self, unit: "_Unit", _: nn.Module, __: Any, output: Any) -> None:
        self._after_pass(unit, output)

    def _gather(self, unit: "_Unit") -> None:
        buffer = self._exchange(unit.flat)
        self._buffer = None
        unit.weights = torch.empty_like(unit.flat)
        self._buffer = buffer

    def _exchange(self, like: Tensor) -> Tensor:
        """A buffer that processes have written to."""
        buffer = torch.empty_like(like)
        cast = like.dtype != self._reduce_dtype  # from what this process's part is kept in
        mine = like.new_empty(-(-like.numel() // self._processes)) if cast else None
        if self._copies:
            torch.empty_like(like)
        del mine
        return buffer

    def _after_pass(self, unit: "_Unit", output: Any) -> None:
        unit.weights = None
        if torch.is_grad_enabled():
            unit.passes.append(len(self._passes))
            self._passes.append(unit)
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(partial(self._before_backward, unit))

    # ----------------------------------------------------------------------------- backward

    def _before_backward(self, unit: "_Unit", _: Tensor) -> None:
        if unit.weights is not None:
            return
        buffer = self._exchange(unit.flat) if unit.buffer is None else unit.buffer
        unit.weights, unit.buffer = torch.empty_like(unit.flat), None
        del buffer
        before = unit.passes.pop() - 1
        if before >= 0 and self._passes[before].weights is None:
            following = self._passes[before]
            following.buffer = self._exchange(following.flat)
        if unit is self._root:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._after_backward, unit))

    def _after_backward(self, unit: "_Unit", *_: Tensor) -> None:
        unit.weights = self._reducing = None
        if all(parameter.grad is None for parameter in unit.parameters):
            return  # they come with the next pass
        self._reducing = torch.empty_like(unit.flat, dtype=self._reduce_dtype)
        for parameter in unit.parameters:
            parameter.grad = None
        part = self._reducing.new_empty(self._part(unit))
        if self._copies:
            torch.empty_like(self._reducing)
        if not unit.has_gradient:
            unit.gradient, unit.has_gradient = part, True
        if unit is self._root:
            self._reducing = None
            self._passes.clear()


class _Unit:
    """Weights that are gathered together: a layer's, or all those outside of layers."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.empty(sum(each.numel() for each in parameters), dtype=parameters[0].dtype)
        """As many, and of the dtype that they are gathered in."""
        self.weights: Tensor | None = None
        self.buffer: Tensor | None = None
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self.passes: list[int] = []
