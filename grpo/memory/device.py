"""A device's memory: all of it, this process's part now and at a peak, and the most that it may hold.

On an accelerator the allocator's own statistics are read, and the driver's for what is not torch's; on the
host the resident set and its high-water mark, which Linux lets a process reset. Tensor bytes on the host are
counted exactly, by `LiveBytes`, where that is asked for, as it costs time.
"""

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from grpo.environment import free_bytes, keep_freed, return_freed_memory
from grpo.memory.budget import (
    CONTEXT_BYTES,
    GB,
    KERNELS_BYTES,
    MAX_NON_TORCH_BYTES,
    Budget,
    DeviceMemory,
    data_limit,
    host_total_and_available,
    make_budget,
)
from grpo.memory.live import LiveBytes

FIRST_SLACK = 0.1
"""On a host, where malloc keeps gaps between tensors; elsewhere utilization leaves room for that."""
GROWTH_BYTES = 64 * 2**20
"""Bytes that a process on a host grows by after its plan: kernels for new shapes (in bf16), code, texts."""
MALLOC_OVERHEAD = 3.0
"""Times what a phase adds that malloc may come to hold where it keeps what is freed (2.6 were seen)."""


@dataclass(frozen=True)
class MemoryReading:
    """Bytes on one device. On the host, allocated and reserved are both what the process holds."""

    device: str
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int

    def as_metrics(self) -> dict[str, float]:
        sizes = {"allocated": self.allocated_bytes, "reserved": self.reserved_bytes}
        if self.device == "CPU":
            sizes = {"process": self.allocated_bytes}
        sizes["peak"] = self.peak_bytes
        return {f"memory/{name}_gb": size / GB for name, size in sizes.items()}

    def __str__(self) -> str:
        sizes = (f"{name[7:-3]}: {size:.2f}GB" for name, size in self.as_metrics().items())
        return f"{self.device} memory - {', '.join(sizes)}"


@dataclass
class Peak:
    """The measured peak of a pass, in bytes; filled in when it ends.

    used_before_bytes: by the process when it began, less what an allocator keeps for all.
    process_before_bytes: by the process when it began, context and libraries included; process_bytes: later.
    added_bytes: by tensors, beyond those that were there; None where they were not counted.
    """

    used_before_bytes: int = 0
    process_before_bytes: int = 0
    process_bytes: int = 0
    added_bytes: int | None = None
    seconds: float = 0.0


