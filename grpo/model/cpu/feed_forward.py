"""Feed-forward layers on a CPU: GELU and SwiGLU a slice at a time, and once more in the backward pass.

Torch's kernel takes four times as long for GELU's tanh as for the sigmoid that is the same, x/2 (1 + tanh u)
= x sigmoid(2u). With that, value in the forward and value and slope in the backward pass together take less
time than torch's two kernels. So the value, the largest tensor that a layer would keep, is not kept: it
exists for some tokens at a time, near the processor, until it is multiplied. Of SwiGLU (Shazeer 2020,
arXiv:2002.05202), silu(gate) up, the two factors are kept, and neither silu nor the product.

Shapes: T tokens, D numbers of each, I inside the layer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.pytorch_utils import Conv1D

from grpo.model import cpu
from grpo.model.cpu import slices

_LINEAR = 2 * (2 / torch.pi) ** 0.5
_CUBIC = 0.044715 * _LINEAR
"""GELU is x sigmoid(_LINEAR x + _CUBIC x³) (Hendrycks and Gimpel, 2016, with tanh)."""

_PART = 1024
"""Tokens at a time, whose results of GELU exist at once."""

_SLICE = 2**17
"""Numbers of those at a time, in fp32, which three of are 1.5 MB.

There is room for as much however few there are, so that memory stays in proportion to rows.
"""


def slice_feed_forward(model: PreTrainedModel) -> None:
    """Give layers of GPT-2 and of the kinds in GATED that of their own weights; others stay as they are."""
    if not cpu.is_on("feed_forward"):
        return
    has_gelu = getattr(model.config, "activation_function", None) == "gelu_pytorch_tanh"
    has_silu = getattr(model.config, "hidden_act", None) == "silu"
    for layer in list(model.modules()):
        plain: Any = getattr(layer, "mlp", None)
        if has_gelu and type(plain) is GPT2MLP:
            layer.mlp = FeedForward(plain)
        elif has_silu and type(plain).__name__ in GATED and plain.down_proj.bias is None:
            layer.mlp = GatedFeedForward(plain)


class FeedForward(nn.Module):
    """As GPT2MLP, whose weights it has by the same names, without its dropout (`model.load_config`)."""

    def __init__(self, plain: GPT2MLP) -> None:
        super().__init__()
        self.c_fc, self.act, self.c_proj = plain.c_fc, plain.act, plain.c_proj
        self.train(plain.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner: Tensor = self.c_fc(hidden_states)  # (..., I)
        outer: Tensor
        if hidden_states.shape[-2] == 1:  # a token of each row, as in decoding: slices would not pay
            outer = self.c_proj(self.act(inner))
            return outer
        inner = inner.contiguous()
        if type(self.c_proj) is not Conv1D:  # but an adapter around it
            outer = self.c_proj(_Gelu.apply(inner))
            return outer
        if torch.is_autocast_enabled(inner.device.type):
            inner = inner.to(torch.get_autocast_dtype(inner.device.type))
        flat = inner.view(-1, inner.shape[-1])  # (T, I)
        outer = _ActivatedProduct.apply(flat, self.c_proj.weight, self.c_proj.bias)
        return outer.view(hidden_states.shape)


GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""By name: each is in a module of its own that takes time to load."""


class GatedFeedForward(nn.Module):
    """As GATED, whose weights it has by the same names."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = plain.gate_proj, plain.up_proj, plain.down_proj
        self.act_fn = plain.act_fn
        self.train(plain.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)  # (..., I)
        outer: Tensor
        if hidden_states.shape[-2] == 1:
            outer = self.down_proj(self.act_fn(gate) * up)
            return outer
        if type(self.down_proj) is not nn.Linear:  # but an adapter around it
            outer = self.down_proj(_Gated.apply(gate, up))
            return outer
        gate, up = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
        outer = _GatedProduct.apply(gate, up, self.down_proj.weight)
        return outer.view(hidden_states.shape)


class _Gated(torch.autograd.Function):
    """silu(gate) up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up, torch.empty_like(gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), grad.clone(memory_format=torch.contiguous_format)
        _through_gate(gate, up, torch.empty_like(gate), grad_gate, grad_up)
        return grad_gate, grad_up


