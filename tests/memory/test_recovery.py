"""Out of memory: recognised, let go of, survived; against real limits too, in a process of its own."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from out_of_memory import OUT_OF_MEMORY, FailAtAllocation, count_allocations
from several_processes import in_processes, values
from torch import Tensor, nn

from grpo.memory import Device, DoesNotFit, is_out_of_memory, survive

CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)"
)
pytestmark = pytest.mark.usefixtures("frozen")


def out_of_memory() -> RuntimeError:
    return RuntimeError(CPU_ERROR)


# ---------------------------------------------------------------------------------- recognising it

SAYS_SO = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "hipErrorOutOfMemory",
    "cudaErrorMemoryAllocation",
    "Invalid buffer size: 19.45 GB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "rocBLAS error: rocblas_status_memory_error",
    "miopenStatusAllocFailed",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830',
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes",
    CPU_ERROR,
    "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
    "posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
    "unable to mmap 33554512 bytes from file <x.safetensors>: Cannot allocate memory (12)",
    "could not create a memory object",
    "could not create a primitive",
    "could not execute a primitive",
    "Resource temporarily unavailable",
]
SAYS_OTHERWISE = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "Unsupported memory format. Supports only ChannelsLast, Contiguous",
    "can't start new thread",
    "could not create a primitive descriptor for the matmul primitive",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE",
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
    "Storage size calculation overflowed with sizes=[4611686018427387904]",
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 1 'invalid argument'",
]


def test_every_shape_of_it_is_recognised_and_other_errors_are_not():
    """As CUDA, its libraries, ROCm, Metal, oneAPI, NCCL, torch on a host and the C++ library have it."""

    def raised_from(cause: BaseException, error: BaseException) -> BaseException:
        error.__cause__ = cause
        return error

    by_type = [MemoryError(), OSError(12, "Cannot allocate memory"), torch.OutOfMemoryError("Allocation on")]
    by_type.append(SystemError("error return without exception set"))
    shapes = [*map(RuntimeError, SAYS_SO), *by_type, *(make() for make in OUT_OF_MEMORY)]
    shapes.append(raised_from(raised_from(MemoryError(), OSError("b")), ValueError("a")))  # wraps one
    assert [error for error in shapes if not is_out_of_memory(error)] == []
    others = [OSError(28, "No space left on device"), ValueError("a user's words: CUDA out of memory")]
    others += [*map(RuntimeError, SAYS_OTHERWISE), SystemError("unknown opcode")]
    after, first, second = KeyError("in the handler"), ValueError("a"), ValueError("b")
    after.__context__ = out_of_memory()  # follows one
    first.__cause__, second.__cause__ = second, first
    others += [after, first, raised_from(out_of_memory(), KeyboardInterrupt())]
    others.append(raised_from(raised_from(out_of_memory(), DoesNotFit()), ValueError()))
    assert [error for error in others if is_out_of_memory(error)] == []


# ------------------------------------------------------------------------------------- trying again


def fits(limit: int, asked: list[int]) -> Callable[[int], str]:
    """A phase that has memory for `limit` rows; keeps the sizes it was asked for."""

    def run(rows: int) -> str:
        asked.append(rows)
        if rows > limit:
            raise out_of_memory()
        return f"by {rows}"

    return run


def test_one_retry_at_the_same_size_then_smaller_ones(logged: list[str]):
    """Groups of 8: 48 again, then 24, 8 (half of 24 in whole groups), then a divisor of 8."""
    asked: list[int] = []
    retries: list[str] = []
    unwanted = mock.Mock()
    found = survive(fits(4, asked), 48, phase="learn", group_size=8, on_retry=retries.append)
    assert found == ("by 4", 4) and asked == [48, 48, 24, 8, 4]
    assert retries == [f"RuntimeError: {CPU_ERROR}"] * 4
    assert len([line for line in logged if line.startswith("WARNING learn: out of memory with")]) == 4
    untroubled = survive(fits(8, []), 8, phase="score", rollback=unwanted, on_retry=unwanted)
    assert untroubled == ("by 8", 8) and not unwanted.called


def test_when_not_even_one_row_fits_the_error_says_what_was_tried_and_any_other_ends_it_at_once():
    """Nor is it tried again from outside. A broken device may first look like memory: the retry shows it."""
    asked: list[int] = []
    inner = partial(survive, fits(0, asked), phase="sample", group_size=4)
    with pytest.raises(DoesNotFit, match=r"^sample does not fit.*with 12, 12, 4, 2, 1 rows.*Def") as caught:
        survive(inner, 12, phase="evaluate")
    assert asked == [12, 12, 4, 2, 1] and str(caught.value.__cause__) == CPU_ERROR
    for attempts in (1, 2):
        run = mock.Mock(side_effect=[*[out_of_memory()] * (attempts - 1), RuntimeError("device-side assert")])
        with pytest.raises(RuntimeError, match="device-side assert"):
            survive(run, 8, phase="learn")
        assert run.call_args_list == [mock.call(8)] * attempts


# -------------------------------------------------------------------------------------- letting go


Held = list["weakref.ref[Tensor]"]


def make(held: Held) -> Tensor:
    tensor = torch.ones(4, requires_grad=True)
    held.append(weakref.ref(tensor))
    return tensor


def in_nested_frames(held: Held, depth: int = 3) -> None:
    kept = make(held)
    if depth and kept is not None:
        in_nested_frames(held, depth - 1)
    raise out_of_memory()


def in_a_generator_that_waits(held: Held) -> None:
    def batches() -> Iterator[Tensor]:
        kept = make(held)
        yield kept

    waiting = batches()
    next(waiting)
    raise out_of_memory()


def in_the_error_being_handled(held: Held) -> None:
    try:
        in_the_cause(held)
    except ValueError:
        raise out_of_memory()  # noqa: B904 - the context is what this is about


def in_the_cause(held: Held) -> None:
    try:
        in_nested_frames(held)
    except RuntimeError as error:
        raise ValueError("no batch") from error


def in_a_cycle(held: Held) -> None:
    kept: list[object] = [make(held)]
    kept.append(kept)
    raise out_of_memory()


def below_backward(held: Held) -> None:
    loss = FailingBackward.apply(make(held).exp())
    held.append(weakref.ref(loss))
    loss.sum().backward()


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        kept = grad * ctx.saved_tensors[0]
        raise out_of_memory() if kept is not None else AssertionError


WAYS = in_nested_frames, in_a_generator_that_waits, in_the_error_being_handled, in_the_cause, in_a_cycle


@pytest.mark.parametrize("fail", [*WAYS, below_backward])
def test_all_that_a_failed_attempt_held_is_free_when_the_next_begins(fail: Callable[[Held], None]):
    """Collecting is left to what lets go."""
    held: Held = []
    alive: list[int] = []

    def run(rows: int) -> int:
        alive.append(sum(ref() is not None for ref in held))
        if len(alive) < 3:
            fail(held)
        return rows

    gc.disable()
    try:
        assert survive(run, 8, phase="learn") == (4, 4)
    finally:
        gc.enable()
    assert held and alive == [0, 0, 0]


def test_a_cache_is_emptied_before_a_retry_malloc_gives_back_and_onednn_is_given_up_once_it_has_failed(
    monkeypatch, logged
):
    for device in torch.device("cuda"), torch.device("mps"), None:
        emptied: list[str] = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, device=device, **__: device)
        monkeypatch.setattr(torch.accelerator, "empty_cache", partial(emptied.append, "cuda"))
        monkeypatch.setattr(torch.mps, "empty_cache", partial(emptied.append, "mps"))
        survive(fits(4, []), 8, phase="learn")
        assert emptied == ([device.type] * 2 if device else [])
    with mock.patch("grpo.memory.recovery.return_freed_memory") as return_freed_memory:
        survive(fits(4, []), 4, phase="learn")
        with pytest.raises(DoesNotFit):
            survive(mock.Mock(side_effect=torch.OutOfMemoryError("a card's")), 1, phase="learn")
        assert not return_freed_memory.called
        survive(fits(4, []), 8, phase="learn")
        assert return_freed_memory.call_count == 2
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)  # is put back
    torch.backends.mkldnn.enabled = True

    def run(rows: int) -> bool:
        if torch.backends.mkldnn.enabled:
            raise RuntimeError("could not create a primitive")
        return True

    assert survive(run, 8, phase="learn") == (True, 8)
    assert any("oneDNN is switched off" in line for line in logged)


# ---------------------------------------------------------------------------------- injected faults


def gradient_step(model: nn.Module, x: Tensor) -> Callable[[int], list[Tensor]]:
    """Gradients accumulated over micro-batches, from frozen inputs: a phase in small."""

    def run(rows: int) -> list[Tensor]:
        for part in x.split(rows):
            model(part).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    return run


def test_a_fault_at_any_allocation_changes_no_gradient():
    """Once: the replay at the same size. Twice at the same place: half as many rows, the same sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    run = gradient_step(model, torch.randn(8, 3, dtype=torch.float64))
    expected = run(8)
    model.zero_grad()
    forward = count_allocations(lambda: model(torch.randn(8, 3, dtype=torch.float64)))
    total = count_allocations(lambda: run(8))
    assert total > 2 * forward > 2  # backward's are seen
    for number in range(1, total + 1):
        for times in (1, 2) if number % 3 == 1 else (1,):
            model.zero_grad()
            error = OUT_OF_MEMORY[number % len(OUT_OF_MEMORY)]
            with FailAtAllocation(*range(number, times * number + 1, number), error=error) as fault:
                gradients, rows = survive(run, 8, phase="learn", rollback=model.zero_grad)
            assert fault.fired == [number, 2 * number][:times] and rows == [8, 4][times - 1]
            for gradient, exact in zip(gradients, expected, strict=True):
                torch.testing.assert_close(gradient, exact, rtol=0 if times == 1 else 1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------- real limits


def limited_to(extra_bytes: int) -> Device:
    """This process may have `extra_bytes` more than it has now, inside its `capped`."""
    return Device(limit_bytes=Device(limit_bytes=2**40).memory().ours_bytes + extra_bytes)


MB = 2**20
PROVOCATIONS: dict[str, Callable[[Tensor], object]] = {
    "torch.empty": lambda x: torch.empty(2**33),
    "numpy": lambda x: np.zeros(2**33),
    "bytearray": lambda x: bytearray(2**33),
    "forward": lambda x: [torch.relu(x @ x.t()) for _ in range(32)],
    "bf16": lambda x: [x.bfloat16() @ x.bfloat16().t() for _ in range(64)],
    "backward": lambda x: x.requires_grad_().sum().expand(2**25).norm().backward(),  # forward needs nothing
}
"""Work on a tensor (1024, 16) that needs 128 MB or more."""


def provoke(name: str) -> tuple[str, bool]:
    """The real error, and whether it is recognised."""
    work, x = PROVOCATIONS[name], torch.ones(1024, 16)
    try:
        with limited_to(16 * MB).capped():
            work(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}", is_out_of_memory(error)
    return "no error", False


def learn_under_a_limit() -> tuple[int, list[int], float]:
    """Rows of 64 that fitted, those of each try, and how far the gradient is from the unlimited one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2**16), nn.Tanh(), nn.Linear(2**16, 1)).double()
    run = gradient_step(model, torch.randn(64, 4, dtype=torch.float64))  # each activation of 64: 32 MB
    tried: list[int] = []

    def attempt(rows: int) -> list[Tensor]:
        tried.append(rows)
        return run(rows)

    with limited_to(64 * MB).capped():
        found, rows = survive(attempt, 64, phase="learn", group_size=8, rollback=model.zero_grad)
    model.zero_grad()
    differences = [(a - b).abs().max().item() for a, b in zip(found, run(64), strict=True)]
    return rows, tried, max(differences)


def under_real_limits(rank: int) -> tuple[dict[str, tuple[str, bool]], tuple[int, list[int], float]]:
    return {name: provoke(name) for name in PROVOCATIONS}, learn_under_a_limit()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_a_host_without_memory_is_recognised_and_fewer_rows_give_the_same_gradient():
    """In a process of one thread, for threads' stacks are memory too."""
    ((errors, (rows, tried, difference)),) = values(in_processes(1, under_real_limits))
    assert [text for text, recognised in errors.values() if not recognised] == []
    assert tried[:2] == [64, 64] and rows in (8, 16, 32) and difference < 1e-10
