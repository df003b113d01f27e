"""Flags that several of the workbench's commands have, each with its one line of help."""

from typing import Annotated, Literal

import tyro

from grpo.config.groups import CheckpointingSetting

Objective = Literal["grpo", "lm"]
"""What is trained for: GRPO, or plain language modelling."""

MaxBatchSize = Annotated[int, tyro.conf.arg(help="What is not exceeded.")]
GroupSize = Annotated[int, tyro.conf.arg(help="Completions of a prompt; GRPO's batches are multiples of it.")]
HasReference = Annotated[bool, tyro.conf.arg(help="A reference model beside the policy (grpo).")]
LoraRank = Annotated[
    int, tyro.conf.arg(help="Train adapters of this rank, with peft's targets; 0: all weights.")
]
GradientCheckpointing = Annotated[
    CheckpointingSetting,
    tyro.conf.arg(
        help="Recomputed in the backward pass: nothing (none, auto), all but products (selective), or all."
    ),
]
