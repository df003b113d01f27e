"""Any model of plain attention, one token at a time: a static cache, and one copy of a prompt's keys for
its whole group.

The model's own forward pass runs, and with it all of its modules; what is ours is the cache that it hands
keys and values to, and the attention that it calls. That runs over two parts, the group's prompt and the
row's own tokens, with one softmax over both; keys are held transposed, as `model/cpu/sums.py` adds them up.

A group may take the place of a finished one: groups then have different numbers of own tokens.
Where steps are recorded and replayed (`slots.py`), tensors stay where they are.

Shapes: b groups of g rows, R = b·g rows, H heads that share H' of keys and values, of width d, P prompt
tokens, K places for own tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo.model.cpu.attention import refuse_unknown
from grpo.model.cpu.head import head_logits
from grpo.model.cpu.sums import Bags, bags, weighted_sums
from grpo.model.load import context_length
from grpo.model.prefill import encode_prompts, pad_prompts, sliding_window
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


class _Places(NamedTuple):
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


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's cache: first given the prompts', then a token of each row at a time.

    The model's attention is handed the layer itself for a token's keys and values.
    """

    places: _Places
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

    def like(self, groups: int, rows: int) -> "_Layer":
        """An empty one of as many or fewer places."""
        layer = _Layer(self.is_sliding)
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
    key: _Layer,
    value: _Layer,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, a layer of the cache for keys and values: (R, H, 1, d) to (R, 1, H, d)."""
    refuse_unknown(others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.attend(query.squeeze(2), scale).unsqueeze(1), None


@contextmanager
def _decoding(config: PretrainedConfig) -> Iterator[None]:
    """Inside, the model's layers attend as they do here."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


