"""Decoding for models that hand their cache to nobody, over Hugging Face's own, which grows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.model.prefill import encode_prompts, pad_prompts
from grpo.rollout.arena import Arena


class GrowingArena(Arena):
    """Rows start together, each with a copy of its prompt's keys and values."""

    joins = False
    _cache: Any = None

    @property
    def prompts_at_once(self) -> int:
        return self.room.prompts  # a cache is one pass

    def _encode(self, places: Tensor, prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        self._cache = None  # before there is another
        prompts = pad_prompts(prompt_ids).to(self.model.device).padded_for(self.model)
        hidden, self._cache = encode_prompts(self.model, prompts)  # (b, D)
        self._mask = prompts.mask.long()  # (b, P), then (R, P + t)
        return hidden, prompts.lengths

    def begin(self, rows: Mapping[int, int], uniforms: Tensor) -> None:
        super().begin(rows, uniforms)
        self._select([self._place_of[group] for group in rows.values()])

    def _keep(self, going_on: list[int]) -> list[int]:
        order = super()._keep(going_on)
        self._select(order or [0])
        return order

    def _select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.model.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]

    def _decode(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(ids), 1)], 1)
        output = self.model.base_model(
            input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache,
            use_cache=True,
        )  # fmt: skip
        hidden: Tensor = output.last_hidden_state[:, -1]
        return hidden

    def skip(self, num_tokens: int) -> None:
        super().skip(num_tokens)
        for index, layer in enumerate(self._cache.layers):
            rows, heads, _, width = layer.keys.shape
            tokens = layer.keys.new_zeros(1).expand(rows, heads, num_tokens, width)  # as good as nothing
            self._cache.update(tokens, tokens, index)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), num_tokens)], 1)

    @property
    def cache_bytes(self) -> int:
        layers = [layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers]
        return sum(layers) + max(layers)  # the largest is there twice while a token is added

    used_bytes = cache_bytes
