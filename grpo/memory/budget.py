"""How much memory a process may hold on a device, and where that figure comes from.

1 GB is 2**30 bytes throughout, as `nvidia-smi` and the cards' names have it.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import psutil  # type: ignore[import-untyped]

GB = 2**30
USABLE_SHARE = 0.98
"""The share of the memory that a card is sold with which CUDA offers: a 24 GB card offers CUDA about 23.5
(RTX 3090: 23.69, 4090: 23.64)."""
CONTEXT_BYTES = 512 * 2**20
"""A CUDA context with cuBLAS's workspace; 0.4 to 0.6 GB by card and driver."""
KERNELS_BYTES = 192 * 2**20
"""Bytes that a context grows by once all kernels are loaded and CUDA graphs recorded: 0.15 GB on an H100."""
MAX_NON_TORCH_BYTES = 2**30
"""Bytes that a process is taken to hold beside torch's allocator, at most, if no driver tells (Hopper,
NCCL)."""

MEMORY_LIMIT = "--memory-limit"
"""The reason of a budget that a person set."""


def readable(size: float) -> str:
    """Bytes for people: 1.25 GB, 12 MB."""
    return f"{size / GB:.2f} GB" if abs(size) >= GB / 10 else f"{size / 2**20:.0f} MB"


@dataclass(frozen=True)
class Budget:
    """At most `usable_bytes` may be held by this process, for `reason`; they are `share` of what is there."""

    usable_bytes: int
    reason: str
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.usable_bytes / GB:.2f} GB ({self.reason})"


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory: all of it, what is free, and what this process holds."""

    total_bytes: int
    free_bytes: int
    ours_bytes: int

    @property
    def others_bytes(self) -> int:
        return max(0, self.total_bytes - self.free_bytes - self.ours_bytes)


def card_memory(sold_bytes: int) -> DeviceMemory:
    """An idle card that is not there, known by the size it is sold with."""
    total = int(USABLE_SHARE * sold_bytes)
    return DeviceMemory(total, total, 0)


def make_budget(memory: DeviceMemory, *, utilization: float, limit_bytes: int | None = None) -> Budget:
    """The least of a share of the device, what is free beside the others, and the limit, if any."""
    total = memory.total_bytes
    choices = [
        Budget(int(utilization * total), f"{utilization:.0%} of {total / GB:.2f} GB", utilization),
        Budget(memory.free_bytes + memory.ours_bytes, "what others leave free"),
    ]
    if limit_bytes is not None:
        choices.append(Budget(limit_bytes, MEMORY_LIMIT))
    return min(choices, key=lambda budget: budget.usable_bytes)


def host_total_and_available() -> tuple[int, int]:
    """Bytes of memory that this process could ever have, and those that nobody holds, in its container."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in _control_groups():
        limit, used = _limit_and_use(folder)
        total, available = min(total, limit), min(available, max(0, limit - used))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)  # beyond it libraries abort instead of raising
    if addresses != resource.RLIM_INFINITY:
        available = min(available, max(0, addresses - psutil.Process().memory_info().vms))
    return total, available


def data_limit() -> int | None:
    """Returns the private writable memory that `ulimit -d` lets this process have, if it is limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else limit


def _control_groups() -> Iterator[Path]:
    """Folders of the control group that this process is in and of those around it: the limit of each holds.

    They are of version 2 and of version 1's memory controller, where these are always mounted (cgroups(7)).
    A container may see the path that its host knows, of which only the end exists.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "memory" in controllers.split(","):
            mount = Path("/sys/fs/cgroup", *(["memory"] if controllers else []))
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for start, end in combinations(range(len(parts) + 1), 2):
                yield mount.joinpath(*parts[start:end])
            yield mount


_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limits of a control group, version 2 and 1, and what counts towards each; beyond `high` processes are
slowed."""


def _limit_and_use(folder: Path) -> tuple[int, int]:
    """The least of a control group's limits, and the bytes in use; files that it has read do not count."""
    limit, used = sys.maxsize, 0
    for limit_file, use_file in _LIMITS:
        with suppress(OSError, ValueError):  # no such file; the limit is "max"
            most, in_use = (
                int((folder / name).read_text(encoding="utf-8")) for name in (limit_file, use_file)
            )
            if most < limit:
                limit, used = most, in_use
    with suppress(OSError):
        stat = dict(
            line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        used -= int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return limit, max(0, used)
