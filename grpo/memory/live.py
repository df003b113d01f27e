"""Bytes of the tensors that are alive, counted operation by operation; works on fake tensors too.

Counts what the allocator is asked for. What kernels use and free within themselves no mode sees; of
that, `kernel_bytes` knows what is large on the CPU. Costs some microseconds an operation: for traces
and calibration, not for every step. Left out: tensors that existed before (weights, inputs), which the
caller knows, and oneDNN's scratch space (in bf16 some hundred kB a thread; with tiles a weight's bytes).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ARITHMETIC = (aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_)


class LiveBytes(TorchDispatchMode):
    """Inside it, `live_bytes` are those of the storages made so far and not yet freed.

    A storage counts once however many tensors view it, with what the allocator takes for its size
    (`block_bytes`). Storages on other devices than `device_type` do not count.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        block_bytes: Callable[[int], int] = lambda size: size,
        *,
        keep_log: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.log: list[tuple[str, int]] = []
        """With `keep_log`: each operation that allocated, and `live_bytes` while it ran."""
        self._keep_log = keep_log
        self._device_type = device_type
        self._block_bytes = block_bytes
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._refilled: set[int] = set()

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        made = list(_tensors((result,)))
        if func.namespace == "fsdp" and "out" in kwargs:
            self._refill(kwargs["out"])
        if not made:
            return
        self._follow_refilled()
        given = [*_tensors(args), *_tensors(kwargs.values())]
        storages = {value.untyped_storage()._cdata for value in given}
        before = self.live_bytes
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages and storage._cdata not in self._alive:
                self._count(storage)
        within = kernel_bytes(func, given, made[0]) if self._device_type == "cpu" else 0
        if self.live_bytes + within > before and not _sums_gradients(func, given):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + within)
            if self._keep_log:
                self.log.append((str(func), self.live_bytes + within))

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type not in (self._device_type, "meta"):  # a fake tensor's storage is meta
            return
        key = storage._cdata

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.live_bytes -= self._sizes.pop(key, 0)
            self._alive.pop(key, None)
            self._refilled.discard(key)

        self._alive[key], self._sizes[key] = weakref.ref(storage, freed), 0
        self._measure(key, storage)

    def _measure(self, key: int, storage: torch.UntypedStorage) -> None:
        size = self._block_bytes(storage.nbytes())
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size

    def _refill(self, tensors: Sequence[torch.Tensor]) -> None:
        """FSDP2 gathers weights into storages that it empties afterwards and fills the next time."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._count(storage)
            if storage._cdata in self._alive:
                self._refilled.add(storage._cdata)
        self._follow_refilled()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _follow_refilled(self) -> None:
        """No operation tells that a storage is emptied: look."""
        for key in list(self._refilled):
            if (storage := self._alive[key]()) is not None:
                self._measure(key, storage)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def kernel_bytes(func: Any, given: Sequence[torch.Tensor], made: torch.Tensor) -> int:
    """What a CPU kernel allocates beside its result, and frees before it returns."""
    operation = func.overloadpacket
    if func.namespace == "c10d":  # gloo copies what all processes have together
        return max((each.numel() * each.itemsize for each in given), default=0)
    if operation in _ARITHMETIC:  # operands of another dtype are converted as a whole
        return sum(each.numel() * made.itemsize for each in given if each.ndim and each.dtype != made.dtype)
    if operation is aten.native_layer_norm_backward:
        return sum(each.numel() * each.itemsize for each in given if not each.is_contiguous())
    if operation is aten.logsumexp:  # the exponentials
        return given[0].numel() * given[0].itemsize
    return 0


def _sums_gradients(func: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether autograd adds up gradients here: in place, had it not found a dispatch mode."""
    return (
        func is aten.add.Tensor
        and torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and len(given) == 2
        and given[0].shape == given[1].shape
        and given[0].dtype == given[1].dtype
    )


def peak_live_bytes(work: Callable[[], object], **options: Any) -> int:
    """Peak of the bytes that `work` holds beyond what existed before it."""
    with LiveBytes(**options) as live:
        work()
    return live.peak_bytes
