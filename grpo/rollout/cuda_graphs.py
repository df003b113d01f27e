"""A token's kernels, recorded once and replayed: a GPU runs those of a small model faster than they can be
launched one by one.

What is recorded reads and writes tensors that stay where they are. All recordings of a device share one
pool of memory: none runs beside another, and nothing in the pool is read after its replay.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
from loguru import logger
from torch import Tensor

Replay = Callable[[], None]


class Recorder(Protocol):
    works: bool
    """Until it has failed once: every decoder then goes on without."""

    def record(self, work: Callable[[], object]) -> Replay:
        """Takes note of what a function launches, without running it, and returns what launches it again."""


class RecordedSteps:
    """Runs work as it is the first time, then records and replays it; one recording for each key.

    What it reads is changed in place between calls, if at all. A driver that refuses, and a recording whose
    first replay shows something else than the work it was made from, end recording: work then runs as it is,
    and a warning says so.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._replays: dict[Hashable, Replay] = {}

    def __call__(
        self, key: Hashable, work: Callable[[], None], *, changed: Sequence[Tensor], shown: Sequence[Tensor]
    ) -> None:
        """changed: all tensors to which a second run makes a difference. shown: by which it is judged."""
        if key in self._replays:
            self._replays[key]()
        elif not self._recorder.works:
            work()
        else:
            before = [tensor.clone() for tensor in changed]
            work()  # now its libraries have what they need
            after = [tensor.clone() for tensor in changed]
            expected = [tensor.clone() for tensor in shown]
            self._record(key, work, lambda: _set(changed, before), lambda: _differs(shown, expected))
            _set(changed, after)

    def _record(
        self, key: Hashable, work: Callable[[], None], undo: Callable[[], None], differs: Callable[[], bool]
    ) -> None:
        """It runs meanwhile, for its first replay to be judged."""
        try:
            replay = self._recorder.record(work)
            undo()
            replay()
            if differs():
                raise RuntimeError("the first replay gave other tokens")
            self._replays[key] = replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _warn(error)
            self._recorder.works = False
            self._replays.clear()


def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


SAME = 0.75
"""Of values that have to be as they were. Sums in another order may lead to another token, now and then."""


def _differs(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    same = [one.isclose(other, rtol=0.05, atol=0.05, equal_nan=True).double().mean() for one, other in pairs]
    return bool(torch.stack(same).min() < SAME)


def _warn(error: Exception) -> None:
    logger.warning("decoding goes on without recorded steps, slower: {}", error)


@cache
def recorder_of(device: torch.device) -> Recorder | None:
    """Of a CUDA device, for as long as the process lives; None where the driver refuses."""
    try:
        return _CUDAGraphs(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _warn(error)
        return None


class _CUDAGraphs:
    """All that there are at a time share a pool of memory. One whose last graph has gone cannot be used
    again, and is given back by `empty_cache`: those that come later have another.
    """

    def __init__(self, device: torch.device) -> None:
        self.works = True
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            number = torch.zeros(1, device=device).add_(1)  # a kernel is loaded when it first runs
        self._graphs: WeakSet[Any] = WeakSet()
        self.record(lambda: number.add_(1))  # an error where the driver refuses

    def record(self, work: Callable[[], object]) -> Replay:
        try:
            return self._capture(work)
        except torch.OutOfMemoryError:  # a capture gets nothing of what the allocator keeps for later
            torch.cuda.empty_cache()
            return self._capture(work)
        except RuntimeError:
            # One that cannot begin or end leaves the allocator in the pool, where the cache is never freed.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise

    def _capture(self, work: Callable[[], object]) -> Replay:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        with torch.cuda.device(self._device), _uncollected():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # torch.cuda.graph would also collect garbage and empty the cache, each time.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: a graph that is freed while another is captured spoils it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
