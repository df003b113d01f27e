"""A process's share of a step's groups, and the idle ones it is accompanied by where all do equally many."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.types import Prompt, Rollout


@dataclass(frozen=True)
class Share:
    """Neighbouring groups of a step, and `idle` more.

    The processes of a sharded model make the same passes. Where one has fewer groups than another it
    repeats some, of which nothing is kept: their rows have no tokens and no advantage.
    """

    groups: range
    group_size: int
    idle: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.groups) or self.idle > 0

    @property
    def num_rows(self) -> int:
        """Those that count."""
        return len(self.groups) * self.group_size

    def prompts(self, of: list[Prompt]) -> list[Prompt]:
        """This process's of the step's prompts, without idle ones."""
        return of[self.groups.start : self.groups.stop]

    def rollout(self, of: Rollout) -> Rollout:
        """This process's part of the step's rollout, and idle groups behind it."""
        ours = of.groups(self.groups)
        if not self.idle:
            return ours
        repeated = of.groups(range(self.idle))
        return Rollout.join([ours, replace(repeated, lengths=torch.zeros_like(repeated.lengths))])

    def rows(self, of: Tensor) -> Tensor:
        """This process's rows of a tensor (N, …), and zeros for the idle ones."""
        rows = of[self.groups.start * self.group_size : self.groups.stop * self.group_size]
        return F.pad(rows, (0, 0) * (of.ndim - 1) + (0, self.idle * self.group_size))
