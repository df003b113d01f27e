"""Bytes of the tensors that are alive, counted operation by operation; works on fake tensors too.

Counts what the allocator is asked for. What kernels use and free within themselves no mode sees; of
that, `kernel_bytes` knows what is large on the CPU. Costs some microseconds an operation: for traces
and calibration, not for every step. Left out: tensors that existed before (weights, inputs), which the
caller knows, and oneDNN's scratch space (in bf16 some hundred kB a thread; with tiles a weight's bytes).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ARITHMETIC = (aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_)


class LiveBytes(TorchDispatchMode):
    """Inside it, `live_bytes` are those of the storages made so far and not yet freed.

    A storage counts once however many tensors view it, with what the allocator takes for its size
    (`block_bytes`). Storages on other devices than `device_type` do not count; None: all do.
    """

    def __init__(
        self, device_type: str | None = "cpu", block_bytes: Callable[[int], int] = lambda size: size
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._device_type, self._block_bytes = device_type, block_bytes
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if made := list(_tensors((result,))):
            self._note(func, list(_tensors((*args, *(kwargs or {}).values()))), made)
        return result

    def _note(self, func: Any, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        before = self.live_bytes
        for tensor in made:
            storage = tensor.untyped_storage()
            # A fake tensor's storage is meta.
            here = self._device_type is None or storage.device.type in (self._device_type, "meta")
            if here and storage._cdata not in storages and storage._cdata not in self._alive:
                self._count(tensor)
        within = kernel_bytes(func, inputs, made[0]) if self._device_type == "cpu" else 0
        if self.live_bytes + within > before and not _sums_gradients(func, inputs):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + within)

    def _count(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage, which is new."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, self._block_bytes(storage.nbytes())

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.live_bytes -= self._alive.pop(key)[1]

        # The Python storage lives as long as its memory, also where only C++ still holds it.
        self._alive[key] = weakref.ref(storage, freed), size
        self.live_bytes += size


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def kernel_bytes(func: Any, inputs: Sequence[torch.Tensor], made: torch.Tensor) -> int:
    """Returns the bytes that a CPU kernel allocates beside its result, and frees before it returns."""
    operation = func.overloadpacket
    if func.namespace == "c10d":  # gloo copies what all processes have together
        return max((tensor.nbytes for tensor in inputs), default=0)
    if operation in _ARITHMETIC:  # operands of another dtype are converted as a whole
        others = (tensor for tensor in inputs if tensor.ndim and tensor.dtype != made.dtype)
        return sum(tensor.numel() * made.itemsize for tensor in others)
    if operation is aten.native_layer_norm_backward:
        return sum(tensor.nbytes for tensor in inputs if not tensor.is_contiguous())
    return inputs[0].nbytes if operation is aten.logsumexp else 0  # the exponentials


def _sums_gradients(func: Any, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether autograd adds up gradients here: in place, had it not found a dispatch mode."""
    if func is not aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    kinds = [(tensor.shape, tensor.dtype) for tensor in inputs]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def peak_live_bytes(work: Callable[[], object], **options: Any) -> int:
    """Peak of the bytes that `work` holds beyond what existed before it."""
    with LiveBytes(**options) as live:
        work()
    return live.peak_bytes
