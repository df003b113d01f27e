"""Surviving out of memory: recognise it, let go of everything, try again with fewer rows.

Memory that runs out as an exception is survived. Some does not raise and is out of reach:

- Linux hands out more than it has and its OOM killer ends the process (a cgroup's does too);
- under a limit on the process (RLIMIT_DATA, RLIMIT_AS) a thread's stack may not fit: libgomp then
  exits ("Thread creation failed"), and Python says "can't start new thread", which limits on
  processes cause as well, so it does not count as memory here. Start the threads before the limit
  is set: one parallel operation, one batch through the tokenizer;
- oneDNN, compiling a bf16 kernel for a new shape within the last few 100 kB, may end in SIGSEGV;
- Rust libraries abort: `safetensors.torch.save`, to bytes. `save_file` does not copy and is safe.

bf16 `torch.bmm` on a CPU catches oneDNN's failure itself, warns, and goes on with other rounding.
"""

import errno
import gc
import re
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from loguru import logger

from grpo.environment import return_freed_memory
from grpo.memory.rows import DoesNotFit, smaller_rows

T = TypeVar("T")
RESERVE_BYTES = 8 * 2**20
"""For a command to let go of when memory runs out, so that something can still be said and written."""

_ONEDNN_FAILED = "could not create a primitive"

