"""A process's share of a step's groups, padded with others where all processes do equally many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Groups of a step, by their numbers, and `padding_groups` more.

    The processes of a sharded model make the same passes. Where one has fewer groups than another it repeats
    some, of which nothing is kept: their rows have no tokens and no advantage.
    """

    groups: Sequence[int]
    group_size: int
    padding_groups: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.groups) or self.padding_groups > 0

    @property
    def rows(self) -> Tensor:
        """Numbers of the rows that count, among the step's."""
        groups = torch.tensor(list(self.groups), dtype=torch.long).unsqueeze(1)
        return (groups * self.group_size + torch.arange(self.group_size)).flatten()

    def of_groups(self, values: Sequence[T]) -> list[T]:
        """Picks this process's from what the step has for each group."""
        return [values[group] for group in self.groups]
