"""A cache for models to decode over, of a fixed size, and the attention that reads it.

Two parts, the group's prompt and the row's own tokens, with one softmax over both. The model's own layers
hand keys and values to the cache and call the attention, by the names and the arguments that transformers
has for them.

Shapes: b groups of g rows, R = b·g rows, H heads that share H' of keys and values, h each, of width d,
P prompt tokens, K places for own tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from grpo.model.stand_ins import refuse_unknown
from grpo.rollout.cache import move_to_front

BLOCK = 48
"""Own tokens are attended to in multiples of this: a step is recorded for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has for so many tokens."""
    return -(-tokens // BLOCK) * BLOCK


class Places(NamedTuple):
    """Where each row's newest token goes, (rows, place): the same place for all, or (R,) tensors."""

    rows: slice | Tensor
    place: int | Tensor
    length: int  # so many places are attended to
    bias: "Bias"
    window_bias: "Bias"  # of layers with a sliding window


class Bias(NamedTuple):
    """What is added to scores: 0 where a row has a token, else next to nothing can be read."""

    whole: Tensor  # (R, 1, P + length), -inf
    prompt: Tensor | None  # (b, 1, g·h, P), the lowest finite number; where attention is in two parts
    own: Tensor | None  # (R, 1, 1, length), likewise


def make_bias(whole: Tensor, *, prompts: int, length: int, sharing: int) -> Bias:
    """whole: (R, P + length). prompts: b. sharing: heads h that have keys in common."""
    if whole.device.type != "cpu":
        return Bias(whole.unsqueeze(1), None, None)
    finite = whole.clamp(min=torch.finfo(whole.dtype).min)
    of_prompt = finite[:, :-length].unflatten(0, (prompts, -1)).repeat_interleave(sharing, 1)
    return Bias(whole.unsqueeze(1), of_prompt.unsqueeze(1), finite[:, None, None, -length:])


class StaticLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's cache: first given the prompts', then a token of each row at a time.

    The model's attention is handed the layer itself for a token's keys and values.
    """

    places: Places
    prompt_keys: Tensor  # (b, H', P, d), and the values likewise
    prompt_values: Tensor
    own_keys: Tensor  # (R, H', K, d), and the values likewise
    own_values: Tensor

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self._room: tuple[Tensor, ...] = ()
        """Keys and values of all places; those above are of the first ones, that are in use."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """key, value: the prompts' (b, H', P, d), or (R, H', 1, d)."""
        if not self._room:
            self.prompt_keys, self.prompt_values = key.contiguous(), value.contiguous()
            return key, value
        rows, place = self.places.rows, self.places.place
        self.own_keys[rows, :, place] = key.squeeze(2)
        self.own_values[rows, :, place] = value.squeeze(2)
        return self, self

    def make_room(self, rows: int, places: int) -> None:
        prompts = self.prompt_keys, self.prompt_values
        own = (each.new_zeros(rows, each.shape[1], places, each.shape[3]) for each in prompts)
        self._room = (*prompts, *own)
        self.use_first(len(self.prompt_keys), rows)

    def move_to_front(self, groups: Tensor, rows: Tensor) -> None:
        """What these groups and their rows have goes to the first places."""
        move_to_front(self._room[:2], groups)
        move_to_front(self._room[2:], rows)

    def use_first(self, groups: int, rows: int) -> None:
        """From here on only so many places are in use."""
        self.prompt_keys, self.prompt_values = (tensor[:groups] for tensor in self._room[:2])
        self.own_keys, self.own_values = (tensor[:rows] for tensor in self._room[2:])

    @property
    def room_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._room)

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """What each row's newest token reads, of the prompt and its own; query and result (R, H, d)."""
        places = self.places
        bias = places.window_bias if self.is_sliding else places.bias
        prompts, heads = self.prompt_keys.shape[:2]
        by_head = query.unflatten(1, (heads, -1))  # (R, H', h, d)
        by_prompt = by_head.unflatten(0, (prompts, -1)).transpose(1, 2).flatten(2, 3)  # (b, H', g·h, d)
        of_prompt = by_prompt, self.prompt_keys, self.prompt_values
        of_own = by_head, self.own_keys[:, :, : places.length], self.own_values[:, :, : places.length]
        attend = _attend_twice if query.device.type == "cpu" else _attend_once
        return attend(of_prompt, of_own, bias, scale)


QueryKeysValues = tuple[Tensor, Tensor, Tensor]


def _attend_once(of_prompt: QueryKeysValues, of_own: QueryKeysValues, bias: Bias, scale: float) -> Tensor:
    """Plain products, and one softmax over the prompt and the row's own tokens."""
    (by_prompt, prompt_keys, prompt_values), (by_head, own_keys, own_values) = of_prompt, of_own
    parts = [_by_row(by_prompt @ prompt_keys.mT, by_head), (by_head @ own_keys.mT).flatten(1, 2)]
    weights = torch.add(bias.whole, torch.cat(parts, -1), alpha=scale).softmax(-1)  # (R, H, P + length)
    from_prompt, from_own = weights.split([part.shape[-1] for part in parts], -1)
    rows, heads, sharing, _ = by_head.shape
    shape = len(by_prompt), rows // len(by_prompt), heads, sharing, -1
    folded = from_prompt.view(shape).transpose(1, 2).flatten(2, 3)  # (b, H', g·h, P)
    read = (from_own.unflatten(1, (heads, sharing)) @ own_values).flatten(1, 2)
    return _by_row(folded @ prompt_values, by_head) + read


def _attend_twice(of_prompt: QueryKeysValues, of_own: QueryKeysValues, bias: Bias, scale: float) -> Tensor:
    """Torch's fused attention of either part, merged by their log-sum-exps, as cascade attention does.

    With weights e^l of each part: o = o₁ σ(l₁ - l₂) + o₂ σ(l₂ - l₁).
    """
    (first, first_sum), (second, second_sum) = (
        _fused(*part, attn_mask=mask, scale=scale)
        for part, mask in ((of_prompt, bias.prompt), (of_own, bias.own))
    )
    by_head = of_own[0]
    share = _by_row(first_sum.unsqueeze(-1), by_head) - second_sum.flatten(1, 2).unsqueeze(-1)
    exact = share.dtype
    merged = second.flatten(1, 2).to(exact).lerp(_by_row(first, by_head).to(exact), share.sigmoid())
    return merged.to(by_head.dtype)


_fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _by_row(folded: Tensor, by_head: Tensor) -> Tensor:
    """(b, H', g·h, n) of prompts as (R, H, n), for queries by_head (R, H', h, d)."""
    rows, _, sharing, _ = by_head.shape
    split = folded.unflatten(2, (rows // len(folded), sharing)).transpose(1, 2)  # (b, g, H', h, n)
    return split.reshape(rows, -1, folded.shape[-1])


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
