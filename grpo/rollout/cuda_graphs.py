"""A step of the decoder, recorded once and replayed: a GPU runs a small model's kernels faster than they
can be launched one by one.

What is recorded reads and writes tensors that stay where they are. All recordings of a device share one
pool of memory: none runs beside another, and nothing in the pool is read after its replay.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

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
    """Runs step(tokens, num_blocks) as it is for the first of each num_blocks, then records and replays it.

    The logits are overwritten by the next call. Whatever the step reads beside its tokens is changed in
    place between calls, or `forget` is called. A driver that refuses, and a first replay that differs from
    the step it was recorded from, end recording: steps then run as they are, and a warning says so.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._checked = False
        self.forget()

    def forget(self) -> None:
        """Tensors have moved, or their shapes have changed."""
        self._replays: dict[int, Replay] = {}
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __call__(self, step: Callable[[Tensor, int], Tensor], tokens: Tensor, num_blocks: int) -> Tensor:
        if self._buffers is None or num_blocks not in self._replays:
            logits = step(tokens, num_blocks)  # now its libraries have what they need
            if self._recorder.works:
                self._take(step, tokens, num_blocks, logits)
            return logits
        held_tokens, held_logits = self._buffers
        held_tokens.copy_(tokens)
        self._replays[num_blocks]()
        return held_logits

    def _take(
        self, step: Callable[[Tensor, int], Tensor], tokens: Tensor, num_blocks: int, logits: Tensor
    ) -> None:
        """Record the step that gave these logits. It may run again: to the same end."""
        if self._buffers is None:
            self._buffers = tokens.clone(), torch.empty_like(logits)
        held_tokens, held_logits = self._buffers
        held_tokens.copy_(tokens)
        try:
            replay = self._recorder.record(lambda: held_logits.copy_(step(held_tokens, num_blocks)))
            if not self._checked:
                replay()
                _check(held_logits, logits)
                self._checked = True
            self._replays[num_blocks] = replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _warn(error)
            self._recorder.works = False
            self.forget()


def _check(replayed: Tensor, logits: Tensor) -> None:
    """RuntimeError where they differ by more than another order of sums explains."""
    close = 0.05 * float(logits.nan_to_num(0, 0, 0).abs().max())
    if not torch.allclose(replayed, logits, rtol=0, atol=close, equal_nan=True):
        raise RuntimeError("the first replay gave other logits")


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
    """All in one pool. One whose last graph has gone is not used again, and its memory is given back only
    when there is none left: one small graph stays.
    """

    def __init__(self, device: torch.device) -> None:
        self.works = True
        self._device = device
        with torch.cuda.device(device):
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            number = torch.zeros(1, device=device).add_(1)  # a kernel is loaded when it first runs
        self._stays = self.record(lambda: number.add_(1))

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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
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
