"""Fake tensors in half the time: what an operation makes is remembered by the sizes it is given.

`FakeTensorMode` looks each time for constants, symbols and decompositions, half a millisecond and more an
operation. Views and operations in place need none of it, and all others come again in every layer: the first
time their meta kernels are asked. Left to `FakeTensorMode`: operations made of others, those without tensors
or whose meta kernel is not as a CPU's, and tensors whose value is known.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from grpo.memory.live import LiveBytes

_CPU, _META = torch.device("cpu"), torch._C.DispatchKey.Meta
_aten = torch.ops.aten
_OTHERWISE_ON_CPUS = {_aten.native_layer_norm.default, _aten._embedding_bag_forward_only.default}
"""Their meta kernels make what a card's kernels do."""


class _Outline(NamedTuple):
    """Of a tensor that shares its storage with no other."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Value(NamedTuple):
    """Of what is no tensor; by its type, too, as 1, 1.0 and True are equal and not the same."""

    type: type
    value: Any


class PlainFakeMode(FakeTensorMode):
    """Torch's own, put right where it does not know what a CPU's kernel makes."""

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made: Any = super().dispatch(func, types, args, kwargs or {})
        if func is torch.ops.aten._embedding_bag_forward_only.default and args[0].dtype == torch.bfloat16:
            # These sums go the fast way (aten/src/ATen/native/EmbeddingBag.cpp), which does without a list of
            # the bag of each index; torch/_meta_registrations.py knows that of fp32 and fp16 only.
            made = (made[0], made[1].new_empty(0), *made[2:])
        return made


class QuickFakeMode(PlainFakeMode):
    """For tensors that all say they are the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_enabled = False  # ours is in its place
        self._known: dict[Hashable, Any] = {}
        self._live: LiveBytes | None = None

    @contextmanager
    def counting(self, live: LiveBytes) -> Iterator[None]:
        """Inside, `live` notes what operations make: a mode of its own around this one would take as long."""
        self._live = live
        try:
            yield
        finally:
            self._live = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so that each operation need not say so."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called for each operation."""
        if func is torch.ops.prim.device.default:  # half of all calls, from within torch
            return args[0].fake_device
        kwargs, live = kwargs or {}, self._live
        if live is None:
            return self._make(func, types, args, kwargs)
        self._live = None  # what operations are made of is not counted
        try:
            made = self._make(func, types, args, kwargs)
        finally:
            self._live = live
        live.note(func, args, kwargs, made)
        return made

    def _make(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kind = _kind(func)
        if kind == "other" or not _all_fake(args):
            return super().dispatch(func, types, args, kwargs)
        if kind == "in place":
            return kwargs["out"] if "out" in kwargs else args[0]
        if kind == "view":
            return self._by_kernel(func, args, kwargs)
        key = (func, torch.get_default_dtype(), _outlines(args), _outlines(tuple(kwargs.items())))
        if key not in self._known:
            made = self._by_its_meta_kernel(func, args, kwargs)
            if made is None:
                made = super().dispatch(func, types, args, kwargs)
            if _all_fake(made if isinstance(made, tuple | list) else (made,)):
                self._known[key] = None if _share_storage(made, args) else _outlines(made)
            return made
        if (known := self._known[key]) is None:  # a view that does not say so
            return self._by_kernel(func, args, kwargs)
        return self._from_outlines(known)

    def _by_its_meta_kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What torch's own mode comes to in the end, for most operations; None for the others."""
        if "device" in kwargs or not any(isinstance(value, Tensor) for value in args):
            return None
        return self._by_kernel(func, args, kwargs) if _has_meta_kernel(func) else None

    def _by_kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return FakeTensor(self, made, _CPU)
        return tuple(one if one is None else FakeTensor(self, one, _CPU) for one in made)

    def _from_outlines(self, known: Any) -> Any:
        if type(known) is _Outline:
            with in_kernel_invocation_manager(self):
                made = torch.empty_strided(known.shape, known.strides, dtype=known.dtype, device="meta")
            return FakeTensor(self, made, _CPU)
        return known.value if type(known) is _Value else tuple(map(self._from_outlines, known))


@cache
def _kind(func: Any) -> str:
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.inplace_view in func.tags:
        return "other"
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return "other"  # made of others, which come here by themselves
    if func._schema.is_mutable:
        in_place = func._schema.name.endswith("_") or func._schema.overload_name == "out"
        return "in place" if in_place and len(func._schema.returns) == 1 else "other"
    return "view" if func.is_view else "fresh"


def _has_meta_kernel(func: Any) -> bool:
    """Whether it has one that makes tensors, those that a CPU would make."""
    tensors = all(type(each.type) is torch.TensorType for each in func._schema.returns)
    return tensors and func not in _OTHERWISE_ON_CPUS and func.has_kernel_for_dispatch_key(_META)


def _all_fake(values: Sequence[Any]) -> bool:
    """Whether all tensors among them are fake, and none has a known value."""
    for value in values:
        for one in value if type(value) is list else (value,):
            if isinstance(one, Tensor) and (not isinstance(one, FakeTensor) or one.constant is not None):
                return False
    return True


def _outlines(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Outline(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_outlines, value))
    return _Value(type(value), value)


def _share_storage(made: Any, args: Sequence[Any]) -> bool:
    storages = [
        value.untyped_storage()._cdata for value in tree_leaves((made, args)) if isinstance(value, Tensor)
    ]
    return len(set(storages)) < len(storages)
