"""What glibc's malloc keeps of memory that was freed. Without glibc nothing here does anything.

Tensors on a CPU come from malloc. A fresh page costs more than what is then done with it: a step of GPT-2
124 M spent a third of its time on them. So freed memory is kept for the next tensor (`keep_freed`), within a
heap of fixed size where there is a limit (`bound_heap`). No torch here: it is called before torch is loaded.
"""

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them; mallopt(3)
_LARGE = 64 * 2**10
"""Bytes from which a block gets a mapping of its own, where those are to go back."""
_NEVER = -1
_PIECE = 2**29
"""Bytes that are taken from the heap at once; from 2**31 on a block is mapped whatever is set."""


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


def bound_heap(size: int) -> None:
    """Keep what is freed within a heap that has `size` bytes free now, and never grows.

    What does not fit into its gaps gets a mapping of its own, which goes back when it is freed: the heap
    cannot creep up to a limit.
    """
    keep_freed()
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        pieces = [libc.malloc(min(_PIECE, size - start)) for start in range(0, size, _PIECE)]
        for piece in pieces:
            libc.free(piece)
        _set(mapped_from=_LARGE, trim=_NEVER)


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
