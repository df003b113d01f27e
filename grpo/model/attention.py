"""Attention in training: torch's fused one, called as each kind of device does it best.

On CUDA, of completions to prompts of one length: causal from the lower right, without a mask, with which
torch takes a slower kernel that holds a workspace. (`is_causal` alone would put queries, which stand at the
keys' end, at their beginning.) All else is as Hugging Face's "sdpa" does it, and so are layers that see a
window of the newest tokens or a chunk of them, which only a mask can tell.

On a CPU in bf16: in fp32, for which torch's kernel takes half as long there, with and without tiles. What is
kept for the backward pass is in bf16 nevertheless.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.model.stand_ins import product_dtype, refuse_unknown

LOWER_RIGHT, IN_FP32 = "sdpa_lower_right", "sdpa_in_fp32"
"""What models know these by (`attn_implementation`)."""


def register() -> None:
    """Make them known to transformers by their names; again does no harm."""
    AttentionInterface.register(LOWER_RIGHT, attend_from_lower_right)
    AttentionMaskInterface.register(LOWER_RIGHT, _mask)
    AttentionInterface.register(IN_FP32, attend_in_fp32)
    AttentionMaskInterface.register(IN_FP32, sdpa_mask)


def needs_no_mask(attention: str) -> bool:
    """Whether a model that has this attention may be given no mask with a cache that is not empty.

    Its layers with a window make one for themselves then.
    """
    return attention == LOWER_RIGHT


def _mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **options: Any
) -> Tensor | None:
    """local_size: the width of the window or chunk that the layer sees; None: all that came before."""
    if attention_mask is None and local_size is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **options)


def attend_from_lower_right(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query (R, H, Q, d), key and value (R, H / n, K, d), to (R, Q, H, d)."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is not None or not 1 < queries < keys:
        mixed, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return mixed, None
    from torch.nn.attention.bias import causal_lower_right  # of no use to any other run

    dtype = product_dtype(query)
    sharing = query.shape[1] // key.shape[1]
    key, value = (repeat_kv(states.to(dtype), sharing) for states in (key, value))
    mixed = F.scaled_dot_product_attention(
        query.to(dtype), key, value, attn_mask=causal_lower_right(queries, keys),
        dropout_p=options.get("dropout", 0.0), scale=options.get("scaling"),
    )  # fmt: skip
    return mixed.transpose(1, 2).contiguous(), None


def attend_in_fp32(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The same shapes; the result has the dtype of products. ValueError for a model that wants more done."""
    refuse_unknown(options)
    dtype = product_dtype(query)
    exact = torch.promote_types(dtype, torch.float32)

    def pack(saved: Tensor) -> Tensor:
        is_sum = saved.ndim < 4  # over exponentials, by row
        return saved if is_sum or not saved.is_floating_point() else saved.to(dtype)

    def unpack(saved: Tensor) -> Tensor:
        return saved.to(exact) if saved.dtype == dtype else saved

    with torch.autocast("cpu", enabled=False), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        inputs = (states.to(dtype).to(exact) for states in (query, key, value))
        mixed, _ = sdpa_attention_forward(module, *inputs, attention_mask, **options)
    return mixed.to(dtype), None
