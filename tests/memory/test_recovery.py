"""Out of memory: recognised, let go of, survived; against real limits too, in a process of its own."""

import gc
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.out_of_memory import OUT_OF_MEMORY, FailAtAllocation, count_allocations, stratified_points
from torch import Tensor, nn

from grpo.memory.planner import DoesNotFit, smaller_rows
from grpo.memory.recovery import Retry, is_out_of_memory, survive

CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)"
)

pytestmark = pytest.mark.usefixtures("frozen")


def out_of_memory() -> RuntimeError:
    return RuntimeError(CPU_ERROR)


# ---------------------------------------------------------------------------------- recognising it


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.65 GiB total capacity)"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("hipErrorOutOfMemory"),
        RuntimeError("cudaErrorMemoryAllocation"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.66 GB, max allowed: 18.13 GB)"),
        RuntimeError("Invalid buffer size: 19.45 GB"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("rocBLAS error: rocblas_status_memory_error"),
        RuntimeError("miopenStatusAllocFailed"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830'
        ),
        RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        RuntimeError("NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes"),
        RuntimeError(CPU_ERROR),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
        RuntimeError("posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0"),
        RuntimeError("unable to mmap 33554512 bytes from file <x.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a memory object"),
        RuntimeError("could not create a primitive"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        *(make() for make in OUT_OF_MEMORY),
    ],
)
def test_every_shape_of_it_is_recognised(error: Exception):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Unsupported memory format. Supports only ChannelsLast, Contiguous"),
        RuntimeError("could not create a primitive descriptor for the matmul primitive"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
        RuntimeError("can't start new thread"),
        RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 1 'invalid argument'"),
        OSError(28, "No space left on device"),
        ValueError("a user's words: CUDA out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception):
    assert not is_out_of_memory(error)


def raised_from(cause: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_an_error_that_wraps_one_counts_and_one_that_follows_it_does_not():
    assert is_out_of_memory(raised_from(raised_from(MemoryError(), OSError("b")), ValueError("a")))
    bug = KeyError("in the handler")
    bug.__context__ = out_of_memory()
    assert not is_out_of_memory(bug)
    assert not is_out_of_memory(raised_from(out_of_memory(), KeyboardInterrupt()))
    assert not is_out_of_memory(raised_from(raised_from(out_of_memory(), DoesNotFit()), ValueError()))


def test_errors_that_are_each_others_cause_are_judged_too():
    error = raised_from(ValueError("b"), ValueError("a"))
    raised_from(error, error.__cause__ or error)
    assert not is_out_of_memory(error)


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
    retries: list[Retry] = []
    result = survive(fits(4, asked), 48, phase="learn", group_size=8, on_retry=retries.append)
    assert result == ("by 4", 4)
    assert asked == [48, 48, 24, 8, 4]
    reason = f"RuntimeError: {CPU_ERROR}"
    assert retries == [Retry("learn", before, after, reason) for before, after in pairwise(asked)]
    warnings = [line for line in logged if line.startswith("WARNING learn: out of memory with")]
    assert len(warnings) == 4


def test_sizes_are_halved_in_whole_groups_and_then_go_by_divisors():
    def sizes(rows: int, group_size: int) -> list[int]:
        smaller = smaller_rows(rows, group_size)
        return [rows] if smaller is None else [rows, *sizes(smaller, group_size)]

    assert sizes(64, 8) == [64, 32, 16, 8, 4, 2, 1]
    assert sizes(56, 8) == [56, 24, 8, 4, 2, 1]
    assert sizes(20, 12) == [20, 12, 6, 4, 3, 2, 1]
    assert sizes(5, 8) == [5, 4, 2, 1]
    assert sizes(7, 1) == [7, 3, 1]


def test_without_trouble_nothing_is_discarded_or_reported():
    unwanted: list[object] = []
    result = survive(
        fits(8, []), 8, phase="score", discard=lambda: unwanted.append(0), on_retry=unwanted.append
    )
    assert result == ("by 8", 8)
    assert not unwanted


def test_when_not_even_one_row_fits_the_error_says_what_was_tried():
    asked: list[int] = []
    with pytest.raises(
        DoesNotFit, match=r"^sample does not fit.*with 12, 12, 4, 2, 1 rows.*Default"
    ) as caught:
        survive(fits(0, asked), 12, phase="sample", group_size=4)
    assert asked == [12, 12, 4, 2, 1]
    assert str(caught.value.__cause__) == CPU_ERROR


def test_what_did_not_fit_is_not_tried_again_from_outside():
    asked: list[int] = []

    def evaluate(rows: int) -> tuple[str, int]:
        return survive(fits(0, asked), rows, phase="sample")

    with pytest.raises(DoesNotFit, match="sample does not fit"):
        survive(evaluate, 1, phase="evaluate")
    assert asked == [1, 1]


@pytest.mark.parametrize("attempts", [1, 2])
def test_any_other_error_ends_it_at_once(attempts: int):
    """A broken device may first look like memory: the retry shows it as it is."""
    asked: list[int] = []

    def run(rows: int) -> None:
        asked.append(rows)
        raise out_of_memory() if len(asked) < attempts else RuntimeError("device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        survive(run, 8, phase="learn")
    assert asked == [8] * attempts


# -------------------------------------------------------------------------------------- letting go


@pytest.fixture
def no_gc() -> Iterator[None]:
    """No collection but those that are asked for."""
    gc.disable()
    yield
    gc.enable()


Held = list["weakref.ref[Tensor]"]


def make(held: Held) -> Tensor:
    tensor = torch.ones(4, requires_grad=True)
    held.append(weakref.ref(tensor))
    return tensor


def in_a_frame(held: Held) -> None:
    kept = make(held)
    raise out_of_memory() if kept is not None else AssertionError


def in_nested_frames(held: Held, depth: int = 3) -> None:
    kept = make(held)
    if depth and kept is not None:
        in_nested_frames(held, depth - 1)
    raise out_of_memory()


def in_a_graph(held: Held) -> None:
    hidden = make(held).exp()
    held.append(weakref.ref(hidden))  # saved for the backward pass
    kept = (hidden * 2).exp()
    raise out_of_memory() if kept is not None else AssertionError


def in_a_generator_that_fails(held: Held) -> None:
    def batches() -> Iterator[Tensor]:
        kept = make(held)
        yield kept * 2
        raise out_of_memory()

    for batch in batches():
        held.append(weakref.ref(batch))


def in_a_generator_that_waits(held: Held) -> None:
    outer = make(held)

    def batches() -> Iterator[Tensor]:
        kept = make(held)
        yield kept
        yield outer

    waiting = batches()
    next(waiting)
    raise out_of_memory()


def in_the_error_being_handled(held: Held) -> None:
    def look_up() -> None:
        kept = make(held)
        raise KeyError(kept.shape)

    try:
        look_up()
    except KeyError:
        raise out_of_memory()  # noqa: B904 - the context is what this is about


def in_the_cause(held: Held) -> None:
    try:
        in_a_frame(held)
    except RuntimeError as error:
        cause = error
    raise ValueError("no batch") from cause


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


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(
    "fail",
    [
        in_a_frame, in_nested_frames, in_a_graph, in_a_generator_that_fails, in_a_generator_that_waits,
        in_the_error_being_handled, in_the_cause, in_a_cycle, below_backward,
    ],
)  # fmt: skip
def test_all_that_a_failed_attempt_held_is_free_when_the_next_begins(fail: Callable[[Held], None]):
    held: Held = []
    alive: list[int] = []

    def run(rows: int) -> int:
        alive.append(sum(ref() is not None for ref in held))
        if len(alive) < 3:
            fail(held)
        return rows

    assert survive(run, 8, phase="learn") == (8 // 2, 4)
    assert held
    assert alive == [0, 0, 0]


@pytest.mark.usefixtures("no_gc")
def test_a_failed_backward_pass_leaves_no_partial_gradient():
    """Autograd goes from the last operation to the first: `late` has its gradient when `early` fails."""
    model = nn.ParameterDict({"early": torch.ones(2), "late": torch.ones(2)})
    found: list[list[bool]] = []

    def gradients() -> list[bool]:
        return [parameter.grad is not None for parameter in (model["early"], model["late"])]

    def discard() -> None:
        found.append(gradients())
        model.zero_grad(set_to_none=True)

    def run(rows: int) -> list[bool]:
        before = gradients()
        if not found:
            early = FailingBackward.apply(model["early"] * 3)
            (early.sum() + (model["late"] * 3).sum()).backward()
        return before

    before, rows = survive(run, 8, phase="learn", discard=discard)
    assert found == [[False, True]]
    assert before == [False, False]
    assert rows == 8


@pytest.mark.parametrize("device", ["cuda", "mps", None])
def test_the_accelerators_cache_is_emptied_before_a_retry(device: str | None, monkeypatch):
    emptied: list[str] = []
    current = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: current)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    survive(fits(4, []), 8, phase="learn")
    assert emptied == [device] * 2 if device else not emptied


def test_onednn_is_given_up_once_it_has_failed_to_compile(monkeypatch, logged: list[str]):
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


@pytest.mark.parametrize("times", [1, 2])
def test_a_fault_at_any_allocation_changes_no_gradient(times: int):
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
        model.zero_grad()
        error = OUT_OF_MEMORY[number % len(OUT_OF_MEMORY)]
        fault = FailAtAllocation(*range(number, times * number + 1, number), error=error)
        with fault:
            gradients, rows = survive(run, 8, phase="learn", discard=model.zero_grad)
        assert fault.fired == [number, 2 * number][:times]
        assert rows == [8, 4][times - 1]
        for gradient, exact in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, exact, rtol=0 if times == 1 else 1e-12, atol=1e-14)


def test_what_allocates_is_counted_and_views_and_updates_in_place_are_not():
    x = torch.ones(4, 4)
    assert count_allocations(lambda: (x.t(), x.view(16), x.detach(), x.add_(1), x.sum().item())) == 1
    assert count_allocations(lambda: (torch.empty(2), x.clone(), x.max(1), x @ x)) == 4


def test_points_are_spread_over_phases_and_within_them():
    points = stratified_points({"sample": 9, "learn": 101, "score": 1}, 8)
    assert points == [
        ("sample", 1), ("sample", 5), ("sample", 9), ("learn", 1), ("learn", 51), ("learn", 101),
        ("score", 1), ("score", 1),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------- real limits


@contextmanager
def limited_to(extra_bytes: int) -> Iterator[None]:
    """This process may have `extra_bytes` more than it has now."""
    import resource  # not on Windows

    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + extra_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


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
        with limited_to(16 * MB):
            work(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}", is_out_of_memory(error)
    return "no error", False


def learn_under_a_limit() -> tuple[int, list[int], float]:
    """Rows of 64 that fitted, the rows of each retry, and how far the gradient is from the unlimited one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2**16), nn.Tanh(), nn.Linear(2**16, 1)).double()
    run = gradient_step(model, torch.randn(64, 4, dtype=torch.float64))  # each activation of 64: 32 MB
    retries: list[Retry] = []
    with limited_to(64 * MB):
        found, rows = survive(
            run, 64, phase="learn", group_size=8, discard=model.zero_grad, on_retry=retries.append
        )
    model.zero_grad()
    differences = [(a - b).abs().max().item() for a, b in zip(found, run(64), strict=True)]
    return rows, [retry.rows for retry in retries], max(differences)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process of one thread, for threads' stacks are memory too."""
    if sys.platform != "linux":
        pytest.skip("RLIMIT_DATA is Linux's")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool


@pytest.mark.parametrize("name", PROVOCATIONS)
def test_the_real_errors_of_a_host_without_memory_are_recognised(name: str, process: ProcessPoolExecutor):
    text, recognised = process.submit(provoke, name).result()
    assert recognised, text


def test_under_a_real_limit_fewer_rows_give_the_same_gradient(process: ProcessPoolExecutor):
    rows, tried, difference = process.submit(learn_under_a_limit).result()
    assert tried[:2] == [64, 64]
    assert rows in (8, 16, 32)
    assert difference < 1e-10
