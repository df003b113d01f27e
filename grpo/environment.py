"""Sets environment variables that torch and its libraries read when they are loaded, and malloc's policy.

Called before torch is loaded, so no torch here. Left out: starting again without malloc's cache of small
blocks, which only `GLIBC_TUNABLES` can switch off.
"""

import ctypes
import logging
import os
import sys
from pathlib import Path

_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_LEAST_ADDRESSES = 1.4 * 2**30
"""Measured with two threads: 1.3 GB were not enough to come to a first step, in words of our own or any."""
_GROWING = "expandable_segments:True"
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as malloc.h numbers them
KERNEL_RELEASE = Path("/proc/sys/kernel/osrelease")
KEPT_KERNELS = 32
"""Compiled for products in bf16 on a CPU, and kept."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def launched_processes() -> tuple[int, int]:
    """This process's rank, and how many a launcher has started; else (0, 1).

    Launchers are accelerate, torchrun, mpirun and SLURM's srun, which alone counts the tasks of a step.
    """
    size = _first_number(_SIZES, 1)
    return (_first_number(_RANKS, 0), size) if size > 1 else (0, 1)


def local_rank() -> int:
    """This process's number among those that a launcher has started on this machine."""
    return _first_number(_LOCAL_RANKS, 0)


def num_machines() -> int:
    """How many machines a launcher's processes run on, as far as it says so; else 1."""
    if os.environ.get("SLURM_STEP_NUM_NODES"):
        return int(os.environ["SLURM_STEP_NUM_NODES"])
    here = _first_number(("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"), 0)
    return -(-launched_processes()[1] // here) if here else 1


def is_bound_to_one_card() -> bool:
    """Whether a launcher has shown each process a card of its own alone, as SLURM and MPI do on request."""
    by_torch = os.environ.get("LOCAL_RANK") and not any(os.environ.get(name) for name in _LOCAL_RANKS[1:])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return not by_torch and bool(visible) and "," not in visible


def _first_number(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)


def command_hint(command: str) -> str:
    """How to start one of `grpo.commands` from where the present one was: what to tell people to type."""
    from_a_file = not Path(sys.argv[0]).name.startswith("grpo-lean")
    return "python train_lean.py" if command == "train" and from_a_file else f"grpo-lean {command}"


def unsupported() -> str | None:
    """Returns an error where nothing would work: on another system, or with too few addresses (`ulimit -v`).

    Where libraries run out of addresses they abort instead of raising.
    """
    if sys.platform == "win32":
        return "Windows by itself is not supported: run this in WSL2 there, or on Linux or macOS."
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= _LEAST_ADDRESSES:
        return None
    return (
        f"the limit of this process's address space (ulimit -v) is {limit / 2**30:.2f} GB: torch alone takes "
        f"more than that; give at least {_LEAST_ADDRESSES / 2**30:.2f} GB, or limit memory by --memory-limit."
    )


def is_windows_subsystem() -> bool:
    """Whether this is Linux inside Windows (WSL), whose CUDA driver is Windows' own."""
    try:
        return "microsoft" in KERNEL_RELEASE.read_text(encoding="utf-8").lower()
    except OSError:
        return False


def set_library_defaults() -> None:
    """Settings that keep memory small, and threads from waiting, where the user has not chosen otherwise."""
    # CUDA: segments that grow, instead of many of fixed sizes; lengths that vary then fragment less. In WSL
    # a process can die of the first one (pytorch#192330).
    if not is_windows_subsystem() and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", _GROWING)
    # CPU in bf16: a kernel is compiled for every shape of a product. oneDNN keeps 1024 of them, and so does
    # torch beside it, about a megabyte each: lengths that vary from step to step came to hundreds of
    # megabytes. Steps were no slower with 16 of each, and a quarter slower with 8.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_KERNELS))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(KEPT_KERNELS // 2))
    # CPU: a thread that is ahead spins for the others, by default long enough to take the core that another
    # process needs to make room for them. Beside one busy process decoding took 11 s, with this 7 s; alone
    # it made no difference (of 5,000 turns; with 1,000 it was a quarter slower).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # bitsandbytes warns of 4-bit products that it will not have to compute.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    keep_freed()


def grows_segments() -> bool:
    """Whether torch's allocator on CUDA has segments that grow, as `set_library_defaults` wants it."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return _GROWING in settings.replace(" ", "")


def keep_freed() -> None:
    """Have glibc's malloc keep what is freed for the next tensor, unless the user tunes it.

    A fresh page costs more than what is then done with it: a step of GPT-2 124 M spent a third of its time on
    them. Until memory has run out once, see `return_freed_memory`.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    tuned = "malloc.mmap" in tunables or "malloc.trim" in tunables
    if not tuned and not any(name.startswith("MALLOC_") for name in os.environ):
        _tune_malloc(mapped_from=2**31 - 1, trim_above=-1)


def return_freed_memory() -> None:
    """Give freed memory back from here on, and what is free now: it has run out, and gaps may be why."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)
        _tune_malloc(mapped_from=2**18, trim_above=2**20)


def free_bytes() -> int:
    """Returns the bytes that malloc holds and nobody uses; 0 where that is not known (glibc before 2.33,
    other libraries)."""
    mallinfo = getattr(_glibc(), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().numbers[8])  # fordblks


def _tune_malloc(*, mapped_from: int, trim_above: int) -> None:
    """mallopt(3): blocks from so many bytes on get a mapping of their own; free ends of the heap go back."""
    if (libc := _glibc()) is None:
        return
    taken = [libc.mallopt(_MMAP_THRESHOLD, mapped_from), libc.mallopt(_TRIM_THRESHOLD, trim_above)]
    if not all(taken):
        from loguru import logger

        logger.info("this C library does not keep freed memory: steps on a CPU may be up to a third slower")


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        return None
