"""Where memory was made that stays: watched for a few steps, once something seems to grow.

- `CreationRecord`: for tensors, through torch's dispatcher, so also for those that only C++ holds; some
  10 µs an operation.
- `AllocationRecord`: for what is not torch's (numpy, bytes, objects), through tracemalloc; allocating
  takes a few times as long.

What piles up holds more at each of several step boundaries. Growth that comes less often than at each
step is not named here.
"""

import sys
import sysconfig
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.memory.leaks.census import Group, group_of

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])

Key = TypeVar("Key", bound=Hashable)


def piling_up(boundaries: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    """Keys that hold more bytes at every boundary than at the one before, and how many more in all."""
    return {
        key: held - boundaries[0].get(key, 0)
        for key, held in boundaries[-1].items()
        if all(later.get(key, 0) > earlier.get(key, 0) for earlier, later in pairwise(boundaries))
    }


class CreationRecord(TorchDispatchMode):
    """While entered, remembers of each tensor's storage where it was made, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, Group]] = {}
        self._boundaries: list[Counter[tuple[str, Group]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        if made and not _gives_its_input(func):
            site = _first_of_the_users(_frames(sys._getframe(1)))
            for tensor in made:
                self._remember(tensor, site)
        return result

    def _remember(self, tensor: torch.Tensor, site: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            # The Python storage lives as long as its memory, also where only C++ still holds it.
            reference = weakref.ref(storage, lambda _: self._alive.pop(key, None))
            self._alive[key] = reference, site, group_of(tensor)

    def boundary(self) -> None:
        """Note at a step's end what is alive."""
        held: Counter[tuple[str, Group]] = Counter()
        for reference, site, group in list(self._alive.values()):
            storage = reference()
            if storage is not None:
                held[site, group] += storage.nbytes()
        self._boundaries.append(held)

    def culprits(self) -> dict[tuple[str, Group], int]:
        """Lines and their tensors that piled up, and the bytes. Of several shapes the newest is told."""
        same_shape = piling_up(self._boundaries)
        same_line = piling_up([_by_line(held) for held in self._boundaries])
        newest = {_line(*key): key for key in self._boundaries[-1]}
        explained = {_line(*key) for key in same_shape}
        return same_shape | {newest[line]: more for line, more in same_line.items() if line not in explained}


class AllocationRecord:
    """Between `start` and `stop`, remembers where memory was allocated that Python's allocators know."""

    def __init__(self) -> None:
        self._boundaries: list[Counter[str]] = []
        self._started = False

    def start(self) -> None:
        if not tracemalloc.is_tracing():
            tracemalloc.start(16)
            self._started = True

    def stop(self) -> None:
        if self._started:
            tracemalloc.stop()
            self._started = False

    def boundary(self) -> None:
        """Note at a step's end what is allocated."""
        held: Counter[str] = Counter()
        for alike in tracemalloc.take_snapshot().statistics("traceback"):
            innermost_first = [(frame.filename, frame.lineno) for frame in reversed(alike.traceback)]
            if _owner(innermost_first[0][0]) != "recorder":
                held[_first_of_the_users(innermost_first)] += alike.size
        self._boundaries.append(held)

    def culprits(self) -> dict[str, int]:
        """Lines whose allocations piled up, and their bytes."""
        return piling_up(self._boundaries)


@dataclass(frozen=True)
class Recorded:
    """Bytes that piled up in `num_steps` steps: by line and tensor, and by line alone."""

    num_steps: int = 0
    tensors: Mapping[tuple[str, Group], int] = field(default_factory=dict)
    allocations: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.allocations)


class Recording:
    """Both records, from its making to `stop`."""

    def __init__(self) -> None:
        self.num_boundaries = 0
        self._tensors = CreationRecord()
        self._allocations = AllocationRecord()
        self._allocations.start()
        self._tensors.__enter__()

    def boundary(self) -> None:
        self._tensors.boundary()
        self._allocations.boundary()
        self.num_boundaries += 1

    def stop(self) -> Recorded:
        self._tensors.__exit__(None, None, None)
        self._allocations.stop()
        if self.num_boundaries < 2:
            return Recorded()
        return Recorded(self.num_boundaries - 1, self._tensors.culprits(), self._allocations.culprits())


def _line(site: str, group: Group) -> tuple[str, str, str]:
    return site, group.dtype, group.device


def _by_line(held: Mapping[tuple[str, Group], int]) -> Counter[tuple[str, str, str]]:
    total: Counter[tuple[str, str, str]] = Counter()
    for key, num_bytes in held.items():
        total[_line(*key)] += num_bytes
    return total


def _gives_its_input(func: Any) -> bool:
    """A view or an operation in place makes no storage."""
    return any(value.alias_info is not None for value in func._schema.returns)


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _first_of_the_users(frames: Iterable[tuple[str, int]]) -> str:
    """The innermost line of code that is no library's; if all are, the innermost that is not torch's."""
    line_in_library = "a library"
    for file, line in frames:
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
