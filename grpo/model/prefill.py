"""Prompts of unequal length as one tensor, and their keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from grpo.model.transfer import to_device


class PromptBatch(NamedTuple):
    """b prompts padded on the right to P tokens: causal attention never looks at what follows."""

    ids: Tensor  # (b, P)
    lengths: Tensor  # (b,)
    is_padded: bool = True
    """Whether any is shorter than P, as far as is known."""

    @property
    def mask(self) -> Tensor:
        """(b, P), True where a token is the prompt's."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths.unsqueeze(1)

    def to(self, device: torch.device) -> "PromptBatch":
        ids, lengths = to_device([self.ids, self.lengths], device)
        return PromptBatch(ids, lengths, self.is_padded)


def pad_prompts(prompt_ids: Sequence[Sequence[int]], *, width: int | None = None) -> PromptBatch:
    """Padded to the longest, or to `width`, with token 0; masks come from lengths, so any id would do."""
    lengths = [len(ids) for ids in prompt_ids]
    ids = torch.zeros(len(lengths), width or max(lengths), dtype=torch.long)
    for row, tokens in enumerate(prompt_ids):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return PromptBatch(ids, torch.tensor(lengths), min(lengths) < ids.shape[1])


def encode_prompts(
    model: PreTrainedModel, prompts: PromptBatch, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Hidden states (b, D) of each prompt's last token, and the cache of all layers (None: a new one).

    Positions are explicit. The mask is all ones on purpose: the padding lies to the right, where
    causal attention does not look, and without a padding mask the fast attention kernels serve.
    """
    output = model.base_model(
        input_ids=prompts.ids,
        attention_mask=torch.ones_like(prompts.ids),
        position_ids=torch.arange(prompts.ids.shape[1], device=prompts.ids.device).expand_as(prompts.ids),
        past_key_values=DynamicCache(config=model.config) if cache is None else cache,
        use_cache=True,
    )
    rows = torch.arange(len(prompts.lengths), device=prompts.ids.device)
    return output.last_hidden_state[rows, prompts.lengths - 1], output.past_key_values
