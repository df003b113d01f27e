"""Which tokens of a completion its advantage goes to: those of the fields that were judged.

Left out: credit to the tokens at which siblings part, by the mean of those that share the text so far
(2505.23564, 2601.03703). It was tried (docs/measurements.md, "What was tried").
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.config.groups import Scale
from grpo.data.reward_functions import Judged, RewardFunctions, Scores
from grpo.learning.advantages import part_advantages
from grpo.types import Rollout


@dataclass(frozen=True)
class FieldCredit:
    """A run's: by its reward functions and its tokenizer."""

    rewards: RewardFunctions
    tokenizer: PreTrainedTokenizerBase
    scale: Scale

    def __call__(self, advantages: Tensor, rewards: Tensor, rollout: Rollout, scores: Scores) -> Tensor:
        """A step's advantages (N,), which come from its `rewards` (N,), token by token (N, C)."""
        judged = self.rewards.judged(scores, rollout.completions)
        return field_credit(advantages, rewards, judged, rollout, self.tokenizer, scale=self.scale)


def field_credit(
    advantages: Tensor,
    rewards: Tensor,
    judged: Iterable[Judged],
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    *,
    scale: Scale,
) -> Tensor:
    """Each token's own advantage (N, C): a component's goes to the tokens of the field that it judges.

    advantages: (N,), of `group_advantages(rewards)`; what no component accounts for goes to all tokens, as it
    does where a text cannot be cut at its tokens. Process supervision (DeepSeekMath, 2402.03300, section
    4.1.3) gives a step's advantage to its tokens; here steps are fields. 0 on the padding.
    """
    ends = _token_ends(rollout, tokenizer)  # (N, C)
    starts = torch.cat([ends.new_zeros(len(ends), 1), ends[:, :-1]], dim=1)
    lengths = torch.tensor([len(text) for text in rollout.completions])  # (N,)
    unclear = ends[:, -1] != lengths
    rest = advantages.clone()
    credit = torch.zeros(ends.shape, dtype=advantages.dtype)
    fields = list(judged)
    values = torch.stack([each.values for each in fields]) if fields else rewards.new_empty(0, len(rewards))
    parts = part_advantages(values, rewards, rollout.group_size, scale=scale).to(advantages.dtype)
    for each, part in zip(fields, parts, strict=True):
        first, last = torch.tensor(each.letters).unsqueeze(2).unbind(1)  # (N, 1)
        whole = (first == 0) & (last == lengths.unsqueeze(1)) | unclear.unsqueeze(1)
        to_the_end = last == lengths.unsqueeze(1)  # and what ends the text, which has no letters
        inside = (ends > first) & ((starts < last) | to_the_end)
        given = inside & ~whole & rollout.mask
        takes = given.any(1)
        credit += part.unsqueeze(1) * given
        rest -= part * takes
    return (credit + rest.unsqueeze(1)) * rollout.mask


def _token_ends(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """How many letters of its completion have been written after each token: (N, C)."""
    known, places = rollout.completion_ids.unique(return_inverse=True)
    texts = tokenizer.batch_decode(known.unsqueeze(1).tolist(), skip_special_tokens=True)
    letters = torch.tensor([len(text) for text in texts])[places]
    return (letters * rollout.mask).cumsum(1)