class Device:
    """One device, and this process's part of it.

    utilization: share of it that may be held. limit_bytes: the most. ranks_on_device: processes that do
    the same on it. Where private memory is limited, by us or by `ulimit -d`, a process holds that: touched
    or not.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        utilization: float = 0.85,
        limit_bytes: int | None = None,
        ranks_on_device: int = 1,
        counts_by_driver: bool = False,
    ) -> None:
        """counts_by_driver: whether torch's counters may hold memory that is not mapped.

        vLLM's sleep mode unmaps what torch goes on counting as allocated (vllm#17117, #33625).
        """
        self._counts_by_driver = counts_by_driver
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.utilization, self.limit_bytes, self._ranks_on_device = utilization, limit_bytes, ranks_on_device
        self.slack = FIRST_SLACK if self.device.type in ("cpu", "mps") else 0.0
        """The share of tensors' bytes that is held beside them, before that is measured."""
        self._data_limit = data_limit() if self.on_host else None
        limited = limit_bytes is not None or self._data_limit is not None
        self._counts_private = limited and self.on_host and sys.platform == "linux"
        self._cap_bytes: float = math.inf
        """The limit that `capped` enforces."""
        self._enforce: Callable[[int], str] | None = None
        self._peak_bytes = self._least_outside_bytes = self._least_used_bytes = 0

    # ---------------------------------------------------------------------------------- what there is

    def memory(self) -> DeviceMemory:
        """All of the device's memory, the free part, and this process's."""
        if self.on_host:
            total, available = host_total_and_available()
            ours, limit = self._process_bytes(), self._data_limit
            if limit is not None:
                total, available = min(total, limit), max(0, min(available, limit - ours))
            return DeviceMemory(total, available, ours)
        if self.device.type == "mps":
            total, ours = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
            return DeviceMemory(total, total - ours, ours)
        free, total = torch.accelerator.get_memory_info(self.device)
        ours = torch.accelerator.memory_reserved(self.device) + self._outside_allocator_bytes()
        return DeviceMemory(total, free, min(ours, total - free))

    def budget(self) -> Budget:
        """Returns the bytes that this process may hold now, beside whatever others do."""
        all_of_it = self.memory()
        part = DeviceMemory(
            all_of_it.total_bytes // self._ranks_on_device,
            all_of_it.free_bytes // self._ranks_on_device,
            all_of_it.ours_bytes,
        )
        return make_budget(part, utilization=self.utilization, limit_bytes=self.limit_bytes)

    def room_bytes(self) -> int:
        """Bytes that tensors may add to what is held now, or in a while, by a process that is `capped`.

        Where others have left more than the cap allows, the cap is raised first. Some memory is never planned
        for on a capped host: a kernel that cannot be compiled on its last bytes is never tried again, and
        torch's own product in bf16 is 20 times as slow.
        """
        usable_bytes = self.budget().usable_bytes
        if self._enforce is not None and usable_bytes > self._cap_bytes:
            self._cap_bytes, _ = usable_bytes, self._enforce(usable_bytes)
        return usable_bytes - max(self.used_bytes(), self._least_used_bytes)

    def choose_malloc_policy(self, added_bytes: float) -> None:
        """Have a limited process keep what it frees, which is faster, only where there is room for its gaps.

        added_bytes: by the phase that adds most.
        """
        if self.is_limited:
            (keep_freed if MALLOC_OVERHEAD * added_bytes <= self.room_bytes() else return_freed_memory)()

    @property
    def is_limited(self) -> bool:
        """Whether a host's process may hold less than the machine has, by whoever limits it."""
        machine = psutil.virtual_memory().total
        return self.on_host and (self.limit_bytes is not None or self.memory().total_bytes < machine)

    def used_bytes(self) -> int:
        """Returns the bytes that are not free to what this process does next: without what an allocator keeps
        for all.

        What a CUDA graph's pool keeps is for its replays alone.
        """
        if self.on_host:
            return self._process_bytes() - free_bytes()
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory()
        allocated = torch.accelerator.memory_allocated(self.device)
        if self._counts_by_driver:
            free, total = torch.accelerator.get_memory_info(self.device)
            kept = torch.accelerator.memory_reserved(self.device) - allocated  # of nobody's, and so free
            return max(0, total - free - kept)
        outside = max(self._least_outside_bytes, self._outside_allocator_bytes())
        return allocated + self._kept_for_graphs_bytes() + outside

    def neighbours(self) -> str:
        """Who else holds memory on the card, for an error message; empty if nobody is known to."""
        if self.device.type != "cuda":
            return ""
        with suppress(Exception):  # it is only a courtesy
            lines = torch.cuda.list_gpu_processes(self.device).splitlines()
            processes = (" ".join(line.split()) for line in lines if "process" in line)
            return ", ".join(line for line in processes if f"process {os.getpid()} " not in line)
        return ""

    def _outside_allocator_bytes(self) -> int:
        """Returns the bytes that this process holds beside torch's allocator (context, kernels, NCCL), within
        the usual.

        The driver tells what all processes hold together.
        """
        if self.device.type != "cuda":
            return 0
        free, total = torch.accelerator.get_memory_info(self.device)
        reserved = torch.accelerator.memory_reserved(self.device)
        return max(0, min(MAX_NON_TORCH_BYTES, total - free - reserved))

    def _kept_for_graphs_bytes(self) -> int:
        """Returns the bytes that are reserved for CUDA graphs and that nothing holds between their
        replays."""
        if self.device.type != "cuda":
            return 0
        return sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) != (0, 0) and segment["device"] == (self.device.index or 0)
        )

    def _process_bytes(self) -> int:
        return _status()["VmData"] if self._counts_private else resident_bytes()

    # ------------------------------------------------------------------------------------------ peaks

    def read(self) -> MemoryReading:
        """Returns the bytes that are held now, and the peak since `reset_peak`."""
        if self.on_host:
            resident = resident_bytes()
            return MemoryReading("CPU", resident, resident, max(_status()["VmHWM"], self._peak_bytes))
        if self.device.type == "mps":
            reserved = torch.mps.driver_allocated_memory()
            return MemoryReading("GPU 0", torch.mps.current_allocated_memory(), reserved, reserved)
        return MemoryReading(
            f"GPU {self.device.index or 0}",
            torch.accelerator.memory_allocated(self.device),
            torch.accelerator.memory_reserved(self.device),
            max(torch.accelerator.max_memory_allocated(self.device), self._peak_bytes),
        )

    def reset_peak(self) -> None:
        """Peaks of `read` are from here on."""
        self._peak_bytes = 0
        if self.on_host and sys.platform == "linux":
            with suppress(OSError):  # not permitted in some sandboxes: the peak is then the whole life's
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): resets VmHWM
        elif self.device.type not in ("cpu", "mps"):  # MPS keeps no peak
            torch.accelerator.reset_peak_memory_stats(self.device)

    @contextmanager
    def measure(self, *, exact: bool = False) -> Iterator[Peak]:
        """Yields the peak inside, filled in at the end. exact: count tensors on the host, one by one."""
        before = self.read()
        self.reset_peak()
        self._peak_bytes = before.peak_bytes  # `read` goes on with it
        peak = Peak(self.used_bytes(), self._process_peak_bytes())
        live, start = LiveBytes() if exact and self.on_host else None, time.perf_counter()
        try:
            with live or nullcontext():
                yield peak
        finally:
            peak.seconds, peak.process_bytes = time.perf_counter() - start, self._process_peak_bytes()
            if live is not None:
                peak.added_bytes = live.peak_bytes
            elif self.device.type not in ("cpu", "mps"):
                allocated = torch.accelerator.max_memory_allocated(self.device)
                peak.added_bytes = allocated - before.allocated_bytes

    def _process_peak_bytes(self) -> int:
        """The most that the process has held since the last reset."""
        if self.on_host:
            now = _status()
            return now["VmHWM"] + (now["VmData"] - now["VmRSS"] if self._counts_private else 0)
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        return torch.accelerator.max_memory_reserved(self.device) + self._outside_allocator_bytes()

    # ------------------------------------------------------------------------------------------- a cap

    @contextmanager
    def capped(self) -> Iterator[str]:
        """Inside, what goes beyond the budget is an error that `survive` knows, where the system can do that.

        On CUDA the allocator's share of the card, less what the process holds beside it, now and once its
        kernels are loaded; on Linux RLIMIT_DATA of this process (private writable memory). Gives how, in
        words. A host's process that is limited gives back what it frees, at the cost of fresh pages.
        """
        with ExitStack() as limited:
            enforce = self._cap_by_system(limited)
            limited.callback(setattr, self, "_enforce", None)
            limited.callback(setattr, self, "_cap_bytes", math.inf)
            self._cap_bytes = self.budget().usable_bytes
            self._enforce = enforce
            yield enforce(int(self._cap_bytes))

    def _cap_by_system(self, limited: ExitStack) -> Callable[[int], str]:
        """Returns what has the system enforce a number of bytes, again if need be, and says how.

        limited: what takes the cap away in the end.
        """
        if self.device.type == "cuda":
            outside = max(CONTEXT_BYTES, self._outside_allocator_bytes() + KERNELS_BYTES)
            self._least_outside_bytes = min(MAX_NON_TORCH_BYTES, outside)
            limited.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self.device)
            return self._cap_allocator
        if self.on_host and sys.platform == "linux":
            status, before = _status(), resource.getrlimit(resource.RLIMIT_DATA)
            untouched = 0 if self._counts_private else max(0, status["VmData"] - status["VmRSS"])
            limited.callback(resource.setrlimit, resource.RLIMIT_DATA, before)
            if self.is_limited:
                limited.callback(keep_freed)
                return_freed_memory()
            self._least_used_bytes = self.used_bytes() + GROWTH_BYTES
            return lambda usable_bytes: _cap_private_memory(usable_bytes + untouched, before)
        return lambda _: "a guide for the plan only: this system cannot enforce it"

    def _cap_allocator(self, usable_bytes: int) -> str:
        share = max(0, usable_bytes - self._least_outside_bytes) / self.memory().total_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)
        return f"enforced by the CUDA allocator ({share:.1%} of the card)"


