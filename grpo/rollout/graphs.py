"""CUDA graphs: the kernels of a token are recorded once, and from then on launched together.

A card runs the kernels of a small model faster than they can be launched one by one. What is recorded reads
and writes tensors that stay where they are.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from loguru import logger
from torch import Tensor

Replay = Callable[[], None]
MIN_MATCH, LOGP_TOLERANCE = 0.98, 0.02
"""Share of tokens that a replay has to repeat, and what their log-probs may differ by, in nats.

Sums in another order may lead to another token at times, and of few rows one may.
"""


class CUDAGraphs:
    """All graphs of a device share a pool of memory: none runs beside another.

    A pool whose last graph has gone cannot be used again, and `empty_cache` gives it back.
    """

    def __init__(self, device: torch.device) -> None:
        """RuntimeError where the driver refuses."""
        self.works = True
        """Until it has failed once."""
        self._device = device
        self._graphs: WeakSet[Any] = WeakSet()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            number = torch.zeros(1, device=device).add_(1)  # a kernel is loaded when it first runs
        self.record(lambda: number.add_(1))

    def record(self, work: Callable[[], object]) -> Replay:
        """Note what a function launches, without running it, and return what launches it again."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        collects = gc.isenabled()
        gc.disable()  # a graph that is freed while another is captured spoils it
        try:
            capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
            stream = torch.cuda.current_stream(self._device)  # which a capture that cannot begin leaves
            with torch.cuda.device(self._device), torch.cuda.stream(stream), capture:
                work()
        except RuntimeError:
            # One that cannot begin or end leaves the allocator in the pool, where the cache is never freed.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise
        finally:
            if collects:
                gc.enable()
        return graph.replay


@cache
def graphs_of(device: torch.device) -> CUDAGraphs | None:
    """Those of a CUDA device, for as long as the process lives; None where the driver refuses."""
    try:
        return CUDAGraphs(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _warn(error)
        return None


def warm_up_and_capture(
    graphs: CUDAGraphs, work: Callable[[], None], *, changed: Sequence[Tensor], shown: Sequence[Tensor]
) -> Replay | None:
    """Run work as it is, then record it, and compare what is `shown` after the first replay, row by row.

    changed: all tensors to which a second run makes a difference. None, with a warning, where recording fails
    or something else is shown: `graphs` are then used no more.
    """
    before = [tensor.clone() for tensor in changed]
    work()  # now its libraries have what they need
    after, expected = ([tensor.clone() for tensor in tensors] for tensors in (changed, shown))
    replay = None
    try:
        replay = graphs.record(work)
        _set(changed, before)
        replay()
        if not is_repeated(shown, expected):
            raise RuntimeError("the first replay gave other tokens")
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _warn(error)
        graphs.works, replay = False, None
    _set(changed, after)
    return replay


def is_repeated(shown: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether a replay shows what was expected, of as many rows as there have to be.

    Whole numbers, as tokens are, have to be the same, and others, as log-probs, close where those are.
    """
    same = torch.ones_like(expected[0], dtype=torch.bool)
    close = same.clone()
    for now, before in zip(shown, expected, strict=True):
        if before.is_floating_point():
            close &= now.isclose(before, rtol=0, atol=LOGP_TOLERANCE, equal_nan=True)
        else:
            same &= now == before
    unlike = torch.stack([(~same).sum(), (same & ~close).sum()]).tolist()
    return unlike[0] <= max(1, (1 - MIN_MATCH) * same.numel()) and unlike[1] <= (1 - MIN_MATCH) * same.numel()


def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _warn(error: Exception) -> None:
    logger.warning("decoding goes on without recorded steps, slower: {}", error)
