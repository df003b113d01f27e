"""GPT-2, one token at a time: a static cache, and one copy of a prompt's keys for its whole group.

Attention runs over two parts, the group's prompt and the row's own tokens, with one softmax over both; keys
are held transposed, as `model/cpu/sums.py` adds them up. Linear layers and norms are the model's own.

A group may take the place of a finished one: groups then have different numbers of own tokens.
Where steps are recorded and replayed (`slots.py`), tensors stay where they are.

Shapes: b groups of g rows, R = b·g rows, H heads of width d, P prompt tokens, K places for own tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from grpo.model.cpu.sums import Bags, bags, weighted_sums
from grpo.model.prefill import encode_prompts, pad_prompts
from grpo.rollout.cache import CacheBytes, rows_of_groups

_BLOCK = 48
"""Own tokens are attended to in multiples of this: a step is recorded for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has for so many tokens."""
    return -(-tokens // _BLOCK) * _BLOCK


def _transposed(values: Tensor) -> Tensor:
    """(…, K, d) as (…, d, K): for the CPU's sums in that order, for products on CUDA as a view."""
    return values.contiguous().mT if values.device.type == "cuda" else values.mT.contiguous()


def _transposed_zeros(like: Tensor, rows: int, heads: int, places: int, width: int) -> Tensor:
    """(rows, heads, width, places), as `_transposed` has them."""
    if like.device.type == "cuda":
        return like.new_zeros(rows, heads, places, width).mT
    return like.new_zeros(rows, heads, width, places)


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
    def __init__(self, model: GPT2LMHeadModel, max_new_tokens: int, *, recorded: bool = False) -> None:
        """recorded: a step does not depend on where tokens go, and tensors stay where they are."""
        self._model = model
        self._is_recorded = recorded
        self._prompt_keys: list[Tensor] = []
        """None until there are places."""
        self._blocks = list(model.transformer.h)
        self._max_new_tokens = max_new_tokens
        config = model.config
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        by_layer = config.scale_attn_by_inverse_layer_idx
        self._scales = [scale / (layer + 1 if by_layer else 1) for layer in range(config.n_layer)]

    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        if self._prompt_keys:  # from a batch before
            return self.replace(range(len(prompt_ids)), prompt_ids)
        prompts = self._encode(prompt_ids, max(longest_prompt, *map(len, prompt_ids)))
        self._prompt_keys, self._prompt_values, self._prompt_bias = prompts.keys, prompts.values, prompts.bias
        self._make_places(len(prompt_ids), rows_per_prompt, prompts.logits)
        self._positions = prompts.lengths.repeat_interleave(rows_per_prompt)  # (R,)
        return prompts.logits.repeat_interleave(rows_per_prompt, 0)

    def _make_places(self, groups: int, rows_per_prompt: int, like: Tensor) -> None:
        """Room for own tokens, in the dtype and on the device of some tensor."""
        config, self._rows_per_prompt = self._model.config, rows_per_prompt
        heads, head_width = config.n_head, config.n_embd // config.n_head
        rows, places = groups * rows_per_prompt, static_cache_length(self._max_new_tokens)
        self._own_keys = [_transposed_zeros(like, rows, heads, places, head_width) for _ in self._blocks]
        self._own_values = [like.new_zeros(rows, heads, places, head_width) for _ in self._blocks]
        self._num_own = [0] * groups  # own tokens of each group's rows
        self._own = torch.zeros(rows, dtype=torch.long, device=like.device)  # (R,) the same, for the device

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
            keys=[_transposed(layer.keys) for layer in cache.layers],
            values=[layer.values.contiguous() for layer in cache.layers],
            bias=bias,
            lengths=prompts.lengths,
            logits=self._model.lm_head(hidden),
        )

    def next_step(self) -> tuple[int, Callable[[Tensor], Tensor]]:
        last = self._own_values[0].shape[2] - 1  # a row that has ended overwrites its last
        at = [min(count, last) for count in self._num_own]
        self._num_own = [place + 1 for place in at]
        num_blocks = max(at) // _BLOCK + 1
        place = at[0] if min(at) == max(at) and not self._is_recorded else None

        def step(tokens: Tensor) -> Tensor:
            self._own.add_(1).clamp_(max=last + 1)
            logits = self._logits(tokens, num_blocks, place)
            # A row that has ended runs on until its group has, perhaps beyond the context.
            self._positions.add_(1).clamp_(max=self._model.config.n_positions - 1)
            return logits

        return num_blocks, step

    @property
    def counters(self) -> Sequence[Tensor]:
        return self._own, self._positions

    def _logits(self, tokens: Tensor, num_blocks: int, place: int | None) -> Tensor:
        """What follows each row's newest token, (R, V). place: where all rows' tokens go, if one is known."""
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

    def take_over(self, other: "GPT2Decoder", groups: Sequence[int], places: int) -> None:
        """Go on with some groups of one that has more places, in the first of these."""
        width = self._rows_per_prompt = other._rows_per_prompt
        if not self._prompt_keys:

            def room(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
                return [torch.zeros_like(each[:count]) for each in tensors]

            self._prompt_keys = room(other._prompt_keys, places)
            self._prompt_values = room(other._prompt_values, places)
            (self._prompt_bias,) = room([other._prompt_bias], places)
            self._own_keys = room(other._own_keys, places * width)
            self._own_values = room(other._own_values, places * width)
            self._own, self._positions = room(other.counters, places * width)
        rows = rows_of_groups(groups, width, other._own.device)
        chosen = torch.tensor(groups, device=rows.device)
        for mine, theirs in zip(self._of_groups(), other._of_groups(), strict=True):
            mine[: len(groups)] = theirs[chosen]
        for mine, theirs in zip(self._of_rows(), other._of_rows(), strict=True):
            mine[: len(rows)] = theirs[rows]
        self._num_own = [*(other._num_own[group] for group in groups), *[0] * (places - len(groups))]

    def _of_groups(self) -> Iterator[Tensor]:
        yield from (*self._prompt_keys, *self._prompt_values, self._prompt_bias)

    def _of_rows(self) -> Iterator[Tensor]:
        yield from (*self._own_keys, *self._own_values, self._positions, self._own)

    def skip(self, num_tokens: int) -> None:
        self._num_own = [count + num_tokens for count in self._num_own]
        self._positions, self._own = self._positions + num_tokens, self._own + num_tokens

    @property
    def cache_bytes(self) -> CacheBytes:
        prompt = sum(part.nbytes for part in (*self._prompt_keys, *self._prompt_values))
        own = sum(part.nbytes for part in (*self._own_keys, *self._own_values))
        places = len(self._num_own) * self._own_values[0].shape[2]
        return CacheBytes(held=prompt + own, used=prompt + own * sum(self._num_own) // places)
