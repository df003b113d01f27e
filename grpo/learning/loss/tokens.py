"""The tokens that a step learns from, without padding, and what each of them weighs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo.config.groups import LossType


@dataclass(frozen=True)
class StepCounts:
    """What the losses are divided by: counts of the whole step, summed over processes."""

    rows: int
    """Completions in the step, those without a token in the mask included."""
    tokens: int
    """Completion tokens in the mask."""
    max_length: int
    """The longest a completion may be (a setting, not what was seen)."""


def loss_counts(mask: Tensor, max_length: int) -> StepCounts:
    """The counts of a step whose completion mask is (N, C), before it is split."""
    return StepCounts(rows=mask.shape[0], tokens=int(mask.bool().sum()), max_length=max_length)


def token_weights(row_tokens: Tensor, counts: StepCounts, loss_type: LossType) -> Tensor:
    """What a token of each row weighs in the step's loss, (R,) in float64; they are fixed before any pass.

    row_tokens: (R,) tokens of the rows that are learned from.
    """
    if loss_type == "grpo":  # each row's mean
        return 1 / (row_tokens.clamp(min=1).double() * max(counts.rows, 1))
    total = counts.rows * counts.max_length if loss_type == "dr_grpo" else counts.tokens
    return torch.full_like(row_tokens, 1 / max(total, 1), dtype=torch.float64)


@dataclass(frozen=True)
class Tokens:
    """The tokens of `num_rows` rows that are learned from, row by row: (K,) each, nothing is padded."""

    num_rows: int
    row: Tensor
    """Which of the rows it belongs to, from 0 on."""
    weight: Tensor
    """Its weight in the step's loss, which is sum(weight * loss of the token)."""
    advantage: Tensor
    sampler_logp: Tensor
    """As the sampler saw it, for what `importance_cap` corrects for."""
    old_logp: Tensor | None = None
    """By the policy that is corrected for; None: the policy as it is (one update a rollout)."""
    ref_logp: Tensor | None = None
    """By the reference model, where there is one."""

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if torch.is_tensor(value)}

    def part(self, which: slice) -> "Tokens":
        """Some of the K tokens."""
        return self.with_tensors({name: value[which] for name, value in self.tensors().items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Tokens":
        """With others in place of its `tensors`."""
        return replace(self, **tensors)  # type: ignore[arg-type]  # none of them is the number of rows
