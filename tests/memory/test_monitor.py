"""What is read of a device: the host for real, CUDA with its answers made up."""

import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.memory import MemoryMonitor, monitor
from grpo.memory import card as cards
from grpo.memory.budget import GB, MOST_OUTSIDE_BYTES
from grpo.memory.monitor import MemoryReading

MB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def peaks_can_be_reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


RESETS = pytest.mark.skipif(not peaks_can_be_reset(), reason="not on this system, or not permitted")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_reading_in_words():
    assert str(MemoryReading("CPU", GB, GB, 3 * GB)) == "CPU memory - allocated: 1.00GB, peak: 3.00GB"
    said = "GPU 1 memory - allocated: 1.00GB, reserved: 2.00GB, peak: 3.00GB"
    assert str(MemoryReading("GPU 1", GB, 2 * GB, 3 * GB)) == said


# ---------------------------------------------------------------------------------------- the host


def test_tensors_of_a_phase_are_counted_where_that_is_asked():
    made = MemoryMonitor(CPU)
    before = torch.zeros(1000)
    with made.phase(exact=True) as reading:
        kept = before + 1
        del before
        torch.zeros(500)
    assert reading.added_bytes == 4000 + 2000
    with made.phase() as reading:
        kept = kept + 1
    assert reading.added_bytes is None


def test_a_phase_that_ends_in_an_error_is_measured_and_counting_ends():
    with pytest.raises(ZeroDivisionError), MemoryMonitor(CPU).phase(exact=True) as reading:
        kept = torch.zeros(1000)
        raise ZeroDivisionError
    torch.zeros(5000)
    assert reading.added_bytes == 4000 and reading.process_bytes > 0
    del kept


def fresh(size: int) -> mmap.mmap:
    """Memory from the system, whatever the allocator keeps of what other tests gave back."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def touch(size: int) -> None:
    with fresh(size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


@RESETS
def test_each_phase_has_its_own_peak_and_the_step_the_highest():
    made = MemoryMonitor(CPU)
    made.reset_peak()
    with made.phase() as large:
        touch(256 * MB)
    with made.phase() as small:
        touch(32 * MB)
    now = made.read()
    assert large.peak_bytes - small.peak_bytes > 150 * MB
    assert large.peak_bytes - large.process_before_bytes > 200 * MB
    assert large.process_bytes == large.peak_bytes == large.reserved_bytes
    assert now.peak_bytes == large.peak_bytes > now.allocated_bytes + 150 * MB
    made.reset_peak()
    assert made.read().peak_bytes < large.peak_bytes - 150 * MB


@LINUX
def test_under_a_limit_what_the_limit_counts_is_what_the_process_holds():
    """Memory that was never touched as well, and none that is only mapped."""
    resident, private = MemoryMonitor(CPU), MemoryMonitor(CPU, limited=True)
    before = resident.memory().ours_bytes, private.memory().ours_bytes
    untouched = fresh(256 * MB)
    after = resident.memory().ours_bytes, private.memory().ours_bytes
    assert after[0] - before[0] < 128 * MB
    assert after[1] - before[1] >= 256 * MB
    with private.phase() as reading:
        touch(64 * MB)
    assert reading.process_bytes > after[1] + 48 * MB or not peaks_can_be_reset()
    untouched.close()


def test_the_hosts_memory_is_that_of_all_processes():
    memory = MemoryMonitor(CPU).memory()
    assert 0 < memory.ours_bytes < memory.total_bytes
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert MemoryMonitor(CPU).neighbours() == "" and MemoryMonitor(CPU).outside_allocator_bytes() == 0


@LINUX
def test_where_the_peak_cannot_be_reset_it_is_the_whole_lifes(monkeypatch: pytest.MonkeyPatch):
    class Forbidden:
        def __init__(self, name: str) -> None:
            self.name = name

        def write_text(self, text: str) -> None:
            raise PermissionError(self.name)

        def read_text(self) -> str:
            return Path(self.name).read_text()

    monkeypatch.setattr(monitor, "Path", Forbidden)
    made = MemoryMonitor(CPU)
    made.reset_peak()
    assert made.read().peak_bytes >= made.read().allocated_bytes > 0


# ---------------------------------------------------------------------------------------- CUDA


class Card:
    """A card of 24 GB and the allocator's figures, as `torch.accelerator` would tell them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated, self.reserved, self.free = 1 * GB, 2 * GB, 20 * GB
        self.max_allocated, self.max_reserved = 5 * GB, 6 * GB
        self.resets = 0
        answers = {
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.max_allocated,
            "max_memory_reserved": lambda device: self.max_reserved,
            "get_memory_info": lambda device: (self.free, 24 * GB),
            "reset_peak_memory_stats": self.reset,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer)

    def reset(self, device: torch.device) -> None:
        assert device == CUDA
        self.resets += 1
        self.max_allocated, self.max_reserved = self.allocated, self.reserved


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_on_cuda_the_allocators_statistics_are_read(card: Card):
    assert MemoryMonitor(CUDA).read() == MemoryReading("GPU 1", 1 * GB, 2 * GB, 5 * GB)


