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
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch

from grpo.memory import live

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_TORCH = str(Path(torch.__file__).parent)
_RECORDER = (str(Path(__file__).parent), str(Path(live.__file__)))


@dataclass(frozen=True)
class Culprit:
    """Objects that piled up, by how many bytes in how many steps, and the line that made them, where
    known."""

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
    """Objects that piled up while a recording ran, and the looks of all tensors that did."""

    culprits: tuple[Culprit, ...] = ()
    looks: frozenset[str] = frozenset()


class Recording(live.LiveBytes):
    """From its making to `stop`, remembers of what is made the line, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__(None)
        self._made: dict[int, tuple[str, str]] = {}  # where, and how a tensor looks, by storage
        self._boundaries: list[Counter[tuple[str, bool]]] = []  # bytes by line and whether they are tensors'
        self._looks: defaultdict[str, list[str]] = defaultdict(list)  # at the last boundary, by line
        self._traces = not tracemalloc.is_tracing()
        if self._traces:
            tracemalloc.start(16)
        self.__enter__()

    @property
    def num_boundaries(self) -> int:
        return len(self._boundaries)

    def _count(self, tensor: torch.Tensor) -> None:
        super()._count(tensor)
        line = _line_of_the_user(_frames(sys._getframe(1)))
        self._made[tensor.untyped_storage()._cdata] = line, _look(tensor)

    def boundary(self) -> None:
        """Note at a step's end what is there."""
        held: Counter[tuple[str, bool]] = Counter()
        self._looks.clear()
        for key, (_, size) in list(self._alive.items()):
            line, look = self._made[key]
            held[line, True] += size
            self._looks[line].append(look)
        for blocks in tracemalloc.take_snapshot().statistics("traceback"):
            innermost_first = [(frame.filename, frame.lineno) for frame in reversed(blocks.traceback)]
            if all(_owner(file) != "recorder" for file, _ in innermost_first):
                held[_line_of_the_user(innermost_first), False] += blocks.size
        self._boundaries.append(held)

    def stop(self) -> Recorded:
        """Lines that held more bytes at every boundary than at the one before."""
        self.__exit__(None, None, None)
        if self._traces:
            tracemalloc.stop()
        if len(self._boundaries) < 2:
            return Recorded()
        first, last = self._boundaries[0], self._boundaries[-1]
        culprits, looks = [], set[str]()
        for key in last:
            if all(before[key] < after[key] for before, after in pairwise(self._boundaries)):
                line, of_tensors = key
                what = "allocations outside torch"
                if of_tensors:
                    what = f"tensors such as {self._looks[line][-1]}"
                    looks.update(self._looks[line])
                site, num_steps = line.removeprefix(f"{Path.cwd()}/"), len(self._boundaries) - 1
                culprits.append(Culprit(what, last[key] - first[key], num_steps, site))
        return Recorded(tuple(culprits), frozenset(looks))


def _look(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _line_of_the_user(innermost_first: Iterable[tuple[str, int]]) -> str:
    """The first line of code that is no library's; if all are, the first that is not torch's."""
    lines = [(_owner(file), f"{file}:{line}") for file, line in innermost_first]
    choices = (line for wanted in ("user", "library") for owner, line in lines if owner == wanted)
    return next(choices, "a library")


@cache
def _owner(file: str) -> Literal["recorder", "torch", "library", "user"]:
    if file.startswith(_RECORDER):
        return "recorder"
    if file.startswith((_TORCH, "<")):
        return "torch"
    return "library" if file.startswith(_LIBRARIES) else "user"
