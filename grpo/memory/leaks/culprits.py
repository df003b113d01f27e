"""The culprits of a leak: which tensors are alive, and on which lines was made what stays.

- `count_tensors`: live tensors by their look, as far as Python's garbage collector knows them, in 0.3 µs for
  each object that it tracks; `gc.freeze()` takes what exists by then out of the count.
- `Recording`: where memory is made, for a few steps, once something seems to grow. Of tensors through torch's
  dispatcher, so also of those that only C++ holds (10 µs an operation); of all else that Python's allocators
  know (numpy, bytes, objects) through tracemalloc, with which allocating takes a few times as long.

Left out: tensors that are not strided, and the lines of what does not grow at each step.
"""

import gc
import sys
import sysconfig
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Culprit:
    """What piled up, by how many bytes in how many steps, and the line that made it, where known."""

    what: str
    num_bytes: int
    num_steps: int
    site: str | None = None

    @property
    def bytes_per_step(self) -> float:
        return self.num_bytes / self.num_steps

    def __str__(self) -> str:
        made = f", created at {self.site}" if self.site else ""
        return f"{self.what}, {self.num_bytes / 2**20:.1f} MB in {self.num_steps} steps{made}"


def count_tensors() -> Counter[str]:
    """Bytes of live tensors by their look; a storage counts once, however many tensors view it."""
    held: Counter[str] = Counter()
    seen: set[int] = set()
    for thing in gc.get_objects():
        # type(), not isinstance: a proxy's __class__ would load whatever it stands for.
        if not issubclass(type(thing), torch.Tensor) or thing.layout is not torch.strided:
            continue
        tensor = thing if thing._base is None else thing._base
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage._cdata not in seen:
            seen.add(storage._cdata)
            held[_look(tensor)] += storage.nbytes()
    return held


class Recorded(NamedTuple):
    """What piled up while a recording ran, and the looks of all tensors that did."""

    culprits: tuple[Culprit, ...] = ()
    looks: frozenset[str] = frozenset()


class Recording(TorchDispatchMode):
    """From its making to `stop`, remembers of what is made the line, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, str]] = {}
        self._boundaries: list[Counter[tuple[str, bool]]] = []  # bytes by line and whether they are tensors'
        self._looks: dict[str, list[str]] = {}  # of the tensors at the last boundary, by line
        self._traces = not tracemalloc.is_tracing()
        if self._traces:
            tracemalloc.start(16)
        self.__enter__()

    @property
    def num_boundaries(self) -> int:
        return len(self._boundaries)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(value.alias_info is not None for value in func._schema.returns):
            return result  # a view or an operation in place makes no storage
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        site = _line_of_the_user(_frames(sys._getframe(1))) if made else ""
        for tensor in made:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._alive:
                # The Python storage lives as long as its memory, also where only C++ still holds it.
                reference = weakref.ref(storage, partial(self._forget, key))
                self._alive[key] = reference, site, _look(tensor)
        return result

    def _forget(self, key: int, _: object) -> None:
        self._alive.pop(key, None)

    def boundary(self) -> None:
        """Note at a step's end what is there."""
        held: Counter[tuple[str, bool]] = Counter()
        self._looks.clear()
        for reference, site, look in list(self._alive.values()):
            if (storage := reference()) is not None:
                held[site, True] += storage.nbytes()
                self._looks.setdefault(site, []).append(look)
        for alike in tracemalloc.take_snapshot().statistics("traceback"):
            innermost_first = [(frame.filename, frame.lineno) for frame in reversed(alike.traceback)]
            if all(_owner(file) != "recorder" for file, _ in innermost_first):
                held[_line_of_the_user(innermost_first), False] += alike.size
        self._boundaries.append(held)

    def stop(self) -> Recorded:
        """Lines that held more bytes at every boundary than at the one before."""
        self.__exit__(None, None, None)
        if self._traces:
            tracemalloc.stop()
        if len(self._boundaries) < 2:
            return Recorded()
        first, last, num_steps = self._boundaries[0], self._boundaries[-1], len(self._boundaries) - 1
        piled = [key for key in last if all(a[key] < b[key] for a, b in pairwise(self._boundaries))]
        culprits, looks = [], set[str]()
        for site, of_tensors in piled:
            what = "allocations outside torch"
            if of_tensors:
                what = f"tensors such as {self._looks[site][-1]}"
                looks.update(self._looks[site])
            more = last[site, of_tensors] - first[site, of_tensors]
            culprits.append(Culprit(what, more, num_steps, site.removeprefix(f"{Path.cwd()}/")))
        return Recorded(tuple(culprits), frozenset(looks))


def _look(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _line_of_the_user(innermost_first: Iterable[tuple[str, int]]) -> str:
    """The first line of code that is no library's; if all are, the first that is not torch's."""
    line_in_library = "a library"
    for file, line in innermost_first:
        owner = _owner(file)
        if owner == "user":
            return f"{file}:{line}"
        if owner == "library" and line_in_library == "a library":
            line_in_library = f"{file}:{line}"
    return line_in_library


@cache
def _owner(file: str) -> Literal["recorder", "torch", "library", "user"]:
    if file.startswith(_HERE):
        return "recorder"
    if file.startswith((_TORCH, "<")):
        return "torch"
    return "library" if file.startswith(_LIBRARIES) else "user"
