"""Attention over a stream by torch's kernel for sequences of any length, on a card that has it.

It is compared with attention over rectangles at first use, and a line says where it is not taken. Left out:
any list of cards or versions that have it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from grpo.model.stream_attention import StreamAttention, attend_in_rectangles, saved_without_copies

KERNEL_ON = ("cuda",)
"""Kinds of devices on which torch's kernel for sequences of any length is tried."""
_CLOSE = 0.03
"""The difference between both ways that is allowed, relative to their size: products in 16 bits differ so."""
_works: dict[Any, bool] = {}


def kernel_serves(
    stream: StreamAttention, tokens: list[Tensor], window: int | None, scaling: float | None
) -> bool:
    """Returns whether torch's kernel takes such numbers and gives what rectangles do: compared once."""
    query, key, _ = tokens
    if query.device.type not in KERNEL_ON or query.dtype.itemsize != 2:
        return False
    kind = query.device.type, query.dtype, query.shape[1:], key.shape[1], window is None
    if kind not in _works:
        try:
            difference = _difference(stream, tokens, window, scaling)
            _works[kind] = difference < _CLOSE
            reason = f"it gives something else (by {difference:.2g} of its size)"
        except torch.OutOfMemoryError:
            raise
        except (ImportError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            _works[kind], reason = False, (str(error).splitlines() or [type(error).__name__])[0]
        if not _works[kind]:
            logger.info("attention takes texts in padded rectangles, slower: varlen_attn: {}", reason)
    return _works[kind]


@torch.enable_grad()
def _difference(
    stream: StreamAttention, tokens: list[Tensor], window: int | None, scaling: float | None
) -> float:
    """The largest between both ways, of results and gradients, relative to their size."""
    found = []
    for attend in (attend_in_sequences, attend_in_rectangles):
        leaves = [states.detach().requires_grad_() for states in tokens]
        mixed = attend(stream, leaves, window, scaling)
        found.append([mixed.detach(), *torch.autograd.grad(mixed, leaves, torch.ones_like(mixed))])
    pairs = zip(*found, strict=True)
    return max(((one - other).float().norm() / other.float().norm()).item() for one, other in pairs)


def attend_in_sequences(
    stream: StreamAttention, tokens: list[Tensor], window: int | None, scaling: float | None
) -> Tensor:
    """Returns what each token sees, (T, H, d), by one call of a kernel that pads nothing (torch 2.12 on)."""
    from torch.nn.attention.varlen import varlen_attn  # older versions have none

    sequences, (query, *states) = stream.sequences, tokens
    key, value = (each.index_select(0, sequences.keys) for each in states)
    again: dict[int, Callable[[], Tensor]] = {
        copy.untyped_storage()._cdata: partial(each.detach().index_select, 0, sequences.keys)
        for copy, each in zip((key, value), states, strict=True)
    }
    keeps_copies = stream.recomputed or not torch.is_grad_enabled()
    with nullcontext() if keeps_copies else saved_without_copies(again):
        mixed = varlen_attn(
            query,
            key,
            value,
            sequences.query_ends,
            sequences.key_ends,
            sequences.longest_query,
            sequences.longest_keys,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),  # so many before the token itself
            enable_gqa=query.shape[1] != key.shape[1],
        )
    assert isinstance(mixed, Tensor)  # it gives two where more is asked for
    return mixed
