"""Attention in training, by the names that models call it by: over a stream of tokens, and on a CPU in fp32.

On a CPU in bf16 attention is computed in fp32, for which torch's kernel takes half as long there, with and
without tiles. What is kept for the backward pass is in bf16 nevertheless.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.errors import UserError
from grpo.model.numerics import ScoreRule, matmul_dtype
from grpo.model.stream_attention import StreamAttention, attend_in_rectangles
from grpo.model.varlen import attend_in_sequences, kernel_serves

STREAMS, IN_FP32 = "streams", "sdpa_in_fp32"
"""The names that models know these by (`attn_implementation`)."""


def register() -> None:
    """Make them known to transformers by their names; again does no harm."""
    AttentionInterface.register(STREAMS, attend_over_stream)
    AttentionInterface.register(IN_FP32, attend_in_fp32)
    AttentionMaskInterface.register(IN_FP32, sdpa_mask)


@contextmanager
def reading_streams(config: PretrainedConfig) -> Iterator[None]:
    """Inside, layers of a model with this configuration attend over a stream that they are given."""
    register()
    config = config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = STREAMS
    try:
        yield
    finally:
        config._attn_implementation = before


def attend_over_stream(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stream: StreamAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends over a stream, as transformers calls it.

    query: (1, H, T, d); key, value: (1, H / n, T, d). Returns (1, T, H, d). ValueError for a model that wants
    more done.
    """
    if stream is None:
        raise UserError("its layers do not tell attention what they are told.")
    rule, dtype = ScoreRule.of(options), matmul_dtype(query)
    tokens = [states.to(dtype).transpose(1, 2)[0] for states in (query, key, value)]  # (T, H, d) each
    window = None if sliding_window is None else stream.window
    with torch.autocast(query.device.type, enabled=False):
        if rule.is_plain and kernel_serves(stream, tokens, window, scaling):
            return attend_in_sequences(stream, tokens, window, scaling).unsqueeze(0), None
        return attend_in_rectangles(stream, tokens, window, scaling, rule).unsqueeze(0), None


def attend_in_fp32(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query (R, H, Q, d), key and value (R, H / n, K, d), to (R, Q, H, d).

    The result has the dtype of products. ValueError for a model that wants more done.
    """
    if not ScoreRule.of(options).is_plain:
        raise UserError("its scores are capped, or have sinks, which torch's attention does not do.")
    dtype = matmul_dtype(query)
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