_SAYS_OUT_OF_MEMORY = re.compile(
    "|".join(
        [
            # CUDA, HIP, MPS and XPU, their drivers, and NCCL, which quotes CUDA: as a sentence or a constant
            r"out[ _]?of[ _]?(?:host[ _]?|device[ _]?)?memory",
            r"ErrorMemoryAllocation",
            r"failed to cuda (?:host )?[cm]?alloc",  # NCCL's own
            r"Invalid buffer size:",  # MPS: one buffer larger than Metal allows
            # Where NVML is missing (MIG, Jetson), the report of a CUDA OOM fails (pytorch#112377)
            r"NVML_SUCCESS == .*CUDACachingAllocator",
            # cuBLAS, cuSPARSE, cuSOLVER, cuDNN and AMD's
            r"STATUS_ALLOC_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed",
            # A handle that cannot be made has no memory, or the context is broken: then the retry says so
            r"STATUS_NOT_INITIALIZED when calling `?\w+Create|CUDNN_STATUS_NOT_INITIALIZED",
            # cuDNN has no memory for a workspace or to load its kernels (pytorch#81620)
            r"CUDNN_STATUS_INTERNAL_ERROR(?:_HOST_ALLOCATION_FAILED|_DEVICE_ALLOCATION_FAILED|\b)",
            # The host: torch's allocator on Linux and on Windows, mmap, older torch, the C++ library
            r"can(?:'t|not) allocate memory|not enough memory: you tried to allocate",
            r"posix_memalign|std::bad_alloc",
            r"^Resource temporarily unavailable$",  # a thread, which has no room for its stack
            r"could not create a memory object",  # oneDNN
            r"could not (?:create|execute) a primitive(?! descriptor)",
            r"error return without exception set",  # CPython 3.11, where a frame has no room
        ]
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, or `error` was raised from (`__cause__`) an error that says so.

    An error that came up while another was handled (`__context__`) is judged by itself: it may be a
    bug in the handler, which fewer rows would not mend but hide. Nor is `DoesNotFit` one: smaller
    sizes have been tried. Where a text is ambiguous the answer is yes; a wrong yes costs retries, and
    the error still shows, as the cause of `DoesNotFit`.
    """
    link: BaseException | None = error
    seen: list[BaseException] = []
    while isinstance(link, Exception) and not isinstance(link, DoesNotFit) and link not in seen:
        by_text = isinstance(link, RuntimeError | SystemError) and _SAYS_OUT_OF_MEMORY.search(str(link))
        by_number = isinstance(link, OSError) and link.errno == errno.ENOMEM
        if by_text or by_number or isinstance(link, MemoryError | torch.OutOfMemoryError):
            return True
        seen.append(link)
        link = link.__cause__
    return False


def survive(
    run: Callable[[int], T],
    rows: int,
    *,
    phase: str,
    group_size: int = 1,
    rollback: Callable[[], None] = lambda: None,
    on_retry: Callable[[str], None] = lambda error: None,
    replays: bool = True,
) -> tuple[T, int]:
    """`run(rows)`, again if memory runs out: once with as many rows, then with fewer, down to one.

    `run` is a transaction. It reads what was frozen before (prompts, uniforms, advantages, weights),
    its result does not depend on how many rows it takes at once, and whatever it changes `rollback`
    undoes: the gradients that a backward pass left, a captured graph. A replay then gives the same.
    There must be no collective in it, as the other processes do not replay; without `replays` there may
    be one, and running out of memory is an error at once.

    Returns its result and the rows it was had with. DoesNotFit from the last error if not even one
    row fits; any other error as it is, at once. on_retry: told of each error that is tried again after: its
    type and the first line of its text.
    """
    tried: list[int] = []
    while True:
        outcome = _attempt(run, rows)
        if isinstance(outcome, tuple):
            return outcome[0], rows
        _free_failed_attempt(outcome, rollback)
        tried.append(rows)
        if not replays:
            raise DoesNotFit(
                f"{phase} ran out of memory with {rows} rows at once ({type(outcome).__name__}), and is not "
                "done again, as in a trial, or by one process of a sharded model: fix fewer rows, such as "
                "--train-rows, or lower --memory-utilization, so that more room is left."
            ) from outcome
        reason = f"{type(outcome).__name__}: {outcome}".splitlines()[0]
        # The first time something else may have been in the way: fragments, another process.
        next_rows = rows if len(tried) == 1 else smaller_rows(rows, group_size)
        if next_rows is None:
            raise DoesNotFit(
                f"{phase} does not fit: memory ran out with {', '.join(map(str, tried))} rows at once "
                f"({reason}). Free memory that others hold, or make rows shorter or the model smaller."
            ) from outcome
        logger.warning("{}: out of memory with {} rows ({}); now {}", phase, rows, reason, next_rows)
        on_retry(reason)
        rows = next_rows


def _attempt(run: Callable[[int], T], rows: int) -> tuple[T] | Exception:
    """The result, in a tuple, or the error if memory ran out.

    Only remembers: while an exception is being handled the interpreter holds its frames, and so all
    their tensors. A function of its own, for its frame is then over and can be cleared as well.
    """
    try:
        return (run(rows),)
    except Exception as error:
        if is_out_of_memory(error):
            return error
        raise


def _free_failed_attempt(error: Exception, rollback: Callable[[], None]) -> None:
    """Free what a failed attempt still holds: in frames, as gradients, in cycles, in the cache."""
    linked: list[BaseException] = [error]
    for link in linked:  # grows meanwhile
        others = (link.__cause__, link.__context__)
        linked += [other for other in others if other is not None and other not in linked]
        traceback.clear_frames(link.__traceback__)
    rollback()
    gc.collect()
    release_cache()
    if not any(isinstance(link, torch.OutOfMemoryError) for link in linked):  # the host's
        return_freed_memory()
    if any(_ONEDNN_FAILED in str(link) for link in linked) and torch.backends.mkldnn.enabled:
        # Its compiler remembers, thread by thread, that it failed once, and refuses every new shape.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # torch declares it oddly
        logger.warning(
            "oneDNN is switched off, as it compiles no more kernels: bf16 is many times slower from here on; "
            "more memory, or --precision fp32, avoids that"
        )


def release_cache() -> None:
    """Give back what an accelerator's allocator keeps for later, which others, and plans, take for held."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == "mps":
        torch.mps.empty_cache()
    elif accelerator is not None:
        torch.accelerator.empty_cache()
