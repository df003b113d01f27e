"""What a device holds now, and its peak in each phase.

On an accelerator the allocator's own statistics are read, and the driver's for what is not torch's;
on the host the resident set and its high-water mark, which Linux lets a process reset. Tensor bytes on
the host are counted exactly, by `LiveBytes`, in the phases for which that is asked, as it costs time.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo import malloc
from grpo.memory import card
from grpo.memory.budget import GB, MOST_OUTSIDE_BYTES, DeviceMemory, data_limit, host_total_and_available
from grpo.memory.live import LiveBytes


@dataclass(frozen=True)
class MemoryReading:
    """Bytes on one device. On the host, allocated and reserved are both the resident set."""

    device: str
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int

    def as_metrics(self) -> dict[str, float]:
        return {
            "memory/allocated_gb": self.allocated_bytes / GB,
            "memory/peak_gb": self.peak_bytes / GB,
        }

    def __str__(self) -> str:
        allocated, peak = self.allocated_bytes / GB, self.peak_bytes / GB
        if self.device == "CPU":
            return f"CPU memory - allocated: {allocated:.2f}GB, peak: {peak:.2f}GB"
        reserved = self.reserved_bytes / GB
        return (
            f"{self.device} memory - allocated: {allocated:.2f}GB, "
            f"reserved: {reserved:.2f}GB, peak: {peak:.2f}GB"
        )


@dataclass
class PhaseReading:
    """Memory of one phase, filled in when it ends. Bytes.

    added_bytes: peak of the tensors beyond those that existed before, None where not counted.
    peak_bytes, reserved_bytes: the allocator's peaks (host: the resident set's).
    process_bytes: most that the process held, context and libraries included; process_before_bytes
    when the phase began.
    """

    added_bytes: int | None = None
    peak_bytes: int = 0
    reserved_bytes: int = 0
    process_bytes: int = 0
    process_before_bytes: int = 0


class MemoryMonitor:
    """Reads one device.

    limited: a limit on the process will be enforced. Then, and where one is already (`ulimit -d`), what it
    counts is what the process holds: private writable memory, touched or not, instead of resident memory.
    """

    def __init__(self, device: torch.device, *, limited: bool = False) -> None:
        self.device = device
        self._data_limit = data_limit() if device.type == "cpu" else None
        limited = limited or self._data_limit is not None
        self.counts_private = limited and device.type == "cpu" and sys.platform == "linux"
        self._peak_bytes = 0

    def reset_peak(self) -> None:
        """Peaks of `read` are from here on."""
        self._peak_bytes = 0
        self._reset_device_peak()

    def read(self) -> MemoryReading:
        if self.device.type == "cpu":
            resident, peak = _host_bytes()
            return MemoryReading("CPU", resident, resident, max(peak, self._peak_bytes))
        if self.device.type == "mps":
            allocated = torch.mps.current_allocated_memory()
            reserved = torch.mps.driver_allocated_memory()
            return MemoryReading("GPU 0", allocated, reserved, reserved)
        return MemoryReading(
            f"GPU {self.device.index or 0}",
            torch.accelerator.memory_allocated(self.device),
            torch.accelerator.memory_reserved(self.device),
            max(torch.accelerator.max_memory_allocated(self.device), self._peak_bytes),
        )

    @contextmanager
    def phase(self, *, exact: bool = False) -> Iterator[PhaseReading]:
        """Measure what happens inside. `exact` counts tensor bytes on the host, operation by operation."""
        result = PhaseReading()
        self._peak_bytes = max(self._peak_bytes, self.read().peak_bytes)
        self._reset_device_peak()
        before = self.read().allocated_bytes
        result.process_before_bytes = self.read_peaks()[2]
        live = LiveBytes() if exact and self.device.type == "cpu" else None
        try:
            with live or nullcontext():
                yield result
        finally:
            after = self.read_peaks()
            result.peak_bytes, result.reserved_bytes, result.process_bytes = after
            if live is not None:
                result.added_bytes = live.peak_bytes
            elif self.device.type not in ("cpu", "mps"):
                result.added_bytes = result.peak_bytes - before

    def read_peaks(self) -> tuple[int, int, int]:
        """Allocated, reserved and process bytes at their peak since the last reset."""
        if self.device.type == "cpu":
            peak = _host_bytes()[1]
            return peak, peak, self._host_process_bytes()[1]
        if self.device.type == "mps":
            driver = torch.mps.driver_allocated_memory()
            return driver, driver, driver
        allocated = torch.accelerator.max_memory_allocated(self.device)
        reserved = torch.accelerator.max_memory_reserved(self.device)
        return allocated, reserved, reserved + self.outside_allocator_bytes()

    def outside_allocator_bytes(self) -> int:
        """What this process holds besides torch's allocator: context, kernels, NCCL.

        Where only that is known which all processes hold together, no more than is usual.
        """
        if self.device.type != "cuda":
            return 0
        free, total = torch.accelerator.get_memory_info(self.device)
        reserved = torch.accelerator.memory_reserved(self.device)
        held = card.held_bytes(self.device)
        most = MOST_OUTSIDE_BYTES if held is None else held - reserved
        return max(0, min(most, total - free - reserved))

    def memory(self) -> DeviceMemory:
        """All of the device's memory, the free part, and this process's."""
        if self.device.type == "cpu":
            total, available = host_total_and_available()
            ours = self._host_process_bytes()[0]
            if self._data_limit is not None:
                total, available = min(total, self._data_limit), min(available, self._data_limit - ours)
            return DeviceMemory(total, max(0, available), ours)
        if self.device.type == "mps":
            total = torch.mps.recommended_max_memory()
            ours = torch.mps.driver_allocated_memory()
            return DeviceMemory(total, total - ours, ours)
        free, total = torch.accelerator.get_memory_info(self.device)
        ours = torch.accelerator.memory_reserved(self.device) + self.outside_allocator_bytes()
        return DeviceMemory(total, free, min(ours, total - free))

    def in_use_bytes(self) -> int:
        """What this process holds and uses, without what its allocator has free."""
        if self.device.type == "cpu":
            return self.memory().ours_bytes - malloc.free_bytes()
        return self.memory().ours_bytes

    def used_bytes(self) -> int:
        """What is not free to whatever this process does next: without what any allocator keeps."""
        if self.device.type == "cpu":
            return self.in_use_bytes()
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory()
        return torch.accelerator.memory_allocated(self.device) + self.outside_allocator_bytes()

    def gap_bytes(self) -> int:
        """What the host's allocator has free: the process holds it, whatever a phase adds."""
        return malloc.free_bytes() if self.device.type == "cpu" else 0

    def _host_process_bytes(self) -> tuple[int, int]:
        """What the process holds, now and at its peak."""
        resident, peak = _host_bytes()
        if not self.counts_private:
            return resident, peak
        return private_bytes(), private_bytes() + peak - resident

    def neighbours(self) -> str:
        """Who else holds memory on the card, for an error message; empty if nobody is known to."""
        if self.device.type != "cuda":
            return ""
        return card.neighbours(self.device)

    def _reset_device_peak(self) -> None:
        if self.device.type == "mps":
            return  # keeps no peak
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
            except OSError:
                pass  # not permitted in some sandboxes: the peak is then the process's whole life's


def _host_bytes() -> tuple[int, int]:
    """Resident bytes now and at their peak."""
    if sys.platform == "linux":
        status = _status()
        return status["VmRSS"], status["VmHWM"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    return peak, peak


def private_bytes() -> int:
    """Private writable memory of this process, touched or not: what RLIMIT_DATA counts. Linux only."""
    return _status()["VmData"]


def _status() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in fields}
