"""Tensors a slice at a time: on a CPU numbers then stay in its caches, and few are held in fp32.

A trace of memory runs the first slice alone, as all are alike, and as large as the device has it that is
traced for (`traced_for`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor

from grpo.model import cpu

CAST_ROWS = 4096
"""Of a matrix, such as the vocabulary's, that are cast at once: a whole copy in fp32 would be large."""


class _Trace(NamedTuple):
    device: torch.device
    parts_too: bool


_trace: ContextVar[_Trace | None] = ContextVar("trace", default=None)


@contextmanager
def traced_for(device: torch.device, *, parts_too: bool) -> Iterator[None]:
    """Inside, slices are those of `device`, whatever tensors say, and the first is run for all of them.

    parts_too: also where something of each slice is kept (`parts`).
    """
    token = _trace.set(_Trace(device, parts_too))
    try:
        yield
    finally:
        _trace.reset(token)


def traced_device() -> torch.device | None:
    """Inside a trace of memory, the device that it is for."""
    traced = _trace.get()
    return traced.device if traced else None


def slice_numbers(device: torch.device) -> int:
    """Numbers that a slice has at most: near a CPU's caches; elsewhere enough to be worth a kernel."""
    traced = _trace.get()
    on_cpu = (traced.device if traced else device).type == "cpu"
    return 2**19 if on_cpu and cpu.is_on("slices") else 2**24


def slices(count: int, size: int) -> Iterator[slice]:
    """Of `count` things, `size` at a time, of which nothing new is kept."""
    return _places(count, size, first_only=_trace.get() is not None)


def parts(count: int, size: int) -> Iterator[slice]:
    """The same where selective checkpointing keeps something of each, and a trace of it runs all."""
    traced = _trace.get()
    return _places(count, size, first_only=traced is not None and traced.parts_too)


def _places(count: int, size: int, *, first_only: bool) -> Iterator[slice]:
    for start in range(0, size if first_only else count, size):
        yield slice(start, start + size)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (M, N) += leftᵀ @ right, for left (T, M) and right (T, N); they may be less exact than it."""
    if total.dtype == right.dtype:
        total.addmm_(left.T, right)
        return
    if traced_device() is None and _adds_in(total.dtype, right.dtype, total.device):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        return
    for rows in slices(len(total), CAST_ROWS):
        total[rows] += left[:, rows].T @ right


@cache
def _adds_in(exact: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of numbers in `dtype` can be added to ones that are more exact; tried once."""
    if device.type != "cuda":
        return False
    ones, total = torch.ones(8, 8, dtype=dtype, device=device), torch.ones(8, 8, dtype=exact, device=device)
    try:
        torch.addmm(total, ones.T, ones, out_dtype=exact, out=total)
        works = bool((total == 9).all())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        works, reason = False, str(error).splitlines()[0]
    else:
        reason = "they come out wrong"
    if not works:
        logger.info("products are not added to a head's gradient at once, slower: {}", reason)
    return works
