"""A cache of fixed size for a model to decode over, and the attention that reads it.

A prompt is held once for all of its rows. A row's own tokens are held in pages, which it takes as its text
grows; one softmax goes over both. The model's own layers hand keys and values to the cache and call the
attention, by the names and with the arguments that transformers has for them.

Shapes: b prompts with at most g active rows each, R active rows, n pages of L tokens that are read, at most k
of one row, H heads that share H' of keys and values, h each, of width d, P prompt tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from grpo.model.numerics import PLAIN, ScoreRule, matmul_dtype

PAGE = 256
"""Tokens of a page at most."""


def page_tokens(new_tokens: int) -> int:
    """Returns the tokens of a page, for completions of so many: one page holds a short one, and as few as it
    takes, all alike, a long one.
    """
    pages = -(-new_tokens // PAGE)
    return -(-new_tokens // (pages * 8)) * 8


def cache_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Returns the dtype of keys and values, of a model that computes in `dtype`.

    On a CPU fp32 at least. Where a row has one query, torch's attention takes four to seven times as long in
    bf16 there (AVX-512), but with tiles (AMX) a quarter less, which is little of a token.
    """
    return torch.promote_types(dtype, torch.float32) if device_type == "cpu" else dtype


class Places(NamedTuple):
    """The places of prompts and pages of the active rows. It changes as rows come and go, and take pages."""

    prompt_rows: Tensor
    """(b, g) rows that each prompt has; what is left over has any row's number, and is not looked at."""
    in_prompts: Tensor
    """(R,) place of each row in `prompt_rows`, flattened."""
    page_rows: Tensor
    """(n,) row that each page belongs to; of a page that is nobody's, any."""
    page_numbers: Tensor
    """(n,) how many pages of the same row are before it."""
    row_pages: Tensor
    """(R, k) pages of each row; what is left over is not looked at."""
    has_page: Tensor
    """(R, k) bool: whether `row_pages` names a page of the row's there."""


class AttentionBias(NamedTuple):
    """Numbers that are added to scores: 0 where a token is read, else the lowest number there is."""

    prompt: Tensor  # (b, 1, 1, P), or (b, 1, g, P) where rows of a prompt read unlike parts of it
    page: Tensor  # (n, 1, 1, L)


class DecodeStep(NamedTuple):
    """The place where each row's newest token is written, and what it reads."""

    page: Tensor  # (R,)
    offset: Tensor  # (R,), in the page
    places: Places
    mask: AttentionBias
    window_mask: AttentionBias  # of layers with a sliding window


class StaticLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values, of all prompts and rows' own tokens that there are places for.

    Given prompts' keys, it keeps them in `prompt_places`. While there is a `step`, it is given a token of
    each row, and hands itself to the model's attention in place of keys and values.
    """

    prompt_places: Tensor
    step: DecodeStep | None = None

    def __init__(
        self, num_prompts: int, num_pages: int, page: int, *, is_sliding: bool, device_type: str
    ) -> None:
        """page: its tokens. device_type: of the device that it is on, or that a trace stands for."""
        super().__init__()
        self.is_sliding, self._device_type = is_sliding, device_type
        self._shape = num_prompts, num_pages, page
        self.prompts: list[Tensor] = []
        """Keys and values, each (prompts, H', P, d)."""
        self.pages: list[Tensor] = []
        """Keys and values, each (pages, H', tokens, d)."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """key, value: of prompts (b, H', P, d), or of a token (R, H', 1, d)."""
        if self.step is not None:
            for stored, new in zip(self.pages, (key, value), strict=True):
                new = new.to(matmul_dtype(new))  # as where it is scored
                stored[self.step.page, :, self.step.offset] = new.squeeze(2).to(stored.dtype)
            return self, self
        if not self.prompts:
            dtype, num_prompts = cache_dtype(matmul_dtype(key), self._device_type), self._shape[0]
            self.prompts = [new.new_zeros(num_prompts, *new.shape[1:], dtype=dtype) for new in (key, value)]
        key, value = (new.to(matmul_dtype(new)) for new in (key, value))
        for prompts, new in zip(self.prompts, (key, value), strict=True):
            prompts[self.prompt_places] = new.to(prompts.dtype)
        return key, value

    def clear(self, pages: Tensor) -> None:
        """Forget what stands in these pages: a NaN would outlive its mask. At first there are none."""
        if not self.pages:
            _, num_pages, page = self._shape
            self.pages = [
                tensor.new_zeros(num_pages, tensor.shape[1], page, tensor.shape[3]) for tensor in self.prompts
            ]
        for stored in self.pages:
            stored.index_fill_(0, pages, 0.0)

    def attend(self, query: Tensor, scale: float, rule: ScoreRule = PLAIN) -> Tensor:
        """Attends from each row's newest token to the prompt and its own tokens; query and result (R, H,
        d)."""
        assert self.step is not None
        mask = self.step.window_mask if self.is_sliding else self.step.mask
        places, (num_prompts, _, _, tokens) = self.step.places, mask.prompt.shape
        num_pages, length = len(mask.page), mask.page.shape[-1]
        by_head = query.to(self.pages[0].dtype).unflatten(1, (self.pages[0].shape[1], -1))  # (R, H', h, d)
        of_prompts = (
            _by_prompt(by_head, places),
            *(tensor[:num_prompts, :, :tokens] for tensor in self.prompts),
            _for_queries(mask.prompt, places.prompt_rows.shape[1] * by_head.shape[2]),
        )
        of_pages = (
            by_head[places.page_rows],
            *(tensor[:num_pages, :, :length] for tensor in self.pages),
            _for_queries(mask.page, by_head.shape[2]),
        )
        if rule.is_plain and self._device_type == "cpu":
            attended = _cascade_attention(of_prompts, of_pages, places, scale)
        else:
            attended = _attend_once(of_prompts, of_pages, places, scale, rule)
        return attended.flatten(1, 2).to(query.dtype)


Part = tuple[Tensor, ...]
"""Query, keys, values and mask: of prompts (b, H', g·h, …), or of pages (n, H', h, …)."""


def _attend_once(
    of_prompts: Part, of_pages: Part, places: Places, scale: float, rule: ScoreRule = PLAIN
) -> Tensor:
    """Plain products, and one softmax over the prompt and the row's own tokens; result (R, H', h, d)."""
    (_, _, prompt_values, _), (query, _, page_values, _) = of_prompts, of_pages
    if rule.is_plain:
        prompt, pages = (
            torch.add(mask, q @ keys.mT, alpha=scale) for q, keys, _, mask in (of_prompts, of_pages)
        )
    else:
        exact = torch.promote_types(query.dtype, torch.float32)
        prompt, pages = (
            rule.capped(scale * (q @ keys.mT).to(exact)) + mask for q, keys, _, mask in (of_prompts, of_pages)
        )
    sharing, has_page = query.shape[2], places.has_page[:, None, None, :, None]
    own = pages[places.row_pages].permute(0, 2, 3, 1, 4)  # (R, H', h, k, L)
    own = own.masked_fill(~has_page, torch.finfo(own.dtype).min)
    parts = [_unfold_groups(prompt, places, sharing), own.flatten(3)]
    weights = _softmax(torch.cat(parts, -1), rule).to(query.dtype)  # (R, H', h, P + k·L)
    from_prompt, from_own = weights.split([part.shape[-1] for part in parts], -1)
    attended = _unfold_groups(_by_prompt(from_prompt, places) @ prompt_values, places, sharing)
    by_page = from_own.unflatten(-1, own.shape[3:])[places.page_rows, :, :, places.page_numbers]
    of_rows = (by_page @ page_values)[places.row_pages]  # (R, k, H', h, d)
    return attended + of_rows.where(has_page.transpose(1, 3), 0).sum(1)


def _softmax(scores: Tensor, rule: ScoreRule) -> Tensor:
    """Returns weights of all that rows' heads (R, H', h) read, in which sinks have their share."""
    return rule.weights(scores.flatten(1, 2).unsqueeze(2)).view_as(scores)


def _cascade_attention(of_prompts: Part, of_pages: Part, places: Places, scale: float) -> Tensor:
    """Torch's fused attention of the prompt and of each page, merged by their log-sum-exps, as
    flash-decoding and cascade attention do; result (R, H', h, d).

    Of parts o_i with log-sum-exps l_i: o = Σ o_i · softmax(l)_i; of two, o = o₁ + (o₂ - o₁) σ(l₂ - l₁).
    """
    (prompt, prompt_sum), (pages, page_sum) = (
        _fused(query, *others, attn_mask=mask, scale=scale) for query, *others, mask in (of_prompts, of_pages)
    )
    sharing = pages.shape[2]
    prompt, prompt_sum = (
        _unfold_groups(each, places, sharing) for each in (prompt, prompt_sum.unsqueeze(-1))
    )
    pages, page_sum = pages[places.row_pages], page_sum[places.row_pages].unsqueeze(-1)  # (R, k, H', h, …)
    if pages.shape[1] == 1:
        return prompt.lerp(pages.squeeze(1), (page_sum.squeeze(1) - prompt_sum).sigmoid())
    # Nothing of a page that is not the row's: not even a NaN, which would outlive a weight of zero.
    has_page = places.has_page[:, :, None, None, None]
    pages, page_sum = pages.where(has_page, 0), page_sum.where(has_page, -torch.inf)
    weights = torch.cat([prompt_sum.unsqueeze(1), page_sum], 1).softmax(1)
    return (weights * torch.cat([prompt.unsqueeze(1), pages], 1)).sum(1)


_fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _for_queries(mask: Tensor, queries: int) -> Tensor:
    """A mask (b, 1, 1 or g, P) for as many queries, in memory: one that is expanded is read more slowly."""
    return mask.repeat_interleave(queries // mask.shape[2], 2)


def _by_prompt(by_row: Tensor, places: Places) -> Tensor:
    """(R, H', h, n) as (b, H', g·h, n) of prompts."""
    return by_row[places.prompt_rows].transpose(1, 2).flatten(2, 3)


def _unfold_groups(by_prompt: Tensor, places: Places, sharing: int) -> Tensor:
    """(b, H', g·h, n) of prompts as (R, H', h, n). sharing: h."""
    split = by_prompt.unflatten(2, (-1, sharing)).transpose(1, 2)  # (b, g, H', h, n)
    return split.flatten(0, 1)[places.in_prompts]


_NAME = "decoding"
"""The name of this attention (`attn_implementation`)."""


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
    rule = ScoreRule.of(others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query = query.squeeze(2).to(matmul_dtype(query))
    with torch.autocast(query.device.type, enabled=False):
        return key.attend(query, scale, rule).unsqueeze(1), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def decoding(config: PretrainedConfig, layers: Sequence[StaticLayer], step: DecodeStep) -> Iterator[None]:
    """Inside, a model's layers attend to these, and each row's newest token goes to its place."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    for layer in layers:
        layer.step = step
    try:
        yield
    finally:
        config._attn_implementation = before
        for layer in layers:
            layer.step = None
