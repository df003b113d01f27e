"""Attention of a stream's tokens, over rectangles of texts of like length.

A stream holds the texts of a pass one behind the other, see `scoring/stream.py`. Linear layers take it as it
is; attention takes the texts side by side, so padding exists inside it alone. What the rectangles are
gathered from is kept for the backward pass, and they are gathered again there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.model.numerics import PLAIN, ScoreRule


@dataclass(frozen=True)
class Rectangle:
    """R pieces of a stream side by side: each attends to itself, causally, and to what comes before it.

    Q tokens at most in a piece, P at most before one. Places where a piece has no token hold any.
    """

    queries: Tensor
    """(R, Q) places of the pieces' tokens in the stream."""
    keys: Tensor
    """(R, P + Q) places of what comes before the pieces, and of these."""
    before: Tensor
    """(R,) tokens that come before each piece."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns what is added to scores, (R, 1, Q, P + Q), or None where plain causal attention will do.

        window: tokens that one attends to at most, itself among them.
        """
        num_queries, num_keys = self.queries.shape[1], self.keys.shape[1]
        num_before = num_keys - num_queries
        if num_before == 0 and (window is None or num_queries <= window):
            return None
        device, before = self.before.device, self.before.unsqueeze(1)
        place = before + torch.arange(num_queries, device=device)  # (R, Q)
        first = torch.arange(num_before, device=device).expand(len(before), -1)  # (R, P)
        key_place = torch.cat([first, place], 1).unsqueeze(1)
        is_there = torch.cat([first < before, torch.ones_like(place, dtype=torch.bool)], 1).unsqueeze(1)
        distance = place.unsqueeze(2) - key_place  # (R, Q, P + Q)
        seen = is_there & (distance >= 0)
        if window is not None:
            seen &= distance < window
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf).unsqueeze(1)


@dataclass(frozen=True)
class Sequences:
    """The S pieces of a stream in its order, as a kernel for sequences of any length takes them."""

    query_ends: Tensor
    """(S + 1,) where each begins and the last ends, int32."""
    keys: Tensor
    """Places in the stream of what each attends to: what comes before it, and itself."""
    key_ends: Tensor
    """(S + 1,) the same for these."""
    longest_query: int
    longest_keys: int


@dataclass(frozen=True)
class StreamAttention:
    """Says what each token of a stream attends to. Models hand it on to their attention as `stream`."""

    rectangles: list[Rectangle]
    order: Tensor
    """(T,) places of the stream's tokens among those of all rectangles, one after the other."""
    sequences: Sequences
    window: int | None = None
    """Tokens that layers with a sliding window see."""
    recomputed: bool = False
    """Whether layers are computed again for the backward pass, and so keep nothing of their own."""
    _masks: dict[Any, list[Tensor | None]] = field(default_factory=dict)

    def for_pass(self, window: int | None, *, recomputed: bool) -> "StreamAttention":
        """Returns the same for one pass, which makes masks of its own."""
        return replace(self, window=window, recomputed=recomputed, _masks={})

    def to(self, tensors: Sequence[Tensor]) -> "StreamAttention":
        """Returns the same with these in place of its `tensors`."""
        order, query_ends, keys, key_ends, *rest = tensors
        rectangles = [Rectangle(*rest[start : start + 3]) for start in range(0, len(rest), 3)]
        sequences = replace(self.sequences, query_ends=query_ends, keys=keys, key_ends=key_ends)
        return replace(self, rectangles=rectangles, order=order, sequences=sequences)

    @property
    def tensors(self) -> list[Tensor]:
        of_rectangles = [
            tensor for each in self.rectangles for tensor in (each.queries, each.keys, each.before)
        ]
        whole = self.sequences
        return [self.order, whole.query_ends, whole.keys, whole.key_ends, *of_rectangles]

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """Returns the rectangles' masks, which the first layer that wants them makes for all layers."""
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = [each.mask(window, dtype) for each in self.rectangles]
        return self._masks[window, dtype]


def attend_in_rectangles(
    stream: StreamAttention,
    tokens: list[Tensor],
    window: int | None,
    scaling: float | None,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """Returns what each token sees, (T, H, d), by torch's attention over rectangles, on any device.

    Where the rule does something to scores, they are written out, in fp32.
    """
    dtype = tokens[0].dtype
    is_exact = tokens[0].device.type == "cpu" or not rule.is_plain
    exact = torch.promote_types(dtype, torch.float32) if is_exact else dtype
    keeps_copies = stream.recomputed or not torch.is_grad_enabled()
    mixed = [
        _attend(rectangle, tokens, mask, exact, scaling, rule, keeps_copies=keeps_copies)
        for rectangle, mask in zip(stream.rectangles, stream.masks(window, exact), strict=True)
    ]
    return torch.cat(mixed).index_select(0, stream.order)


def _attend(
    rectangle: Rectangle,
    tokens: list[Tensor],
    mask: Tensor | None,
    exact: torch.dtype,
    scaling: float | None,
    rule: ScoreRule,
    *,
    keeps_copies: bool,
) -> Tensor:
    """Returns what a rectangle's pieces see, (R · Q, H, d), from the stream's queries, keys and values."""
    num_heads, dtype = tokens[0].shape[1], tokens[0].dtype

    def gather(states: Tensor, places: Tensor) -> Tensor:
        there = states.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2).to(exact)
        sharing = num_heads // there.shape[1]
        return there if sharing == 1 else there.repeat_interleave(sharing, 1)  # (R, H, Q or P + Q, d)

    places = rectangle.queries, rectangle.keys, rectangle.keys
    query, key, value = (gather(states, where) for states, where in zip(tokens, places, strict=True))
    again: dict[int, Callable[[], Tensor]] = {
        copy.untyped_storage()._cdata: partial(gather, states.detach(), where)
        for copy, states, where in zip((query, key, value), tokens, places, strict=True)
    }
    hooks: AbstractContextManager[object] = nullcontext() if keeps_copies else saved_without_copies(again)
    with hooks:
        if rule.is_plain:
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        else:
            scores = rule.capped((query @ key.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling))
            if mask is None:
                mask = torch.full_like(scores[0, 0], -torch.inf).triu(1)
            mixed = rule.weights(scores + mask) @ value
    return mixed.to(dtype).transpose(1, 2).flatten(0, 1)


def saved_without_copies(again: dict[int, Callable[[], Tensor]]) -> AbstractContextManager[object]:
    """Inside, of copies and their views is saved how they are made again. again: by the storage of a copy."""

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        make = again.get(saved.untyped_storage()._cdata)
        if make is None:
            return saved.detach()  # a graph that held its own output would never be freed
        view = saved.size(), saved.stride(), saved.storage_offset()
        return lambda: make().as_strided(*view)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
