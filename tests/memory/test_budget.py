"""How much may be held: the least of the limits, and who enforces it."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from several_processes import in_processes

from grpo.memory import budget, is_out_of_memory, make_budget
from grpo.memory.budget import GB, DeviceMemory, card_memory, host_total_and_available
from grpo.memory.enforce import limit_memory, limit_worker
from grpo.memory.monitor import MemoryMonitor, private_bytes

MB = 2**20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    ("free", "ours", "limit", "usable", "reason"),
    [
        (80, 10, None, 75, "75% of"),
        (40, 10, None, 50, "what others leave free"),
        (40, 10, 60, 50, "what others leave free"),
        (80, 10, 30, 30, "--memory-limit"),
        (80, 10, 76, 75, "75% of"),
    ],
)
def test_the_budget_is_the_least_of_share_free_memory_and_limit(free, ours, limit, usable, reason):
    """Of 100 bytes."""
    made = make_budget(DeviceMemory(100, free, ours), utilization=0.75, limit_bytes=limit)
    assert made.usable_bytes == usable and made.reason.startswith(reason)


def test_what_others_hold_is_what_is_neither_free_nor_ours():
    assert DeviceMemory(100, 60, 10).others_bytes == 30
    assert DeviceMemory(100, 60, 50).others_bytes == 0  # what we hold may be counted twice


def test_a_card_sold_as_24_gb_offers_23_and_a_half():
    card = card_memory(24 * GB)
    assert card.total_bytes == card.free_bytes == pytest.approx(23.52 * GB, abs=1)
    assert (card.ours_bytes, card.others_bytes) == (0, 0)
    assert str(make_budget(card, utilization=0.85)) == "19.99 GB (85% of 23.52 GB)"


def test_on_cuda_the_allocator_gets_the_limit_less_the_context(monkeypatch):
    asked: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given))
    device = torch.device("cuda", 1)
    assert (
        limit_memory(device, 12 * GB + GB // 2, 24 * GB)
        == "enforced by the CUDA allocator (50.0% of the card)"
    )
    limit_memory(device, 40 * GB, 24 * GB)
    limit_memory(device, GB // 4, 24 * GB)
    assert asked == [(0.5, device), (1.0, device), (0.0, device)]


def test_where_nothing_enforces_a_limit_it_says_so():
    assert limit_memory(torch.device("mps"), GB, 8 * GB).startswith("a guide for the plan only")


def within_a_limit() -> tuple[str, bool, bool, bool]:
    """With 192 MB more than now: what limit_memory said, and what came of 64 MB and of 512 MB."""
    from grpo.memory import MemoryMonitor

    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    limit = int(held.split()[1]) * 1024 + 192 * MB
    said = limit_memory(torch.device("cpu"), limit, 2 * limit)
    ours = MemoryMonitor(torch.device("cpu"), limited=True).memory().ours_bytes  # counted as the limit counts
    fits = torch.empty(64 * MB, dtype=torch.uint8).numel() == 64 * MB
    try:
        torch.empty(512 * MB, dtype=torch.uint8)
    except RuntimeError as error:
        return said, fits, is_out_of_memory(error), abs(limit - 192 * MB - ours) < 32 * MB
    return said, fits, False, False


@LINUX
def test_on_linux_the_system_enforces_it():
    """In a process of its own, whose other tests would have to live with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
        said, fits, refused, counted = process.submit(within_a_limit).result(timeout=60)
    assert said == "enforced by the system (RLIMIT_DATA)"
    assert fits and refused and counted


def bounded_beside_gaps(rank: int) -> tuple[int, int]:
    """What a worker holds as soon as it is limited, which may be no more than the limit."""
    kept = [bytearray(100_000) for _ in range(400)]
    del kept[::2]
    monitor = MemoryMonitor(torch.device("cpu"), limited=True)
    limit = private_bytes() + 30 * MB
    limit_worker(monitor, limit, added_bytes=60 * MB)
    return private_bytes(), limit


@LINUX
def test_a_heap_that_is_bounded_within_a_limit_does_not_exceed_it_by_its_gaps():
    (ended,) = in_processes(1, bounded_beside_gaps)
    held, limit = ended.value
    assert held <= limit


