"""GPT-2, one token at a time: a static cache, and one copy of a prompt's keys for its whole group.

Attention runs over two parts, the group's prompt and the row's own tokens, and their results are weighted
by what each part's scores add up to (`decode/parts.py`). Linear layers and norms are the model's own.

A group may take the place of a finished one: groups then have different numbers of own tokens.
A recorder, if there is one, takes down steps on the device and replays them (`decode/recorded.py`).

Shapes: b groups of g rows, R = b·g rows, H heads of width d, P prompt tokens, K places for own tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from grpo.decode.cache_bytes import CacheBytes
from grpo.decode.groups import rows_of_groups
from grpo.decode.parts import attend, joined
from grpo.decode.recorded import RecordedSteps, Recorder
from grpo.prefill import encode_prompts, pad_prompts

_BLOCK = 48
"""Own tokens are attended to in multiples of this: a step is recorded, or compiled, for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has for so many tokens."""
    return -(-tokens // _BLOCK) * _BLOCK


class _EncodedPrompts(NamedTuple):
    keys: list[Tensor]  # of each layer (b, H, P, d)
    values: list[Tensor]  # of each layer (b, H, P, d)
    bias: Tensor  # (b, 1, 1, P), 0 where there is a token
    lengths: Tensor  # (b,)
    logits: Tensor  # (b, V) of each prompt's last token


class _Places(NamedTuple):
    """own[rows, :, place] takes each row's newest token: the same place for all, or (R,) tensors."""

    rows: slice | Tensor
    place: int | Tensor
    bias: Tensor  # (R, 1, 1, K), 0 where a row has a token; so many places are attended to


