"""Attention in bf16 on a CPU, for every Hugging Face model: plain products, a part of the rows at a time.

Torch's fused kernel takes twice as long in bf16, but for its forward pass where the processor has tiles. A
part's scores stay near the processor, none are kept, and the backward pass computes them again (the
recomputation of FlashAttention, Dao et al. 2022, without its tiles).

Shapes: R rows, H heads of width d, Q tokens that attend, K tokens that are attended to.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from grpo.model.cpu import slices
from grpo.model.stand_ins import product_dtype, refuse_unknown

NAME = "bf16_on_cpu"
"""What models know this attention by (`attn_implementation`)."""

_PARTS = 8
"""That rows are taken in. A share, not a size: memory stays in proportion to rows, and so
can be foreseen."""

_aten: Any = torch.ops.aten


def register() -> None:
    """Make it known to transformers by its name; again does no harm."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **options: Any) -> Tensor:
    """What is added to scores, in the dtype they have, not in that of the weights."""
    mask: Tensor = eager_mask(*args, **options | {"dtype": torch.bfloat16})
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query (R, H, Q, d), key and value (R, H / n, K, d), to (R, Q, H, d).

    attention_mask: (R or 1, 1, Q, K), added to the scores. ValueError for a model that wants more done.
    """
    refuse_unknown(others)
    dtype = product_dtype(query)
    # What is kept for the backward pass is not to be a view of queries, keys and values in one.
    query, key, value = query.to(dtype).contiguous(), key.to(dtype), value.to(dtype)
    sharing = query.shape[1] // key.shape[1]
    if sharing > 1:
        key, value = key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1)
    if attention_mask is None:
        attention_mask = query.new_zeros(1, 1, query.shape[2], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed: Tensor = _Attention.apply(query, key, value, attention_mask, scale)
    return mixed.transpose(1, 2), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        if torch.cpu._is_amx_tile_supported():
            mixed: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, attn_mask=mask.to(query.dtype), scale=scale
            )[0]
            return mixed
        mixed = torch.empty_like(query)
        with torch.autocast("cpu", enabled=False):
            for part in _parts(query, key, value, mask, mixed):
                _forward(*part, scale=scale)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        with torch.autocast("cpu", enabled=False):
            for part in _parts(query, key, value, mask, grad, *grads):
                _backward(*part, scale=ctx.scale)
        return *grads, None, None


def _parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *others: Tensor) -> Iterator[Any]:
    """All of these, some rows at a time."""
    mask = mask.to(query.dtype).expand(len(query), -1, -1, -1)
    rows = -(-len(query) // _PARTS)
    for place in slices.slices(len(query), rows):
        yield tuple(each[place] for each in (query, key, value, mask, *others))


def _weights(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(R, H, Q, K)"""
    scores = query @ key.mT
    return torch.add(mask, scores, alpha=scale, out=scores).softmax(-1)


def _forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, mixed: Tensor, *, scale: float) -> None:
    """Write the mixed values of a few rows."""
    torch.matmul(_weights(query, key, mask, scale), value, out=mixed)


def _backward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, grad: Tensor,
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, *, scale: float,
) -> None:  # fmt: skip
    """Write the gradients of a few rows."""
    weights = _weights(query, key, mask, scale)
    torch.matmul(weights.mT, grad, out=grad_value)
    slope = _aten._softmax_backward_data(grad @ value.mT, weights, -1, weights.dtype).mul_(scale)
    torch.matmul(slope, key, out=grad_query)
    torch.matmul(slope.mT, query, out=grad_key)
