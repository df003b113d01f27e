"""Running out of memory on purpose, at a chosen allocation: for tests and for the recovery benchmark.

Left out: allocations inside a kernel (workspaces), which no dispatch mode sees, and those that are
not torch's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.memory import Fit

OUT_OF_MEMORY: tuple[Callable[[], Exception], ...] = (
    partial(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    partial(RuntimeError, "CUDA error: out of memory"),
    partial(RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    partial(RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    partial(RuntimeError, "MPS backend out of memory"),
    partial(RuntimeError, "std::bad_alloc"),
    MemoryError,
)
"""Some of the shapes it takes, made anew at each call."""


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Inside, attributes are others: how faults come in where nothing is handed on."""
    own = {name: vars(owner)[name] for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


def mispredict(fit: Fit, factor: float) -> None:
    """From here on what passes take is predicted that many times as high; rows are planned anew by that."""
    honest = fit.predict
    fit.predict = lambda phase, size: factor * honest(phase, size)  # type: ignore[method-assign]
    for phase in fit.planned():
        fit.reconsider(phase)


class FailAtAllocation(TorchDispatchMode):
    """Inside it, operations that allocate are counted from 1, and those at `numbers` fail.

    An operation allocates if by its schema it returns a tensor that is no view of its arguments; it
    fails before it runs. Those of a backward pass are seen too. A replay goes on counting: (n) is a
    fault that has passed when the work is repeated, (n, 2 * n) meets the replay at the same place.
    """

    def __init__(self, *numbers: int, error: Callable[[], Exception] = OUT_OF_MEMORY[0]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_allocations = 0
        self.fired: list[int] = []
        """The numbers at which it failed so far."""
        self._numbers = numbers
        self._error = error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _allocates(func):
            self.count()
        return func(*args, **(kwargs or {}))

    def count(self) -> None:
        """One more allocation, which may be the one that fails."""
        self.num_allocations += 1
        if self.num_allocations in self._numbers:
            self.fired.append(self.num_allocations)
            raise self._error()


def count_allocations(work: Callable[[], object]) -> int:
    """How many operations of `work` allocate: the numbers at which it can be made to fail."""
    with FailAtAllocation() as mode:
        work()
    return mode.num_allocations


def stratified_points(allocations: Mapping[str, int], num_points: int) -> list[tuple[str, int]]:
    """(phase, number) of `num_points` faults: as many in each phase, spread evenly from first to last.

    allocations: how many each phase makes. A phase with fewer than its share gets some twice.
    """
    points = []
    for place, (phase, count) in enumerate(allocations.items()):
        share = num_points // len(allocations) + (place < num_points % len(allocations))
        steps = max(share - 1, 1)
        points += [(phase, 1 + round(step * (count - 1) / steps)) for step in range(share)]
    return points


@cache
def _allocates(func: Any) -> bool:
    return any("Tensor" in str(made.type) and made.alias_info is None for made in func._schema.returns)