def _cap_private_memory(most_bytes: int, before: tuple[int, int]) -> str:
    """Caps what a Linux process may hold, no higher than the limits that it came with."""
    soft, hard = before
    most = most_bytes if soft == resource.RLIM_INFINITY else min(most_bytes, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    return "enforced by the system (RLIMIT_DATA)"


class AbsentCard(Device):
    """A card that is not there: it is planned for, and nothing runs on it."""

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        utilization: float,
        limit_bytes: int | None = None,
        slack: float = 0.0,
    ) -> None:
        super().__init__("meta", utilization=utilization, limit_bytes=limit_bytes)
        self.slack, self._memory = slack, memory
        self.held_bytes = 0
        """Bytes that exist all along on it."""

    def memory(self) -> DeviceMemory:
        return self._memory

    def used_bytes(self) -> int:
        return self.held_bytes


def resident_bytes() -> int:
    """Returns the bytes that this process has in memory, as `top` shows it."""
    return _status()["VmRSS"]


def _status() -> dict[str, int]:
    """Sizes of this process in bytes, as proc(5) calls them. Elsewhere than on Linux no peak is kept."""
    if sys.platform != "linux":
        resident = psutil.Process().memory_info().rss
        return {"VmRSS": resident, "VmHWM": resident}
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in fields}
