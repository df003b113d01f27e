"""What glibc's malloc keeps of memory that was freed. Without glibc nothing here does anything.

Tensors on a CPU come from malloc. A fresh page costs more than what is then done with it: a step of GPT-2
124 M spent a third of its time on them. So freed memory is kept for the next tensor (`keep_freed`), until it
has run out once (`give_back`). No torch here: it is called before torch is loaded.
"""

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them; mallopt(3)
_LARGE = 2**20
"""Bytes from which a block gets a mapping of its own, where those are to go back."""
_NEVER = -1

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip
"""Of mallinfo2(3)."""


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def user_tunes_malloc(ours: str) -> bool:
    """Whether the environment says something about malloc, other than `ours` of GLIBC_TUNABLES."""
    tunables = os.environ.get("GLIBC_TUNABLES", ours)
    return tunables != ours or any(name.startswith("MALLOC_") for name in os.environ)


def keep_freed() -> None:
    """Keep all that is freed for what comes next."""
    _set(mapped_from=2**31 - 1, trim=_NEVER)


def give_back() -> None:
    """Give freed memory back from here on, and what is free now: it has run out, and gaps may be why."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        _set(mapped_from=_LARGE, trim=_LARGE)


def free_bytes() -> int:
    """What malloc holds and nobody uses; 0 where that is not known (glibc before 2.33, other libraries)."""
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo.restype = _Info
    return int(mallinfo().fordblks)


def _set(*, mapped_from: int, trim: int) -> None:
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_MMAP_THRESHOLD, ctypes.c_int(mapped_from))
        mallopt(_TRIM_THRESHOLD, ctypes.c_int(trim))
