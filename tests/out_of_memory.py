"""Running out of memory on purpose, at a chosen allocation.

Left out: allocations inside a kernel (workspaces), which no dispatch mode sees, and those that are
not torch's.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@cache
def _allocates(func: Any) -> bool:
    return any("Tensor" in str(made.type) and made.alias_info is None for made in func._schema.returns)
