"""Flags that the workbench's commands share, each with its default and its line of help once."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from grpo.config import SettingsError
from grpo.config.groups import CheckpointingSetting, Precision
from grpo.config.limits import COUNT, NOT_NEGATIVE, at_least, check_limits
from grpo.workbench.spec import ModelSpec

Objective = Literal["grpo", "lm"]
"""What is trained for: GRPO, or plain language modelling."""

GradientCheckpointing = Annotated[
    CheckpointingSetting,
    tyro.conf.arg(
        help="Recomputed in the backward pass: nothing (none, auto), all but products (selective), or all."
    ),
]


@dataclass(frozen=True)
class StepFlags:
    """A step, of whose rows it is asked how many fit."""

    model: ModelSpec = field(default_factory=ModelSpec)
    objective: Objective = "grpo"
    """grpo: sample, score and learn, all rows at once. lm: plain language modelling."""
    max_batch_size: Annotated[int, COUNT] = 1024
    """What is not exceeded."""
    group_size: Annotated[int, at_least(2)] = 8
    """Completions of a prompt; GRPO's batches are multiples of it."""
    prompt_tokens: Annotated[int, COUNT] = 60
    """Of the longest prompt (grpo)."""
    max_new_tokens: Annotated[int, COUNT] = 144
    """Of the longest completion (grpo)."""
    kl: bool = True
    """A reference model beside the policy (grpo)."""
    lora_rank: Annotated[int, NOT_NEGATIVE] = 0
    """Train adapters of this rank, with peft's targets; 0: all weights."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where the device has it natively, else fp32."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_batch_size < self.multiple:
            raise SettingsError(
                f"max_batch_size is {self.max_batch_size}, less than one group of {self.multiple}: give more."
            )

    @property
    def multiple(self) -> int:
        """What batches are multiples of."""
        return self.group_size if self.objective == "grpo" else 1
