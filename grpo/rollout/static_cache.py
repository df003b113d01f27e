"""A cache for models to decode over, of a fixed size, and the attention that reads it.

Two parts, the group's prompt and the row's own tokens, with one softmax over both. The model's own layers
hand keys and values to the cache and call the attention, by the names and the arguments that transformers
has for them. Keys are held transposed, as `model/cpu/sums.py` adds them up.

Shapes: b groups of g rows, R = b·g rows, H heads that share H' of keys and values, of width d, P prompt
tokens, K places for own tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from grpo.model.cpu.sums import Bags, weighted_sums
from grpo.model.stand_ins import refuse_unknown

BLOCK = 48
"""Own tokens are attended to in multiples of this: a step is recorded for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has for so many tokens."""
    return -(-tokens // BLOCK) * BLOCK


def _transposed(values: Tensor) -> Tensor:
    """(…, K, d) as (…, d, K): for the CPU's sums in that order, for products on CUDA as a view."""
    return values.contiguous().mT if values.device.type == "cuda" else values.mT.contiguous()


def _transposed_zeros(like: Tensor, rows: int, heads: int, places: int, width: int) -> Tensor:
    """(rows, heads, width, places), as `_transposed` has them."""
    if like.device.type == "cuda":
        return like.new_zeros(rows, heads, places, width).mT
    return like.new_zeros(rows, heads, width, places)


class Places(NamedTuple):
    """Where each row's newest token goes, (rows, place): the same place for all, or (R,) tensors."""

    rows: slice | Tensor
    place: int | Tensor
    length: int  # so many places are attended to
    bias: Tensor  # (R, 1, P + length), 0 where a row has a token
    window_bias: Tensor  # the same for layers with a sliding window
    prompt_keys: Bags | None
    prompt_values: Bags | None
    own_keys: Bags | None
    own_values: Bags | None


class StaticLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's cache: first given the prompts', then a token of each row at a time.

    The model's attention is handed the layer itself for a token's keys and values.
    """

    places: Places
    prompt_keys: Tensor  # (b, H', d, P)
    prompt_values: Tensor  # (b, H', P, d)
    own_keys: Tensor  # (R, H', d, K)
    own_values: Tensor  # (R, H', K, d)

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding, self._has_room = is_sliding, False

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """key, value: the prompts' (b, H', P, d), or (R, H', 1, d)."""
        if not self._has_room:
            self.prompt_keys, self.prompt_values = _transposed(key), value.contiguous()
            return key, value
        rows, place = self.places.rows, self.places.place
        self.own_keys[rows, :, :, place] = key.squeeze(2)
        self.own_values[rows, :, place] = value.squeeze(2)
        return self, self

    def make_room(self, rows: int, places: int) -> None:
        _, heads, width, _ = self.prompt_keys.shape
        self.own_keys = _transposed_zeros(self.prompt_keys, rows, heads, places, width)
        self.own_values = self.prompt_values.new_zeros(rows, heads, places, self.prompt_values.shape[-1])
        self._has_room = True

    def like(self, groups: int, rows: int) -> "StaticLayer":
        """An empty one of as many or fewer places."""
        layer = StaticLayer(self.is_sliding)
        layer.prompt_keys, layer.prompt_values = (
            torch.zeros_like(each[:groups]) for each in (self.prompt_keys, self.prompt_values)
        )
        layer.own_keys, layer.own_values = (
            torch.zeros_like(each[:rows]) for each in (self.own_keys, self.own_values)
        )
        layer._has_room = True
        return layer

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """What each row's newest token reads; query and result (R, H, d)."""
        places = self.places
        of_prompt = weighted_sums(query, self.prompt_keys, places.prompt_keys)  # (R, H, P)
        of_own = weighted_sums(query, self.own_keys, places.own_keys, width=places.length)  # (R, H, length)
        scores = torch.cat([of_prompt, of_own], -1)
        bias = places.window_bias if self.is_sliding else places.bias
        weights = torch.add(bias, scores, alpha=scale).softmax(-1)
        of_prompt, of_own = weights.split([of_prompt.shape[-1], places.length], -1)
        from_prompt = weighted_sums(of_prompt, self.prompt_values, places.prompt_values)  # (R, H, d)
        return from_prompt + weighted_sums(of_own, self.own_values, places.own_values)


_NAME = "decoding"
"""What models know this attention by (`attn_implementation`)."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: StaticLayer,
    value: StaticLayer,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, a layer of the cache for keys and values: (R, H, 1, d) to (R, 1, H, d)."""
    refuse_unknown(others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.attend(query.squeeze(2), scale).unsqueeze(1), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def decoding(config: PretrainedConfig, layers: Sequence[StaticLayer], places: Places) -> Iterator[None]:
    """Inside, a model's layers attend to these, and each row's newest token goes to its place."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    for layer in layers:
        layer.places = places
    try:
        yield
    finally:
        config._attn_implementation = before
        for layer in layers:
            del layer.places
