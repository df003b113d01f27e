"""A cache of fixed size for a model to decode over, and the attention that reads it.

A group's prompt is held once, and each row's own tokens beside it; one softmax goes over both. The model's
own layers hand keys and values to the cache and call the attention, by the names and with the arguments that
transformers has for them.

Shapes: b groups of g rows, R = b·g rows, H heads that share H' of keys and values, h each, of width d,
P prompt tokens, L own tokens that are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from grpo.model.stand_ins import product_dtype, refuse_unknown

BLOCK = 48
"""Where steps are recorded own tokens are read in multiples of this: each length is recorded anew."""


def static_cache_length(tokens: int) -> int:
    """Places that the cache has for so many tokens of a row."""
    return -(-tokens // BLOCK) * BLOCK


def cache_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """What keys and values are held in, of a model that computes in `dtype`.

    On a CPU fp32 at least. Where a row has one query, torch's attention takes four to seven times as long in
    bf16 there (AVX-512), but with tiles (AMX) a quarter less, which is little of a token.
    """
    return torch.promote_types(dtype, torch.float32) if device_type == "cpu" else dtype


class Mask(NamedTuple):
    """What is added to scores: 0 where a token is read, else the lowest number there is."""

    prompt: Tensor  # (b, 1, 1, P)
    completion: Tensor  # (R, 1, 1, L)


class Reading(NamedTuple):
    """Where each row's newest token is written, (rows, place), and what it reads."""

    rows: slice | Tensor
    place: int | Tensor  # the same place for all rows, or (R,)
    mask: Mask
    window_mask: Mask  # of layers with a sliding window


class StaticLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values, of all groups and rows that there are places for.

    Given prompts' keys, it keeps them for `groups`. While there is a `reading`, it is given a token of each
    row, and hands itself to the model's attention in place of keys and values.
    """

    groups: Tensor
    reading: Reading | None = None

    def __init__(
        self, num_groups: int, num_rows: int, num_places: int, *, is_sliding: bool, device_type: str
    ) -> None:
        """device_type: of the device that it is on, or that a trace stands for."""
        super().__init__()
        self.is_sliding, self._device_type = is_sliding, device_type
        self._shape = num_groups, num_rows, num_places
        self.prompts: list[Tensor] = []
        """Keys and values, each (groups, H', P, d)."""
        self.completions: list[Tensor] = []
        """Keys and values, each (rows, H', places, d)."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """key, value: of prompts (b, H', P, d), or of a token (R, H', 1, d)."""
        if self.reading is not None:
            for stored, new in zip(self.completions, (key, value), strict=True):
                new = new.to(product_dtype(new))  # as where it is scored
                stored[self.reading.rows, :, self.reading.place] = new.squeeze(2).to(stored.dtype)
            return self, self
        if not self.prompts:
            dtype, num_groups = cache_dtype(product_dtype(key), self._device_type), self._shape[0]
            self.prompts = [new.new_zeros(num_groups, *new.shape[1:], dtype=dtype) for new in (key, value)]
        key, value = (new.to(product_dtype(new)) for new in (key, value))
        for prompts, new in zip(self.prompts, (key, value), strict=True):
            prompts[self.groups] = new.to(prompts.dtype)
        return key, value

    def clear(self, rows: Tensor) -> None:
        """Forget these rows' own tokens: a NaN would outlive its mask."""
        if not self.completions:
            _, num_rows, places = self._shape
            self.completions = [
                tensor.new_zeros(num_rows, tensor.shape[1], places, tensor.shape[3])
                for tensor in self.prompts
            ]
            return
        for stored in self.completions:
            stored.index_fill_(0, rows, 0.0)

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """What each row's newest token reads, of the prompt and its own; query and result (R, H, d)."""
        assert self.reading is not None
        mask = self.reading.window_mask if self.is_sliding else self.reading.mask
        prompts, rows, length = len(mask.prompt), len(query), mask.completion.shape[-1]
        by_head = query.to(self.completions[0].dtype).unflatten(
            1, (self.completions[0].shape[1], -1)
        )  # (R, H', h, d)
        by_prompt = by_head.unflatten(0, (prompts, -1)).transpose(1, 2).flatten(2, 3)  # (b, H', g·h, d)
        of_prompt = by_prompt, *(tensor[:prompts] for tensor in self.prompts), mask.prompt
        of_completion = by_head, *(tensor[:rows, :, :length] for tensor in self.completions), mask.completion
        attend = _attend_twice if self._device_type == "cpu" else _attend_once
        return attend(of_prompt, of_completion, scale).to(query.dtype)


Part = tuple[Tensor, ...]
"""Query, keys, values and mask: of prompts (b, H', g·h, …), or of rows' own tokens (R, H', h, …)."""


def _attend_once(of_prompt: Part, of_completion: Part, scale: float) -> Tensor:
    """Plain products, and one softmax over the prompt and the row's own tokens."""
    (folded, _, prompt_values, _), (query, _, completion_values, _) = of_prompt, of_completion
    prompt, completion = (
        torch.add(mask, q @ keys.mT, alpha=scale) for q, keys, _, mask in (of_prompt, of_completion)
    )
    parts = [_by_row(prompt, query), completion.flatten(1, 2)]
    weights = torch.cat(parts, -1).softmax(-1)  # (R, H, P + L)
    from_prompt, from_own = weights.split([part.shape[-1] for part in parts], -1)
    by_prompt = from_prompt.view(len(folded), -1, *query.shape[1:3], from_prompt.shape[-1])
    attended = _by_row(by_prompt.transpose(1, 2).flatten(2, 3) @ prompt_values, query)
    return attended + (from_own.unflatten(1, query.shape[1:3]) @ completion_values).flatten(1, 2)


def _attend_twice(of_prompt: Part, of_completion: Part, scale: float) -> Tensor:
    """Torch's fused attention of either part, merged by their log-sum-exps, as cascade attention does.

    With weights e^l of each part: o = o₁ σ(l₁ - l₂) + o₂ σ(l₂ - l₁).
    """
    (first, first_sum), (second, second_sum) = (
        # A mask that is the same for all queries would be read more slowly.
        _fused(query, *others, attn_mask=mask.expand(-1, -1, query.shape[2], -1).contiguous(), scale=scale)
        for query, *others, mask in (of_prompt, of_completion)
    )
    query = of_completion[0]
    share = _by_row(first_sum.unsqueeze(-1), query) - second_sum.flatten(1, 2).unsqueeze(-1)
    return second.flatten(1, 2).lerp(_by_row(first, query), share.sigmoid())


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
    query = query.squeeze(2).to(product_dtype(query))
    with torch.autocast(query.device.type, enabled=False):
        return key.attend(query, scale).unsqueeze(1), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def decoding(config: PretrainedConfig, layers: Sequence[StaticLayer], reading: Reading) -> Iterator[None]:
    """Inside, a model's layers attend to these, and each row's newest token goes to its place."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    for layer in layers:
        layer.reading = reading
    try:
        yield
    finally:
        config._attn_implementation = before
        for layer in layers:
            layer.reading = None
