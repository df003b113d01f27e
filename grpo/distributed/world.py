"""The interface between a run and its processes, for a single one."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ProcessLost(RuntimeError):
    """Another process failed, died, or did not come."""

    def __init__(self, text: str, *, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


def largest_share(count: int, processes: int) -> int:
    """Returns how many of so many groups the process has that has most."""
    return -(-count // processes)


class World:
    """One process, which has nobody to wait for."""

    rank = 0
    size = 1
    ranks_on_device = 1
    """Processes on this process's device, itself included."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's folder and log."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> range:
        """Returns the groups of a process, of so many: neighbours, as even as can be, perhaps none.

        rank: None: of this process.
        """
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def exchange(self, stage: str, value: T) -> list[T]:
        """Returns the value of every process, in the order of ranks. ProcessLost if one does not come.

        stage: how far they have come, named in the error; to come there says that all went well. value: what
        JSON can say, and tensors on the CPU; another process's tuples come as lists.
        """
        return [value]

    def from_main(self, stage: str, value: T) -> T:
        """Returns the first process's value."""
        return self.exchange(stage, value)[0]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Make every `.grad` the sum over the processes; one that is missing here counts as zeros."""

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these tensors with the first process's."""

    def take_traffic(self) -> dict[str, float]:
        """Bytes this process has given to exchanges and to sums of gradients since they were last taken."""
        return {}


def sum_of_bits(numbers: Tensor) -> int:
    """Returns the sum of the numbers' bits, taken as integers: equal where devices hold the same numbers.

    It is the same in whatever order a device adds them.
    """
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()]
    return int(numbers.detach().view(as_integers).sum(dtype=torch.int64).item())
