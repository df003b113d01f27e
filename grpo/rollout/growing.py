"""Decoding over the caches of transformers, which grow, for models that hand theirs to nobody."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from grpo.errors import UserError
from grpo.model.prefill import encode_prompts, pad_prompts
from grpo.rollout.arena import Arena


@dataclass
class _Part:
    """Rows that decode in one pass."""

    cache: Any
    """The model's cache of its texts: prompts at first, then rows."""
    places: list[int]
    """The places of its prompts in the arena at first, then the slots of its rows."""
    mask: Tensor | None = None
    """The mask of its texts' tokens, from the first to the newest; None: there are tokens everywhere."""

    def select(self, rows: Sequence[int], device: torch.device) -> None:
        """Keeps these of its texts, or copies of them, in this order."""
        index = torch.tensor(rows, device=device)
        self.cache = _selected(self.cache, index)
        if self.mask is not None:
            self.mask = self.mask[index]


class DynamicCacheArena(Arena):
    """Rows start together, each with a copy of what its prompt left in the cache. Prompts are padded."""

    supports_refill = False
    _parts: Sequence[_Part] = ()

    @property
    def prompts_at_once(self) -> int:
        return self.room.prompts  # a cache is one pass

    def _encode(self, places: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        self._parts = []  # before there are others
        prompts = pad_prompts(prompt_ids).to(self.model.device).padded_for(self.model)
        hidden, cache = encode_prompts(self.model, prompts)  # (b, D)
        self._parts = [_Part(cache, [*places], prompts.mask.long())]
        return hidden, prompts.lengths

    def begin(self, rows: Mapping[int, int], uniforms: Tensor) -> None:
        super().begin(rows, uniforms)
        places = [self._place_of[group] for group in rows.values()]
        for part in self._parts:
            slots = [slot for slot, place in enumerate(places) if place in part.places]
            part.select([part.places.index(places[slot]) for slot in slots] or [0], self.model.device)
            part.places = slots

    def _keep(self, going_on: list[int]) -> list[int]:
        order = super()._keep(going_on)
        for part in self._parts:
            number_of = {slot: number for number, slot in enumerate(part.places)}
            kept = {slot: number_of[before] for slot, before in enumerate(order) if before in number_of}
            if [*kept.values()] != [*number_of.values()]:
                part.select([*kept.values()] or [0], self.model.device)
            part.places = [*kept]
        return order

    def _decode(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        states = None
        # Where no row is left, one pass goes on: others of a sharded model may have some.
        for part in [part for part in self._parts if part.places] or self._parts[:1]:
            slots = torch.tensor(part.places or [0], device=ids.device)
            hidden = self._advance_part(part, ids[slots], positions[slots])
            if states is None:
                states = hidden.new_zeros(len(ids), hidden.shape[1])
            states[slots] = hidden
        assert states is not None
        return states

    def _advance_part(self, part: _Part, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the states (r, D) of its rows' newest tokens."""
        assert part.mask is not None
        part.mask = torch.cat([part.mask, part.mask.new_ones(len(ids), 1)], 1)
        output = self.model.base_model(
            input_ids=ids,
            attention_mask=part.mask,
            position_ids=positions,
            past_key_values=part.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state[:, -1]
        return hidden

    def skip(self, num_tokens: int) -> None:
        super().skip(num_tokens)
        for part in self._parts:
            for layer in getattr(part.cache, "layers", ()):
                keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
                if isinstance(keys, Tensor) and isinstance(values, Tensor):
                    layer.update(
                        *(  # which is as good as nothing
                            kept.new_zeros(1).expand(*kept.shape[:2], num_tokens, kept.shape[3])
                            for kept in (keys, values)
                        )
                    )
            if part.mask is not None:
                part.mask = torch.cat([part.mask, part.mask.new_ones(len(part.mask), num_tokens)], 1)

    @property
    def cache_bytes(self) -> int:
        num_bytes = [
            sum(tensor.nbytes for tensor in _tensors(layer))
            for part in self._parts
            for layer in getattr(part.cache, "layers", [part.cache])
        ]
        return sum(num_bytes) + max(num_bytes, default=0)  # the largest is there twice while a token is added

    used_bytes = cache_bytes


class ArenaByLength(DynamicCacheArena):
    """The same without any padding, which recurrent layers would remember: prompts of one length together."""

    def _encode(self, places: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        self._parts = []  # before there are others
        parts, lengths, device = list[_Part](), [len(ids) for ids in prompt_ids], self.model.device
        states = None
        for length in sorted(set(lengths)):
            numbers = [number for number, ids in enumerate(prompt_ids) if len(ids) == length]
            hidden, cache = self._run(torch.tensor([prompt_ids[n] for n in numbers], device=device))
            if states is None:
                states = hidden.new_zeros(len(prompt_ids), hidden.shape[1])
            states[torch.tensor(numbers, device=device)] = hidden
            parts.append(_Part(cache, [places[number] for number in numbers]))
        assert states is not None
        self._parts = parts
        return states, torch.tensor(lengths, device=device)

    def _advance_part(self, part: _Part, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, part.cache = self._run(ids, part.cache)
        return hidden

    def _run(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Returns the states (r, D) of the last of `ids` (r, n), and what the model remembers then."""
        options = {} if cache is None else {self._cache_name: cache}
        output = self.model.base_model(input_ids=ids, use_cache=True, **options)
        cache = getattr(output, self._cache_name, None)
        if cache is None:
            raise UserError("it keeps its cache to itself.")
        return output.last_hidden_state[:, -1], cache

    @cached_property
    def _cache_name(self) -> str:
        """Returns the model's name for its cache, among its arguments and in its output."""
        known = signature(self.model.base_model.forward).parameters
        return next((name for name in ("past_key_values", "cache_params", "state") if name in known), "none")


class ArenaByRow(ArenaByLength):
    """The same, and each row decodes by itself: RWKV's pass over a token of several texts mixes them."""

    def begin(self, rows: Mapping[int, int], uniforms: Tensor) -> None:
        super().begin(rows, uniforms)
        alone = list[_Part]()
        for part in self._parts:
            for number, slot in enumerate(part.places):
                alone.append(_Part(copy.deepcopy(part.cache), [slot]))
                alone[-1].select([number], self.model.device)
        self._parts = alone


class ArenaWithoutCache(ArenaByLength):
    """Computes whole texts again for each token, where decoding over a cache is not what a whole text says.

    Nemotron-H's layers limit their time steps in a pass over a text, and not in one over a token.
    """

    def _run(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        texts = ids if cache is None else torch.cat([cache, ids], 1)
        return self.model.base_model(input_ids=texts, use_cache=False).last_hidden_state[:, -1], texts

    def skip(self, num_tokens: int) -> None:
        super().skip(num_tokens)
        for part in self._parts:
            part.cache = torch.cat([part.cache, part.cache.new_zeros(len(part.cache), num_tokens)], 1)


def _tensors(kept: Any) -> Iterator[Tensor]:
    """Goes through all tensors of a cache, or of a part of it."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, dict):
        for value in kept.values():
            yield from _tensors(value)
    elif isinstance(kept, list | tuple):
        for value in kept:
            yield from _tensors(value)
    elif type(kept).__module__.startswith("transformers."):
        yield from _tensors({name: value for name, value in vars(kept).items() if name != "config"})


def _selected(kept: Any, rows: Tensor) -> Any:
    """Returns a cache that has these texts of `kept`, in this order; it may be the same object."""
    if isinstance(kept, Cache):
        kept.reorder_cache(rows)
        return kept
    if isinstance(kept, Tensor):
        return kept.index_select(0, rows)
    if isinstance(kept, dict):
        return {name: _selected(value, rows) for name, value in kept.items()}
    if isinstance(kept, list | tuple):
        return type(kept)(_selected(value, rows) for value in kept)
    if type(kept).__module__.startswith("transformers."):
        for name, value in vars(kept).items():
            if name != "config":
                setattr(kept, name, _selected(value, rows))
    return kept
