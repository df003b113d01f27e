"""How much memory a process may hold on a device, and where that figure comes from.

1 GB is 2**30 bytes throughout, as `nvidia-smi` and the cards' names have it.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

GB = 2**30
USABLE_SHARE = 0.98
"""Of the memory a card is sold with: a 24 GB card offers CUDA about 23.5 (RTX 3090: 23.69, 4090: 23.64)."""
CONTEXT_BYTES = 512 * 2**20
"""A CUDA context with cuBLAS's workspace; 0.4 to 0.6 GB by card and driver."""
KERNELS_BYTES = 192 * 2**20
"""What a context grows by once all kernels are loaded and CUDA graphs recorded: 0.15 GB on an H100."""
MOST_OUTSIDE_BYTES = 2**30
"""What a process is taken to hold besides torch's allocator, at most, where nobody tells: Hopper, NCCL."""

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

    def shared_by(self, processes: int) -> "DeviceMemory":
        """The part of one of so many processes that do the same beside each other on the device."""
        return DeviceMemory(self.total_bytes // processes, self.free_bytes // processes, self.ours_bytes)


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


_LIMITS = (
    ("memory.max", "memory.current"), ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)  # fmt: skip
"""Of a control group, version 2 and 1, and what counts towards each; beyond `high` processes are slowed."""


def host_total_and_available() -> tuple[int, int]:
    """Bytes of memory this process could ever have, and those nobody holds; minds a container's limit."""
    if sys.platform == "linux":
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        for folder in _cgroups():
            limit, used = _limit_and_use(folder)
            total, available = min(total, limit), min(available, max(0, limit - used))
        return total, min(available, _room_of_addresses())
    import os

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def data_limit() -> int | None:
    """What `ulimit -d` lets this process have of private writable memory, if anything does."""
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else limit


def _room_of_addresses() -> int:
    """What `ulimit -v` leaves this process. Beyond it libraries abort where Python would raise."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - pages * resource.getpagesize())


def _cgroups() -> Iterator[str]:
    """Folders of the control group this process is in and of those around it; the limit of each holds.

    Where they are always mounted, of version 2 and of version 1's memory controller (cgroups(7)). A container
    may see the path that its host knows, of which it has only the end.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, names, path in (line.split(":", 2) for line in groups):
        if names and "memory" not in names.split(","):
            continue
        mount = "/sys/fs/cgroup/memory" if names else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for start, end in combinations(range(len(parts) + 1), 2):
            yield "/".join([mount, *parts[start:end]])
        yield mount


def _limit_and_use(folder: str) -> tuple[int, int]:
    """The least of a group's limits, and what counts towards it and cannot be dropped."""
    limit, used = sys.maxsize, 0
    for limit_name, use_name in _LIMITS:
        try:
            text = Path(f"{folder}/{limit_name}").read_text().strip()
            use = int(Path(f"{folder}/{use_name}").read_text())
        except (OSError, ValueError):
            continue
        if text.isdigit() and int(text) < limit:
            limit, used = int(text), max(0, use - _file_cache(folder))
    return limit, used


def _file_cache(folder: str) -> int:
    """Bytes of files a cgroup has read, which the system drops before memory runs out."""
    try:
        lines = Path(f"{folder}/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split() for line in lines)
    return int(sizes.get("total_inactive_file", sizes.get("inactive_file", 0)))
