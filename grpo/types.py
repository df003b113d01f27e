"""What flows through a step, and the letters its shapes are written in.

B prompts a step, G completions a prompt, N = B * G rows; R rows of a stream; P prompt tokens,
C completion tokens; V vocabulary, D hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.prompt import TASKS, Prompt

__all__ = ["TASKS", "Prompt", "Rollout", "Step"]


@dataclass(frozen=True)
class Rollout:
    """A step's completions: B prompts, G rows each, N = B * G rows group by group.

    Frozen before the first backward pass: whatever is retried later, these stay.
    """

    prompts: list[Prompt]  # B
    prompt_ids: list[list[int]]  # tokens of each of the B prompts
    completion_ids: Tensor  # (N, C) on the CPU, padded on the right; C is the longest row's length
    lengths: Tensor  # (N,) tokens a row, the end-of-text token included
    terminated: Tensor  # (N,) bool: ended by itself; its opposite is truncated, cut at max_new_tokens
    sampler_logp: Tensor  # (N, C) log-probs as the sampler saw them; 0 on the padding
    completions: list[str]  # N texts, special tokens left out

    @property
    def group_size(self) -> int:
        return len(self.lengths) // len(self.prompts)

    @property
    def mask(self) -> Tensor:
        """(N, C) bool, True on a row's own tokens. From lengths: pad and end-of-text share an id."""
        return torch.arange(self.completion_ids.shape[1]) < self.lengths.unsqueeze(1)

    @property
    def row_prompts(self) -> list[Prompt]:
        """N prompts, each repeated for its rows."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    def groups(self, which: Sequence[int]) -> "Rollout":
        """Some of the B groups, by their numbers; perhaps none. Completions keep their width C."""
        rows = [group * self.group_size + row for group in which for row in range(self.group_size)]
        return Rollout(
            prompts=[self.prompts[group] for group in which],
            prompt_ids=[self.prompt_ids[group] for group in which],
            completion_ids=self.completion_ids[rows],
            lengths=self.lengths[rows],
            terminated=self.terminated[rows],
            sampler_logp=self.sampler_logp[rows],
            completions=[self.completions[row] for row in rows],
        )

    @staticmethod
    def join(parts: Sequence["Rollout"]) -> "Rollout":
        """One after the other, as wide as the widest."""
        width = max(part.completion_ids.shape[1] for part in parts)

        def wide(tensors: list[Tensor]) -> Tensor:
            return torch.cat([F.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])

        return Rollout(
            prompts=[prompt for part in parts for prompt in part.prompts],
            prompt_ids=[ids for part in parts for ids in part.prompt_ids],
            completion_ids=wide([part.completion_ids for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            terminated=torch.cat([part.terminated for part in parts]),
            sampler_logp=wide([part.sampler_logp for part in parts]),
            completions=[text for part in parts for text in part.completions],
        )

    def replace_groups(self, groups: Sequence[int], others: "Rollout") -> "Rollout":
        """With `groups` (indices among the B) taken from `others`, in order."""
        order = list(range(len(self.prompts)))
        for place, group in enumerate(groups, start=len(order)):
            order[group] = place
        return Rollout.join([self, others]).groups(order)


@dataclass(frozen=True)
class Step:
    """What one step of a run came to."""

    number: int
    metrics: dict[str, float]  # by TRL's names
    rollout: Rollout
    rewards: Tensor  # (N,)
    advantages: Tensor  # (N,)

    @property
    def completions(self) -> list[str]:
        """N texts, group by group."""
        return self.rollout.completions