class _EncodedPrompts(NamedTuple):
    layers: list[_Layer]
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
        self._layers: list[_Layer] = []
        """None until there are places."""
        AttentionInterface.register(_NAME, _attend)

    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        if self._layers:  # from a batch before
            return self.replace(range(len(prompt_ids)), prompt_ids)
        prompts = self._encode(prompt_ids, max(longest_prompt, *map(len, prompt_ids)))
        self._layers, self._prompt_bias = prompts.layers, prompts.bias
        self._cache = Cache(self._layers)
        self._rows_per_prompt = rows_per_prompt
        rows = len(prompt_ids) * rows_per_prompt
        for layer in self._layers:
            layer.make_room(rows, static_cache_length(self._max_new_tokens))
        self._num_own = [0] * len(prompt_ids)  # own tokens of each group's rows
        self._positions = prompts.lengths.repeat_interleave(rows_per_prompt)  # (R,)
        self._own = torch.zeros_like(self._positions)  # (R,) own tokens, for the device
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
        layers = [_Layer(layer.is_sliding) for layer in DynamicCache(config=self._model.config).layers]
        hidden, _ = encode_prompts(self._model, prompts, Cache(layers))  # (b, D)
        return _EncodedPrompts(
            layers=layers,
            bias=torch.zeros_like(prompts.mask, dtype=hidden.dtype).masked_fill_(~prompts.mask, -torch.inf),
            lengths=prompts.lengths,
            logits=head_logits(self._head, hidden),
        )

    def next_step(self) -> tuple[int, Callable[[Tensor], Tensor]]:
        last = self._layers[0].own_values.shape[2] - 1  # a row that has ended overwrites its last
        at = [min(count, last) for count in self._num_own]
        self._num_own = [place + 1 for place in at]
        num_blocks = max(at) // _BLOCK + 1
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
        return self._own, self._positions

    def _logits(self, tokens: Tensor, num_blocks: int, place: int | None) -> Tensor:
        """What follows each row's newest token, (R, V). place: where all rows' tokens go, if one is known."""
        places = self._places(num_blocks, place)
        for layer in self._layers:
            layer.places = places
        with _decoding(self._config):
            hidden = self._model.base_model(
                input_ids=tokens.unsqueeze(1),
                # Handed through as it is; without any, some models look for padding, and wait for the device.
                attention_mask=places.bias.unsqueeze(1),
                position_ids=self._positions.unsqueeze(1),
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state  # (R, 1, D)
        return head_logits(self._head, hidden.squeeze(1))

    def _places(self, num_blocks: int, place: int | None) -> _Places:
        own, length, g = self._own, num_blocks * _BLOCK, self._rows_per_prompt
        layer = self._layers[0]  # those of all layers are alike
        beyond = torch.arange(length, device=own.device) >= own.unsqueeze(1)  # (R, length)
        own_bias = torch.zeros_like(beyond, dtype=layer.own_keys.dtype).masked_fill_(beyond, -torch.inf)
        bias = torch.cat([self._prompt_bias.repeat_interleave(g, 0), own_bias], 1)
        h = self._config.num_attention_heads // layer.own_keys.shape[1]  # heads that share keys
        return _Places(
            rows=torch.arange(len(own), device=own.device) if place is None else slice(None),
            place=own - 1 if place is None else place,
            length=length,
            bias=bias.unsqueeze(1),
            window_bias=self._within_window(bias).unsqueeze(1),
            prompt_keys=bags(layer.prompt_keys, layer.prompt_keys.shape[2], g=g, h=h),
            prompt_values=bags(layer.prompt_values, layer.prompt_keys.shape[3], g=g, h=h),
            own_keys=bags(layer.own_keys, layer.own_keys.shape[2], h=h),
            own_values=bags(layer.own_values, length, h=h),
        )

    def _within_window(self, bias: Tensor) -> Tensor:
        """bias (R, P + length) for layers with a window: prompts end where own tokens begin."""
        if self._window is None:
            return bias
        first = self._prompt_bias.shape[1] + self._own - self._window  # (R,) that is seen
        return bias.masked_fill(
            torch.arange(bias.shape[1], device=bias.device) < first.unsqueeze(1), -torch.inf
        )

    def keep(self, groups: Sequence[int]) -> None:
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        places = torch.tensor(groups, device=rows.device)
        for layer in self._layers:  # one by one: never two copies of the whole cache
            layer.prompt_keys = layer.prompt_keys.index_select(0, places)
            layer.prompt_values = layer.prompt_values.index_select(0, places)
            layer.own_keys = layer.own_keys.index_select(0, rows)
            layer.own_values = layer.own_values.index_select(0, rows)
        self._prompt_bias = self._prompt_bias[places]
        self._positions, self._own = self._positions[rows], self._own[rows]
        self._num_own = [self._num_own[group] for group in groups]

    def take_over(self, other: "NativeDecoder", groups: Sequence[int], places: int) -> None:
        """Go on with some groups of one that has more places, in the first of these."""
        width = self._rows_per_prompt = other._rows_per_prompt
        if not self._layers:
            self._layers = [layer.like(places, places * width) for layer in other._layers]
            self._cache = Cache(self._layers)
            self._prompt_bias = torch.zeros_like(other._prompt_bias[:places])
            self._own, self._positions = (torch.zeros_like(each[: places * width]) for each in other.counters)
        rows = rows_of_groups(groups, width, other._own.device)
        chosen = torch.tensor(groups, device=rows.device)
        for mine, theirs in zip(self._of_groups(), other._of_groups(), strict=True):
            mine[: len(groups)] = theirs[chosen]
        for mine, theirs in zip(self._of_rows(), other._of_rows(), strict=True):
            mine[: len(rows)] = theirs[rows]
        self._num_own = [*(other._num_own[group] for group in groups), *[0] * (places - len(groups))]

    def _of_groups(self) -> Iterator[Tensor]:
        for layer in self._layers:
            yield from (layer.prompt_keys, layer.prompt_values)
        yield self._prompt_bias

    def _of_rows(self) -> Iterator[Tensor]:
        for layer in self._layers:
            yield from (layer.own_keys, layer.own_values)
        yield from self.counters

    def skip(self, num_tokens: int) -> None:
        self._num_own = [count + num_tokens for count in self._num_own]
        self._positions, self._own = self._positions + num_tokens, self._own + num_tokens

    @property
    def cache_bytes(self) -> CacheBytes:
        prompt = sum(layer.prompt_keys.nbytes + layer.prompt_values.nbytes for layer in self._layers)
        own = sum(layer.own_keys.nbytes + layer.own_values.nbytes for layer in self._layers)
        places = len(self._num_own) * self._layers[0].own_values.shape[2]
        return CacheBytes(held=prompt + own, used=prompt + own * sum(self._num_own) // places)