class GPT2Decoder:
    def __init__(
        self, model: GPT2LMHeadModel, max_new_tokens: int, *, recorder: Recorder | None = None
    ) -> None:
        self._model = model
        self._recorded = RecordedSteps(recorder) if recorder is not None else None
        self._blocks = list(model.transformer.h)
        self._max_new_tokens = max_new_tokens
        config = model.config
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        by_layer = config.scale_attn_by_inverse_layer_idx
        self._scales = [scale / (layer + 1 if by_layer else 1) for layer in range(config.n_layer)]

    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        config = self._model.config
        width = max(longest_prompt, *map(len, prompt_ids))
        prompts = self._encode(prompt_ids, width)
        self._prompt_keys, self._prompt_values, self._prompt_bias = prompts.keys, prompts.values, prompts.bias
        heads, head_width = config.n_head, config.n_embd // config.n_head
        self._rows_per_prompt = rows_per_prompt
        rows, places = len(prompt_ids) * rows_per_prompt, static_cache_length(self._max_new_tokens)
        new = prompts.logits.new_zeros
        self._own_keys = [new(rows, heads, places, head_width) for _ in self._blocks]
        self._own_values = [new(rows, heads, places, head_width) for _ in self._blocks]
        self._num_own = [0] * len(prompt_ids)  # own tokens of each group's rows
        self._positions = prompts.lengths.repeat_interleave(rows_per_prompt)  # (R,)
        self._own = torch.zeros_like(self._positions)  # (R,) what num_own says, for the device
        return prompts.logits.repeat_interleave(rows_per_prompt, 0)

    def replace(self, groups: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        prompts = self._encode(prompt_ids, self._prompt_bias.shape[-1])
        places = torch.tensor(groups, device=rows.device)
        for layer in range(len(self._blocks)):
            self._prompt_keys[layer][places] = prompts.keys[layer]
            self._prompt_values[layer][places] = prompts.values[layer]
            self._own_keys[layer].index_fill_(0, rows, 0.0)  # a NaN would outlive its bias
            self._own_values[layer].index_fill_(0, rows, 0.0)
        self._prompt_bias[places] = prompts.bias
        self._positions[rows] = prompts.lengths.repeat_interleave(self._rows_per_prompt)
        self._own[rows] = 0
        for group in groups:
            self._num_own[group] = 0
        return prompts.logits.repeat_interleave(self._rows_per_prompt, 0)

    def _encode(self, prompt_ids: Sequence[Sequence[int]], width: int) -> _EncodedPrompts:
        prompts = pad_prompts(prompt_ids, self._model.device, width=width)
        hidden, cache = encode_prompts(self._model, prompts)  # (b, D)
        bias = torch.zeros_like(prompts.mask, dtype=hidden.dtype).masked_fill_(~prompts.mask, -torch.inf)
        return _EncodedPrompts(
            keys=[layer.keys for layer in cache.layers],
            values=[layer.values for layer in cache.layers],
            bias=bias[:, None, None],
            lengths=prompts.lengths,
            logits=self._model.lm_head(hidden),
        )

    def step(self, tokens: Tensor) -> Tensor:
        last = self._own_keys[0].shape[2] - 1  # a row that has ended overwrites its last
        at = [min(count, last) for count in self._num_own]
        self._num_own = [place + 1 for place in at]
        self._own.add_(1).clamp_(max=last + 1)
        num_blocks = max(at) // _BLOCK + 1
        if self._recorded is not None:
            logits = self._recorded(self._logits, tokens, num_blocks)
        else:
            logits = self._logits(tokens, num_blocks, place=at[0] if min(at) == max(at) else None)
        # A row that has ended runs on until its group has, perhaps beyond the context.
        self._positions.add_(1).clamp_(max=self._model.config.n_positions - 1)
        return logits

    def _logits(self, tokens: Tensor, num_blocks: int, place: int | None = None) -> Tensor:
        """What follows each row's newest token, (R, V). place: where all rows' tokens go, if one is known.

        It may be run again: all that it changes are the newest tokens' places.
        """
        transformer = self._model.transformer
        x = transformer.wte(tokens) + transformer.wpe(self._positions)  # (R, D)
        places = self._places(num_blocks, place, x.dtype)
        for layer, block in enumerate(self._blocks):
            x = x + block.attn.c_proj(self._attend(layer, block.attn, block.ln_1(x), places))
            x = x + block.mlp(block.ln_2(x))
        return self._model.lm_head(transformer.ln_f(x))

    def _places(self, num_blocks: int, place: int | None, dtype: torch.dtype) -> _Places:
        own = self._own
        beyond = torch.arange(num_blocks * _BLOCK, device=own.device) >= own.unsqueeze(1)  # (R, K)
        bias = torch.zeros_like(beyond, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None]
        if place is not None:
            return _Places(slice(None), place, bias)
        return _Places(torch.arange(len(own), device=own.device), own - 1, bias)

    def _attend(self, layer: int, attention: GPT2Attention, x: Tensor, places: _Places) -> Tensor:
        """Attention of each row's newest token, (R, D) to (R, D)."""
        b, g, heads = len(self._num_own), self._rows_per_prompt, self._model.config.n_head
        query, key, value = attention.c_attn(x).view(b * g, 3, heads, -1).unbind(1)  # (R, H, d)
        own_keys, own_values = self._own_keys[layer], self._own_values[layer]
        own_keys[places.rows, :, places.place] = key
        own_values[places.rows, :, places.place] = value

        scale, length = self._scales[layer], places.bias.shape[-1]
        over_prompt = attend(
            query.view(b, g, heads, -1).transpose(1, 2),  # (b, H, g, d)
            self._prompt_keys[layer], self._prompt_values[layer], self._prompt_bias, scale=scale,
        )  # fmt: skip
        over_own = attend(
            query.unsqueeze(2),  # (R, H, 1, d)
            own_keys[:, :, :length], own_values[:, :, :length], places.bias, scale=scale,
        )  # fmt: skip
        return joined(over_prompt.by_row, over_own.by_row).flatten(1)

    def keep(self, groups: Sequence[int]) -> None:
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        places = torch.tensor(groups, device=rows.device)
        for layer in range(len(self._blocks)):  # one by one: never two copies of the whole cache
            self._prompt_keys[layer] = self._prompt_keys[layer][places]
            self._prompt_values[layer] = self._prompt_values[layer][places]
            self._own_keys[layer] = self._own_keys[layer][rows]
            self._own_values[layer] = self._own_values[layer][rows]
        self._prompt_bias = self._prompt_bias[places]
        self._positions, self._own = self._positions[rows], self._own[rows]
        self._num_own = [self._num_own[group] for group in groups]
        if self._recorded is not None:
            self._recorded.forget()

    def skip(self, num_tokens: int) -> None:
        self._num_own = [count + num_tokens for count in self._num_own]
        self._positions, self._own = self._positions + num_tokens, self._own + num_tokens

    @property
    def cache_bytes(self) -> CacheBytes:
        prompt = sum(part.nbytes for part in (*self._prompt_keys, *self._prompt_values))
        own = sum(part.nbytes for part in (*self._own_keys, *self._own_values))
        places = len(self._num_own) * self._own_keys[0].shape[2]
        return CacheBytes(held=prompt + own, used=prompt + own * sum(self._num_own) // places)
