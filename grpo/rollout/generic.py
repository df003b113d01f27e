"""Decoding for any Hugging Face causal model, over its own growing cache.

The prompt is computed once a group and its keys and values are then copied to each row. Left out, as
`native.py` has them: a static cache, a group that takes another's place, a prompt's keys held once.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.model.prefill import encode_prompts, pad_prompts
from grpo.rollout.cache import CacheBytes, rows_of_groups


class GenericDecoder:
    """Has what `NativeDecoder` has, for models that hand their cache to nobody."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head = model.get_output_embeddings()

    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        prompts = pad_prompts(prompt_ids).to(self._model.device).padded_for(self._model)
        hidden, self._cache = encode_prompts(self._model, prompts)  # (b, D)
        self._cache.batch_repeat_interleave(rows_per_prompt)
        self._rows_per_prompt = rows_per_prompt
        self._mask = prompts.mask.long().repeat_interleave(rows_per_prompt, 0)  # (R, P + t)
        self._positions = prompts.lengths.repeat_interleave(rows_per_prompt)  # (R,)
        return self._head(hidden).repeat_interleave(rows_per_prompt, 0)

    counters: Sequence[Tensor] = ()

    def next_step(self) -> tuple[Hashable, Callable[[Tensor], Tensor]]:
        return None, self._step

    def _step(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        hidden = self._model.base_model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self._mask,
            position_ids=self._positions.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (R, D)
        self._positions = self._positions + 1
        return self._head(hidden)

    def keep(self, groups: Sequence[int], places: int) -> None:
        rows = rows_of_groups(groups, self._rows_per_prompt, self._positions.device)
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]

    def replace(self, groups: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        raise NotImplementedError("a growing cache holds rows that have started together")

    def skip(self, num_tokens: int) -> None:
        for index, layer in enumerate(self._cache.layers):
            rows, heads, _, width = layer.keys.shape
            tokens = layer.keys.new_zeros(1).expand(rows, heads, num_tokens, width)  # as good as nothing
            self._cache.update(tokens, tokens, index)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), num_tokens)], 1)
        self._positions = self._positions + num_tokens

    @property
    def cache_bytes(self) -> CacheBytes:
        layers = [layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers]
        return CacheBytes(held=sum(layers), used=sum(layers), growing=max(layers))