class _GatedProduct(torch.autograd.Function):
    """(silu(gate) up) @ weightᵀ, (T, I) to (T, D), in their dtype, a part of the tokens at a time."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(gate.device.type, enabled=False):
            cast = weight.to(gate.dtype)
            ctx.save_for_backward(gate, up, cast)
            ctx.exact = weight.dtype
            result = gate.new_empty(len(gate), len(weight))
            for part, room in _in_parts(gate):
                result[part] = torch.mm(_gated(gate[part], up[part], room), cast.T)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        wants_weight = ctx.needs_input_grad[2]
        grad_weight = torch.zeros_like(weight, dtype=ctx.exact) if wants_weight else None
        with torch.autocast(gate.device.type, enabled=False):
            for part, product in _in_parts(gate):
                torch.mm(grad[part], weight, out=grad_up[part])  # by the product, as yet
                _through_gate(gate[part], up[part], product, grad_gate[part], grad_up[part])
                if grad_weight is not None:
                    slices.add_product(grad_weight, grad[part], product)
        return grad_gate, grad_up, grad_weight


def _gated(gate: Tensor, up: Tensor, result: Tensor) -> Tensor:
    """silu(gate) up, into `result`."""
    for numbers, share, factor, out in _in_slices(gate, 2, up, result):
        torch.sigmoid(numbers, out=share)
        out.copy_(share.mul_(numbers).mul_(factor))
    return result


def _through_gate(gate: Tensor, up: Tensor, product: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """silu(gate) up into `product`; and `grad_up`, which is by that, becomes those by gate and up.

    With s = sigmoid(x), the slope of x s is s + x s (1 - s).
    """
    others = up, product, grad_gate, grad_up
    for numbers, share, silu, factor, value, by_gate, by_up in _in_slices(gate, 3, *others):
        torch.mul(torch.sigmoid(numbers, out=share), numbers, out=silu)
        slope = torch.addcmul(silu, silu, share, value=-1, out=numbers).add_(share)
        by_gate.copy_(slope.mul_(factor).mul_(by_up))
        value.copy_(torch.mul(silu, factor, out=share))
        by_up.copy_(silu.mul_(by_up))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x, torch.empty_like(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        (x,) = ctx.saved_tensors
        _through_gelu(x, grad, torch.empty_like(x))
        return grad


class _ActivatedProduct(torch.autograd.Function):
    """gelu(x) @ weight + bias, (T, I) to (T, D), in x's dtype, a part of the tokens at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            cast, cast_bias = weight.to(x.dtype), bias.to(x.dtype)
            ctx.save_for_backward(x, cast)
            ctx.exact = weight.dtype
            result = x.new_empty(len(x), len(bias))
            for part, room in _in_parts(x):  # not with `out`: selective checkpointing keeps what is returned
                result[part] = torch.addmm(cast_bias, _gelu(x[part], room), cast)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_weight, wants_bias = ctx.needs_input_grad[1:]
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=ctx.exact) if wants_weight else None
        with torch.autocast(x.device.type, enabled=False):
            for part, activated in _in_parts(x):
                by_result = torch.mm(grad[part], weight.T, out=grad_x[part])
                _through_gelu(x[part], by_result, activated)
                if grad_weight is not None:
                    slices.add_product(grad_weight, activated, grad[part])
            grad_bias = grad.sum(0).to(ctx.exact) if wants_bias else None
        return grad_x, grad_weight, grad_bias


def _in_parts(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Places of tokens, and room for what GELU makes of them, the same for all."""
    room = x.new_empty(_PART, x.shape[1])
    for part in slices.parts(len(x), _PART):
        yield part, room[: len(x[part])]


def _gelu(x: Tensor, result: Tensor) -> Tensor:
    """Into `result`."""
    for numbers, factor, out in _in_slices(x, 2, result):
        share = _inner_slope(numbers, factor).mul_(numbers).sigmoid_()
        out.copy_(share.mul_(numbers))
    return result


def _through_gelu(x: Tensor, grad: Tensor, result: Tensor) -> None:
    """gelu(x) into `result`; and `grad`, which is by that, becomes the gradient by x.

    With v = _LINEAR x + _CUBIC x³ and s = sigmoid(v), the slope of x s is s + x s (1 - s) dv/dx.
    """
    for numbers, factor, share, out, slope in _in_slices(x, 3, result, grad):
        torch.mul(_inner_slope(numbers, factor), numbers, out=share).sigmoid_()
        activated = numbers.mul_(share)
        out.copy_(activated)
        rest = activated.addcmul_(activated, share, value=-1)
        a_third = factor.sub_(2 / 3 * _LINEAR)  # of dv/dx
        slope.copy_(share.addcmul_(rest, a_third, value=3).mul_(slope))


def _inner_slope(numbers: Tensor, out: Tensor) -> Tensor:
    """_LINEAR + _CUBIC x²"""
    return torch.addcmul(numbers.new_tensor(_LINEAR), numbers, numbers, value=_CUBIC, out=out)


def _in_slices(x: Tensor, num_rooms: int, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each slice: `num_rooms` tensors in fp32, or float64, the first with x's numbers; others' slices."""
    exact = torch.promote_types(x.dtype, torch.float32)
    rooms = [x.new_empty(_SLICE, dtype=exact) for _ in range(num_rooms)]
    flat, *others_flat = (each.view(-1) for each in (x, *others))
    for place in slices.slices(len(flat), _SLICE):
        numbers = flat[place]
        first, *more = (room[: len(numbers)] for room in rooms)
        yield first.copy_(numbers), *more, *(each[place] for each in others_flat)
