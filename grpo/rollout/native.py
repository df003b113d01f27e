"""Any model of plain attention, one token at a time: a static cache, and one copy of a prompt's keys for
its whole group.

The model's own forward pass runs, and with it all of its modules; what is ours is the cache that it hands
keys and values to, and the attention that it calls (`static_cache.py`).

A group may take the place of a finished one: groups then have different numbers of own tokens. As groups
leave, the others move to the first places, and tensors stay where they are: what is recorded of so many
places (`slots.py`) stays of use.

Shapes: b groups of g rows, R = b·g rows, H heads that share H' of keys and values, of width d, P prompt
tokens, K places for own tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from grpo.model.load import context_length
from grpo.model.prefill import encode_prompts, layers_with_window, pad_prompts, sliding_window
from grpo.rollout.cache import CacheBytes, move_to_front, rows_of_groups
from grpo.rollout.static_cache import BLOCK, Places, StaticLayer, decoding, make_bias, static_cache_length


class _EncodedPrompts(NamedTuple):
    layers: list[StaticLayer]
    bias: Tensor  # (b, P), 0 where there is a token
    lengths: Tensor  # (b,)
    logits: Tensor  # (b, V) of each prompt's last token


class NativeDecoder:
    def __init__(self, model: PreTrainedModel, max_new_tokens: int, *, recorded: bool = False) -> None:
        """recorded: a step does not depend on where tokens go, and tensors stay where they are."""
        self._model, self._head = model, model.get_output_embeddings()
        self._config = model.config.get_text_config(decoder=True)
        self._last_position = context_length(model.config) - 1
        self._window = sliding_window(model.config)
        self._is_recorded = recorded
        self._max_new_tokens = max_new_tokens
        self._layers: list[StaticLayer] = []
        """Empty until there are places."""

    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        """longest_prompt: tokens of the longest that may take another's place later."""
        if self._layers:  # from a batch before
            self._use_first(len(prompt_ids))
            return self.replace(range(len(prompt_ids)), prompt_ids)
        prompts = self._encode(prompt_ids, max(longest_prompt, *map(len, prompt_ids)))
        self._layers, self._cache = prompts.layers, Cache(prompts.layers)
        self._rows_per_prompt = rows_per_prompt
        rows = len(prompt_ids) * rows_per_prompt
        for layer in self._layers:
            layer.make_room(rows, static_cache_length(self._max_new_tokens))
        positions = prompts.lengths.repeat_interleave(rows_per_prompt)  # (R,)
        own = torch.zeros_like(positions)  # (R,) own tokens, for the device
        self._room = prompts.bias, positions, own
        self._num_own: list[int] = []  # own tokens of each group's rows
        self._use_first(len(prompt_ids))
        return prompts.logits.repeat_interleave(rows_per_prompt, 0)

    def replace(self, groups: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        prompts = self._encode(prompt_ids, self._prompt_bias.shape[-1])
        places = torch.tensor(groups, device=rows.device)
        for mine, new in zip(self._layers, prompts.layers, strict=True):
            mine.prompt_keys[places] = new.prompt_keys
            mine.prompt_values[places] = new.prompt_values
            for own in (mine.own_keys, mine.own_values):
                own.index_fill_(0, rows, 0.0)  # a NaN would outlive its bias
        self._prompt_bias[places] = prompts.bias
        self._positions[rows] = prompts.lengths.repeat_interleave(self._rows_per_prompt)
        self._own[rows] = 0
        for group in groups:
            self._num_own[group] = 0
        return prompts.logits.repeat_interleave(self._rows_per_prompt, 0)

    def _encode(self, prompt_ids: Sequence[Sequence[int]], width: int) -> _EncodedPrompts:
        prompts = pad_prompts(prompt_ids, width=width).to(self._model.device).padded_for(self._model)
        layers = [StaticLayer(is_sliding) for is_sliding in layers_with_window(self._model.config)]
        hidden, _ = encode_prompts(self._model, prompts, Cache(layers))  # (b, D)
        return _EncodedPrompts(
            layers=layers,
            bias=torch.zeros_like(prompts.mask, dtype=hidden.dtype).masked_fill_(~prompts.mask, -torch.inf),
            lengths=prompts.lengths,
            logits=self._head(hidden),
        )

    def next_step(self) -> tuple[int, Callable[[Tensor], Tensor]]:
        """The next token's step, from tokens (R,) to logits (R, V), and what makes it alike to others."""
        last = self._layers[0].own_values.shape[2] - 1  # a row that has ended overwrites its last
        at = [min(count, last) for count in self._num_own]
        self._num_own = [place + 1 for place in at]
        num_blocks = max(at) // BLOCK + 1
        if self._is_recorded:  # for few lengths: by powers of two
            num_blocks = min(2 ** (num_blocks - 1).bit_length(), (last + 1) // BLOCK)
        place = at[0] if min(at) == max(at) and not self._is_recorded else None

        def step(tokens: Tensor) -> Tensor:
            self._own.add_(1).clamp_(max=last + 1)
            logits = self._logits(tokens, num_blocks, place)
            # A row that has ended runs on until its group has, perhaps beyond the context.
            self._positions.add_(1).clamp_(max=self._last_position)
            return logits

        return num_blocks, step

    @property
    def counters(self) -> Sequence[Tensor]:
        """What steps change beside the cache."""
        return self._own, self._positions

    def _logits(self, tokens: Tensor, num_blocks: int, place: int | None) -> Tensor:
        """What follows each row's newest token, (R, V). place: where all rows' tokens go, if one is known."""
        places = self._places(num_blocks, place)
        with decoding(self._config, self._layers, places):
            hidden = self._model.base_model(
                input_ids=tokens.unsqueeze(1),
                # Handed through as it is; without any, some models look for padding, and wait for the device.
                attention_mask=places.bias.whole.unsqueeze(1),
                position_ids=self._positions.unsqueeze(1),
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state  # (R, 1, D)
        return self._head(hidden.squeeze(1))

    def _places(self, num_blocks: int, place: int | None) -> Places:
        own, length, g = self._own, num_blocks * BLOCK, self._rows_per_prompt
        layer = self._layers[0]  # those of all layers are alike
        beyond = torch.arange(length, device=own.device) >= own.unsqueeze(1)  # (R, length)
        own_bias = torch.zeros_like(beyond, dtype=layer.own_keys.dtype).masked_fill_(beyond, -torch.inf)
        bias = torch.cat([self._prompt_bias.repeat_interleave(g, 0), own_bias], 1)
        shape = {
            "prompts": len(self._num_own), "length": length,
            "sharing": self._config.num_attention_heads // layer.own_keys.shape[1],
        }  # fmt: skip
        window_bias = whole = make_bias(bias, **shape)
        if self._window is not None:
            window_bias = make_bias(self._within_window(bias, self._window), **shape)
        return Places(
            rows=torch.arange(len(own), device=own.device) if place is None else slice(None),
            place=own - 1 if place is None else place,
            length=length,
            bias=whole,
            window_bias=window_bias,
        )

    def _within_window(self, bias: Tensor, window: int) -> Tensor:
        """bias (R, P + length) for layers with a window: prompts end where own tokens begin."""
        first = self._prompt_bias.shape[1] + self._own - window  # (R,) that is seen
        return bias.masked_fill(
            torch.arange(bias.shape[1], device=bias.device) < first.unsqueeze(1), -torch.inf
        )

    def keep(self, groups: Sequence[int], places: int) -> None:
        """Go on with some groups, in the first of so many places; the rest of these are over."""
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        chosen = torch.tensor(groups, device=rows.device)
        for layer in self._layers:
            layer.move_to_front(chosen, rows)
        move_to_front(self._room[:1], chosen)
        move_to_front(self._room[1:], rows)
        self._num_own = [self._num_own[group] for group in groups]
        self._use_first(places)

    def _use_first(self, places: int) -> None:
        """From here on so many groups decode. Tensors stay where they are, whatever is recorded of them."""
        rows = places * self._rows_per_prompt
        for layer in self._layers:
            layer.use_first(places, rows)
        bias, positions, own = self._room
        self._prompt_bias, self._positions, self._own = bias[:places], positions[:rows], own[:rows]
        self._num_own += [0] * (places - len(self._num_own))

    def skip(self, num_tokens: int) -> None:
        """Stand where that many more tokens lead, whatever they are: for tracing memory."""
        self._num_own = [count + num_tokens for count in self._num_own]
        self._positions.add_(num_tokens)
        self._own.add_(num_tokens)

    @property
    def cache_bytes(self) -> CacheBytes:
        held = sum(layer.room_bytes for layer in self._layers)
        prompt = sum(layer.prompt_keys.nbytes + layer.prompt_values.nbytes for layer in self._layers)
        own = sum(layer.own_keys.nbytes + layer.own_values.nbytes for layer in self._layers)
        places = len(self._num_own) * self._layers[0].own_values.shape[2]
        return CacheBytes(held=held, used=prompt + own * sum(self._num_own) // places)
