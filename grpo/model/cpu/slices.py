"""Tensors a slice at a time: on a CPU numbers then stay in its caches, and few are held in fp32."""

from collections.abc import Iterator

from torch import Tensor

CAST_ROWS = 4096
"""Of a matrix, such as the vocabulary's, that are cast at once: a whole copy in fp32 would be large."""


def slices(count: int, size: int) -> Iterator[slice]:
    """Of `count` things, `size` at a time, of which nothing new is kept: a trace runs the first."""
    return parts(count, size)


def parts(count: int, size: int) -> Iterator[slice]:
    """The same where selective checkpointing keeps something of each, and a trace of it runs all."""
    for start in range(0, count, size):
        yield slice(start, start + size)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (M, N) += leftᵀ @ right, for left (T, M) and right (T, N); they may be less exact than it."""
    if total.dtype == right.dtype:
        total.addmm_(left.T, right)
        return
    for rows, part in zip(total.split(CAST_ROWS), left.split(CAST_ROWS, 1), strict=True):
        rows += part.T @ right