def test_on_cuda_every_phase_is_exact_and_costs_nothing(card: Card):
    made = MemoryMonitor(CUDA)
    with made.phase() as reading:
        card.max_allocated, card.max_reserved = 4 * GB, 7 * GB
        card.free = 24 * GB - 7 * GB - GB // 4
        card.reserved = 7 * GB
    assert reading.added_bytes == 3 * GB  # beyond the one that was allocated before
    assert (reading.peak_bytes, reading.reserved_bytes) == (4 * GB, 7 * GB)
    assert reading.process_bytes == 7 * GB + GB // 4  # with what the context takes
    assert card.resets == 1
    assert made.read().peak_bytes == 5 * GB  # from before the phase, in the same step
    made.reset_peak()
    assert made.read().peak_bytes == 1 * GB


def test_on_cuda_what_is_not_torchs_is_the_context_up_to_its_usual_size(card: Card):
    made = MemoryMonitor(CUDA)
    assert made.outside_allocator_bytes() == MOST_OUTSIDE_BYTES  # the rest is another process's
    memory = made.memory()
    assert (memory.total_bytes, memory.free_bytes) == (24 * GB, 20 * GB)
    assert memory.ours_bytes == 2 * GB + MOST_OUTSIDE_BYTES
    assert memory.others_bytes == 2 * GB - MOST_OUTSIDE_BYTES
    card.free = 24 * GB - 2 * GB - 100 * MB
    assert made.outside_allocator_bytes() == 100 * MB
    card.free = 23 * GB
    assert made.memory().ours_bytes == 1 * GB  # never more than is taken in all


@pytest.mark.parametrize(
    ("processes", "outside"),
    [
        ([(17, 5 * GB), (os.getpid(), 2 * GB + 700 * MB)], 700 * MB),  # by NVML, to the byte
        ([(os.getpid(), 2 * GB - 1)], 0), ([(os.getpid(), None)], MOST_OUTSIDE_BYTES),  # WSL does not say
        ([(17, 5 * GB)], MOST_OUTSIDE_BYTES), (None, MOST_OUTSIDE_BYTES),
    ],
)  # fmt: skip
def test_on_cuda_nvml_tells_what_is_ours(card: Card, monkeypatch: pytest.MonkeyPatch, processes, outside):
    class Error(Exception):
        pass

    def running(handle: str) -> list[SimpleNamespace]:
        assert handle == "GPU-1234-abcd"
        if processes is None:
            raise Error("not supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    binding = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=running, NVMLError=Error,
    )  # fmt: skip
    properties = SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    cards._handle.cache_clear()
    assert MemoryMonitor(CUDA).outside_allocator_bytes() == outside
    cards._handle.cache_clear()


TOLD = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><gpu id="00000000:01:00.0"><processes>
<process_info><pid>{own}</pid><type>C</type><process_name>python</process_name>
<used_memory>900 MiB</used_memory></process_info>
<process_info><pid>17</pid><type>G</type><process_name>/usr/lib/xorg/Xorg</process_name>
<used_memory>350 MiB</used_memory></process_info>
</processes></gpu></nvidia_smi_log>"""


def test_on_cuda_the_neighbours_are_a_courtesy(card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As the driver's tool names them, a display too; without the tool nobody is known."""
    properties = SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert MemoryMonitor(CUDA).neighbours() == ""
    tool = tmp_path / "nvidia-smi"
    for told, expected in [
        (TOLD.format(own=os.getpid()), "/usr/lib/xorg/Xorg (process 17): 350 MiB"),
        ("no devices were found", ""),
    ]:
        tool.write_text(f"#!/bin/sh\n[ \"$4\" = GPU-1234-abcd ] && /bin/cat <<'END'\n{told}\nEND\n")
        tool.chmod(0o755)
        assert MemoryMonitor(CUDA).neighbours() == expected
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert MemoryMonitor(CUDA).neighbours() == ""


def test_on_mps_there_are_no_peaks(monkeypatch: pytest.MonkeyPatch):
    for name, size in (
        ("current_allocated_memory", 1 * GB),
        ("driver_allocated_memory", 2 * GB),
        ("recommended_max_memory", 12 * GB),
    ):
        monkeypatch.setattr(torch.mps, name, lambda size=size: size)
    made = MemoryMonitor(torch.device("mps"))
    made.reset_peak()
    assert made.read() == MemoryReading("GPU 0", 1 * GB, 2 * GB, 2 * GB)
    with made.phase(exact=True) as reading:
        pass
    assert reading.added_bytes is None and reading.process_bytes == 2 * GB
    memory = made.memory()
    assert (memory.total_bytes, memory.free_bytes, memory.ours_bytes) == (12 * GB, 10 * GB, 2 * GB)
