"""A limit that the system enforces, and malloc's heap fitted into it.

Far from a limit malloc may keep what it likes. Near one its heap gets a size that it never exceeds: it would
creep up to the limit otherwise, by gaps that nothing fits into.
"""

import sys

import torch

from grpo import malloc
from grpo.memory.budget import CONTEXT_BYTES
from grpo.memory.monitor import MemoryMonitor

AT_EASE = 2
"""A limit of so many times the need is far away."""
HEAP_SHARE = 0.8
"""Of what is added, for the heap; the rest is for what its gaps are too small for."""


def is_near(limit_bytes: float, needed_bytes: float) -> bool:
    """Whether what is freed and kept could come to count."""
    return limit_bytes < AT_EASE * needed_bytes


def limit_worker(monitor: MemoryMonitor, limit_bytes: int, added_bytes: float) -> None:
    """Enforce a limit on a process that has no plan of its own, and is expected to hold so much more."""
    if monitor.device.type == "cpu" and is_near(limit_bytes, monitor.in_use_bytes() + added_bytes):
        room = limit_bytes - monitor.memory().ours_bytes  # gaps in the heap are ours, too
        malloc.bound_heap(int(HEAP_SHARE * max(0, min(room, added_bytes))))
    limit_memory(monitor.device, limit_bytes, monitor.memory().total_bytes)


def limit_memory(device: torch.device, limit_bytes: int, total_bytes: int) -> str:
    """Enforce a limit where the system can, and say in words whether it does.

    On CUDA the allocator's share of the card, less the context; on Linux RLIMIT_DATA of this process
    (private writable memory). Elsewhere the limit only guides the plan.
    """
    if device.type == "cuda":
        share = min(1.0, max(0, limit_bytes - CONTEXT_BYTES) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, device)
        return f"enforced by the CUDA allocator ({share:.1%} of the card)"
    if device.type == "cpu" and sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
        return "enforced by the system (RLIMIT_DATA)"
    return "a guide for the plan only: this system cannot enforce it"
