"""GPT-2, one token at a time: a static cache, and one copy of a prompt's keys for its whole group.

Attention runs over two parts, the group's prompt and the row's own tokens, with one softmax over both; keys
are held transposed, as `model/cpu/sums.py` adds them up. Linear layers and norms are the model's own.

A group may take the place of a finished one: groups then have different numbers of own tokens.
A recorder, if there is one, takes down steps on the device and replays them (`cuda_graphs.py`).

Shapes: b groups of g rows, R = b·g rows, H heads of width d, P prompt tokens, K places for own tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from grpo.model.cpu.sums import Bags, bags, weighted_sums
from grpo.model.prefill import encode_prompts, pad_prompts
from grpo.rollout.cache import CacheBytes, rows_of_groups
from grpo.rollout.cuda_graphs import RecordedSteps, Recorder

_BLOCK = 48
"""Own tokens are attended to in multiples of this: a step is recorded for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has for so many tokens."""
    return -(-tokens // _BLOCK) * _BLOCK


class _EncodedPrompts(NamedTuple):
    keys: list[Tensor]  # of each layer (b, H, d, P)
    values: list[Tensor]  # of each layer (b, H, P, d)
    bias: Tensor  # (b, P), 0 where there is a token
    lengths: Tensor  # (b,)
    logits: Tensor  # (b, V) of each prompt's last token


class _Places(NamedTuple):
    """Where each row's newest token goes, (rows, place): the same place for all, or (R,) tensors."""

    rows: slice | Tensor
    place: int | Tensor
    length: int  # so many places are attended to
    bias: Tensor  # (R, 1, P + length), 0 where a row has a token
    prompt_keys: Bags | None
    prompt_values: Bags | None
    own_keys: Bags | None
    own_values: Bags | None


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
        self._own_keys = [new(rows, heads, head_width, places) for _ in self._blocks]  # transposed
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
        prompts = pad_prompts(prompt_ids, width=width).to(self._model.device)
        hidden, cache = encode_prompts(self._model, prompts)  # (b, D)
        bias = torch.zeros_like(prompts.mask, dtype=hidden.dtype).masked_fill_(~prompts.mask, -torch.inf)
        return _EncodedPrompts(
            keys=[layer.keys.mT.contiguous() for layer in cache.layers],
            values=[layer.values.contiguous() for layer in cache.layers],
            bias=bias,
            lengths=prompts.lengths,
            logits=self._model.lm_head(hidden),
        )

    def step(self, tokens: Tensor) -> Tensor:
        last = self._own_values[0].shape[2] - 1  # a row that has ended overwrites its last
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
        own, length, g = self._own, num_blocks * _BLOCK, self._rows_per_prompt
        prompt_keys = self._prompt_keys[0]  # those of all layers are alike
        beyond = torch.arange(length, device=own.device) >= own.unsqueeze(1)  # (R, length)
        own_bias = torch.zeros_like(beyond, dtype=dtype).masked_fill_(beyond, -torch.inf)
        prompt_bias = self._prompt_bias.repeat_interleave(g, 0)
        return _Places(
            rows=torch.arange(len(own), device=own.device) if place is None else slice(None),
            place=own - 1 if place is None else place,
            length=length,
            bias=torch.cat([prompt_bias, own_bias], 1).unsqueeze(1),
            prompt_keys=bags(prompt_keys, prompt_keys.shape[2], g=g),
            prompt_values=bags(self._prompt_values[0], prompt_keys.shape[3], g=g),
            own_keys=bags(self._own_keys[0], prompt_keys.shape[2]),
            own_values=bags(self._own_values[0], length),
        )

    def _attend(self, layer: int, attention: GPT2Attention, x: Tensor, places: _Places) -> Tensor:
        """Attention of each row's newest token, (R, D) to (R, D)."""
        b, g, heads = len(self._num_own), self._rows_per_prompt, self._model.config.n_head
        query, key, value = attention.c_attn(x).view(b * g, 3, heads, -1).unbind(1)  # (R, H, d)
        own_keys, own_values = self._own_keys[layer], self._own_values[layer]
        own_keys[places.rows, :, :, places.place] = key
        own_values[places.rows, :, places.place] = value

        of_prompt = weighted_sums(query, self._prompt_keys[layer], places.prompt_keys)  # (R, H, P)
        of_own = weighted_sums(query, own_keys, places.own_keys, width=places.length)  # (R, H, length)
        scores = torch.cat([of_prompt, of_own], -1)
        weights = torch.add(places.bias, scores, alpha=self._scales[layer]).softmax(-1)
        of_prompt, of_own = weights.split([of_prompt.shape[-1], places.length], -1)
        from_prompt = weighted_sums(of_prompt, self._prompt_values[layer], places.prompt_values)  # (R, H, d)
        from_own = weighted_sums(of_own, own_values, places.own_values)  # (R, H, d)
        return (from_prompt + from_own).flatten(1)

    def keep(self, groups: Sequence[int]) -> None:
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        places = torch.tensor(groups, device=rows.device)
        for layer in range(len(self._blocks)):  # one by one: never two copies of the whole cache
            self._prompt_keys[layer] = self._prompt_keys[layer].index_select(0, places)
            self._prompt_values[layer] = self._prompt_values[layer].index_select(0, places)
            self._own_keys[layer] = self._own_keys[layer].index_select(0, rows)
            self._own_values[layer] = self._own_values[layer].index_select(0, rows)
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
        places = len(self._num_own) * self._own_values[0].shape[2]
        return CacheBytes(held=prompt + own, used=prompt + own * sum(self._num_own) // places)