# ------------------------------------------------------------------------------- the host's memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    700 kB\nHugePages_Total:   0\n"
V2, V1 = "/sys/fs/cgroup/memory.", "/sys/fs/cgroup/memory/memory."
MOUNTS = {
    "/proc/self/mountinfo": (
        "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        "31 20 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "32 20 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    ),
    "/proc/self/cgroup": "4:memory:/\n3:cpu:/x\n0::/\n",
}  # fmt: skip
NESTED_V2, NESTED_V1 = "/sys/fs/cgroup/a.slice/b/memory.", "/sys/fs/cgroup/memory/a/b/memory."
NESTED = MOUNTS | {"/proc/self/cgroup": "4:memory:/a/b\n0::/a.slice/b\n"}
KB = 1024


def files(texts: dict[str, str]) -> Callable[[str], Path]:
    """Stands in for Path: these files, and no others."""

    class File:
        def __init__(self, name: str) -> None:
            self.name = name

        def read_text(self) -> str:
            if self.name not in texts:
                raise FileNotFoundError(self.name)
            return texts[self.name]

    return File  # type: ignore[return-value]


@LINUX
@pytest.mark.parametrize(
    ("container", "total", "available"),
    [
        ({}, 1000 * KB, 700 * KB),
        ({V2 + "max": "max\n", V2 + "current": "5"}, 1000 * KB, 700 * KB),
        ({V2 + "max": str(500 * KB), V2 + "current": str(100 * KB)}, 500 * KB, 400 * KB),
        ({V2 + "max": str(900 * KB), V2 + "current": str(100 * KB)}, 900 * KB, 700 * KB),
        ({V2 + "max": str(500 * KB), V2 + "current": str(501 * KB)}, 500 * KB, 0),
        ({V1 + "limit_in_bytes": str(500 * KB), V1 + "usage_in_bytes": str(200 * KB)}, 500 * KB, 300 * KB),
        ({V1 + "limit_in_bytes": "9223372036854771712", V1 + "usage_in_bytes": "1"}, 1000 * KB, 700 * KB),
    ],
)
def test_a_containers_limit_counts_where_it_is_lower(monkeypatch, container, total, available):
    monkeypatch.setattr(budget, "Path", files({"/proc/meminfo": MEMINFO, **MOUNTS, **container}))
    assert host_total_and_available() == (total, available)


@LINUX
@pytest.mark.parametrize(
    ("groups", "total", "available"),
    [
        ({NESTED_V2 + "max": str(500 * KB), NESTED_V2 + "current": "0"}, 500 * KB, 500 * KB),
        ({NESTED_V1 + "limit_in_bytes": str(500 * KB), NESTED_V1 + "usage_in_bytes": "0"},
         500 * KB, 500 * KB),
        # of a group around it, and what throttles before that
        ({"/sys/fs/cgroup/a.slice/memory.max": str(600 * KB), "/sys/fs/cgroup/a.slice/memory.current": "0"},
         600 * KB, 600 * KB),
        ({NESTED_V2 + "max": str(600 * KB), NESTED_V2 + "high": str(400 * KB), NESTED_V2 + "current": "0"},
         400 * KB, 400 * KB),
        # the smallest limit, and the least room: another group's
        ({NESTED_V2 + "max": str(500 * KB), NESTED_V2 + "current": "0", V2 + "max": str(900 * KB),
          V2 + "current": str(800 * KB)}, 500 * KB, 100 * KB),
        ({"/sys/fs/cgroup/other/memory.max": str(5 * KB), "/sys/fs/cgroup/other/memory.current": "0"},
         1000 * KB, 700 * KB),
    ],
)  # fmt: skip
def test_the_smallest_limit_on_the_way_up_holds(monkeypatch, groups, total, available):
    monkeypatch.setattr(budget, "Path", files({"/proc/meminfo": MEMINFO, **NESTED, **groups}))
    assert host_total_and_available() == (total, available)


@LINUX
def test_a_containers_own_folder_may_be_mounted_as_the_root(monkeypatch):
    """Without a namespace of its own, /proc names the path that the host sees."""
    texts = {
        "/proc/self/mountinfo": "30 20 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n",
        "/proc/self/cgroup": "0::/docker/1/job\n", "/proc/meminfo": MEMINFO,
        "/sys/fs/cgroup/job/memory.max": str(300 * KB), "/sys/fs/cgroup/job/memory.current": "0",
    }  # fmt: skip
    monkeypatch.setattr(budget, "Path", files(texts))
    assert host_total_and_available() == (300 * KB, 300 * KB)


def test_this_machine_has_memory_and_some_of_it_is_free():
    total, available = host_total_and_available()
    assert 0 < available <= total


def test_files_that_a_container_has_read_do_not_count_as_used(monkeypatch: pytest.MonkeyPatch):
    texts = {
        **MOUNTS, "/proc/meminfo": MEMINFO, f"{V2}max": f"{500 * KB}\n", f"{V2}current": f"{450 * KB}\n",
        f"{V2}stat": f"anon 1\ninactive_file {200 * KB}\nactive_file 7\n",
    }  # fmt: skip
    monkeypatch.setattr(budget, "Path", files(texts))
    assert budget.host_total_and_available() == (500 * KB, 250 * KB)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_what_ulimit_lets_a_process_have_is_all_there_is():
    script = """
import resource, torch
from grpo.memory import MemoryMonitor
from grpo.memory.monitor import private_bytes
print(MemoryMonitor(torch.device("cpu")).counts_private)
resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
monitor = MemoryMonitor(torch.device("cpu"))
memory = monitor.memory()
print(monitor.counts_private, memory.total_bytes)
print(abs(memory.free_bytes + memory.ours_bytes - 3 * 2**30) < 2**20)
print(abs(memory.ours_bytes - private_bytes()) < 2**22, memory.ours_bytes >= monitor.in_use_bytes() > 0)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "True", str(3 * 2**30), "True", "True", "True"]
