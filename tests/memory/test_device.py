"""Readings and limits of devices: the host for real, CUDA and Metal with answers made up."""

import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from real_phases import allocator_peak
from several_processes import in_processes, values
from torch import nn

from grpo.environment import keep_freed
from grpo.memory import Device, budget, is_out_of_memory, peak_live_bytes
from grpo.memory import device as devices
from grpo.memory.budget import (
    CONTEXT_BYTES,
    GB,
    KERNELS_BYTES,
    MAX_NON_TORCH_BYTES,
    DeviceMemory,
    card_memory,
    make_budget,
)
from grpo.memory.device import FIRST_SLACK, MemoryReading, resident_bytes
from grpo.memory.live import LiveBytes

KB, MB = 2**10, 2**20
CUDA = torch.device("cuda", 1)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


# --------------------------------------------------------------------------- bytes of live tensors


def test_a_storage_counts_once_from_its_first_tensor_to_its_last_and_what_is_changed_does_not():
    before, x = torch.ones(1000), torch.arange(40.0).view(10, 4)
    with LiveBytes() as live:
        before.add_(1).mul_(before)
        before.view(10, 100).t().unsqueeze(0)
        torch.add(before, 1, out=before)
        before[3] = 5.0
        assert live.peak_bytes == 0
        a = torch.zeros(100)
        views = [a.view(10, 10), a[10:], a.t(), a.detach(), *a.split(50)]
        del a
        assert live.live_bytes == 400  # held by its views
        copy = views[1].clone()
        assert live.live_bytes == 400 + 360
        del views
        assert live.live_bytes == 360
        del copy
        assert live.live_bytes == 0 and live.peak_bytes == 760
        kept = x.max(0)  # 4 floats, 4 int64 indices
        rows = x.unbind()
        pair = torch.frexp(x)  # 40 floats, 40 int32 exponents
        assert live.live_bytes == 16 + 32 + 160 + 160
    del kept, rows, pair

    def work() -> list[torch.Tensor]:
        return [torch.zeros(1), torch.zeros(128), torch.zeros(129)]

    assert peak_live_bytes(work) == 4 + 512 + 516
    assert peak_live_bytes(work, block_bytes=lambda size: -(-size // 512) * 512) == 512 + 512 + 1024
    assert peak_live_bytes(work, device_type="cuda") == 0  # other devices do not count


def test_the_peak_is_the_most_at_once_a_gradient_among_it():
    w = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        kept = torch.zeros(100) + torch.ones(50).sum()  # 400 + 200 + 4, then 400 + 4 + 400
        assert live.peak_bytes == 804 and live.live_bytes == kept.nbytes == 400
    with LiveBytes() as live:
        loss = w.exp().sum()  # exp keeps its result for the backward pass
        assert live.live_bytes == 404
        loss.backward()  # a one to begin with, then the product: the gradient
        assert live.peak_bytes == 404 + 4 + 400 and live.live_bytes == 4 + 400
    del loss


X = torch.randn(64, 128)


def block_passes() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24), nn.Dropout(0.1))
    block(torch.ones(500, 24)).softmax(-1).pow(2).sum().backward()
    return block


def layer_norm_of_a_transposed_gradient() -> object:
    norm, x = nn.LayerNorm(128), X.repeat(20, 1).requires_grad_()
    return norm(x).backward(torch.ones(128, 1280).t())


@pytest.mark.parametrize(
    "work",
    [
        lambda: X * X.bfloat16(),  # bf16 is converted as a whole
        lambda: X.logsumexp(-1),  # the exponentials
        layer_norm_of_a_transposed_gradient,
        block_passes,
    ],
)
def test_peaks_are_those_of_the_allocator(work: Callable[[], object]):
    work()  # what is set up once is no part of it
    assert peak_live_bytes(work) == pytest.approx(allocator_peak(work), rel=0.01)


# ---------------------------------------------------------------------------------------- the host


def peaks_can_be_reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def test_tensors_are_counted_where_that_is_asked_also_of_what_ends_in_an_error():
    device, before = Device(), torch.zeros(1000)
    with device.measure(exact=True) as peak:
        kept = before + 1
        del before
        torch.zeros(500)
    assert peak.added_bytes == 4000 + 2000
    with device.measure() as peak:
        kept = kept + 1
    assert peak.added_bytes is None
    with pytest.raises(ZeroDivisionError), device.measure(exact=True) as peak:
        kept = torch.zeros(1000)
        raise ZeroDivisionError
    torch.zeros(5000)
    assert peak.added_bytes == 4000 and peak.process_bytes > 0
    del kept


def fresh(size: int) -> mmap.mmap:
    """Memory from the system, whatever the allocator keeps of what other tests gave back."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def touch(size: int) -> None:
    with fresh(size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


@pytest.mark.skipif(not peaks_can_be_reset(), reason="not on this system, or not permitted")
def test_each_pass_has_its_own_peak_and_the_step_the_highest():
    device = Device()
    device.reset_peak()
    with device.measure() as large:
        touch(256 * MB)
    with device.measure() as small:
        touch(32 * MB)
    now = device.read()
    assert large.process_bytes - small.process_bytes > 150 * MB
    assert large.process_bytes - large.process_before_bytes > 200 * MB
    assert now.peak_bytes == large.process_bytes > now.allocated_bytes + 150 * MB
    device.reset_peak()
    assert device.read().peak_bytes < large.process_bytes - 150 * MB


@LINUX
def test_under_a_limit_what_the_limit_counts_is_what_the_process_holds():
    """Memory that was never touched as well, and none that is only mapped."""
    resident, private = Device(), Device(limit_bytes=2**40)
    before = resident.memory().ours_bytes, private.memory().ours_bytes
    untouched = fresh(256 * MB)
    after = resident.memory().ours_bytes, private.memory().ours_bytes
    assert after[0] - before[0] < 128 * MB and after[1] - before[1] >= 256 * MB
    with private.measure() as peak:
        touch(64 * MB)
    assert peak.process_bytes > after[1] + 48 * MB or not peaks_can_be_reset()
    untouched.close()
    memory = resident.memory()
    assert 0 < memory.ours_bytes < memory.total_bytes and 0 < memory.free_bytes <= memory.total_bytes


def test_what_malloc_keeps_is_not_used_and_who_else_is_on_a_host_is_not_said(monkeypatch):
    monkeypatch.setattr(devices, "free_bytes", lambda: 64 * MB)
    assert abs(resident_bytes() - 64 * MB - Device().used_bytes()) < 4 * MB
    assert Device().neighbours() == "" and Device().slack == FIRST_SLACK
    said = str(Device().read())
    assert said.startswith("CPU memory - process: ") and said.endswith("GB") and "reserved" not in said
    assert Device().read().as_metrics().keys() == {"memory/process_gb", "memory/peak_gb"}


def test_where_a_peak_cannot_be_reset_nothing_seems_to_have_grown_by_it(monkeypatch):
    """In a sandbox it is the whole life's; elsewhere than on Linux, what is held when it is read."""
    told = {"VmRSS": 300, "VmHWM": 900, "VmData": 400}
    monkeypatch.setattr(devices, "free_bytes", lambda: 0)
    with monkeypatch.context() as linux:
        linux.setattr(devices, "_status", lambda: told)
        linux.setattr(Path, "write_text", mock.Mock(side_effect=PermissionError))
        linux.setattr(sys, "platform", "linux")
        with Device().measure() as peak:
            told["VmRSS"] = 500
        assert peak.process_before_bytes == peak.process_bytes == 900 and Device().used_bytes() == 500
    monkeypatch.setattr(sys, "platform", "darwin")
    held = mock.Mock(return_value=SimpleNamespace(rss=700))
    monkeypatch.setattr(devices.psutil, "Process", lambda: SimpleNamespace(memory_info=held))
    with Device().measure() as peak:
        pass
    assert peak.process_before_bytes == peak.process_bytes == Device().used_bytes() == 700


# ------------------------------------------------------------------------------ other devices


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card of 24 GB and the allocator's figures, as `torch.accelerator` would tell them."""
    told = SimpleNamespace(
        memory_allocated=1 * GB,
        memory_reserved=2 * GB,
        max_memory_allocated=5 * GB,
        max_memory_reserved=6 * GB,
        get_memory_info=(20 * GB, 24 * GB),
        shares=[],
        segments=[],
    )
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: told.segments)
    for name in vars(told):
        monkeypatch.setattr(torch.accelerator, name, lambda _, name=name: getattr(told, name), raising=False)

    def reset(device: torch.device) -> None:
        assert device == CUDA
        told.max_memory_allocated, told.max_memory_reserved = told.memory_allocated, told.memory_reserved

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    set_share = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, set_share, lambda share, device: told.shares.append((share, device)))
    return told


def test_on_cuda_every_pass_is_exact_and_the_context_counts_up_to_its_usual_size(card):
    device = Device(CUDA)
    now = device.read()
    assert now == MemoryReading("GPU 1", 1 * GB, 2 * GB, 5 * GB) and device.slack == 0
    assert str(now) == "GPU 1 memory - allocated: 1.00GB, reserved: 2.00GB, peak: 5.00GB"
    assert now.as_metrics()["memory/reserved_gb"] == 2.0
    memory = device.memory()  # the rest is another process's
    assert memory == DeviceMemory(24 * GB, 20 * GB, 2 * GB + MAX_NON_TORCH_BYTES)
    assert memory.others_bytes == 2 * GB - MAX_NON_TORCH_BYTES
    assert device.used_bytes() == 1 * GB + MAX_NON_TORCH_BYTES  # not what the allocator keeps
    card.get_memory_info = 24 * GB - 2 * GB - 100 * MB, 24 * GB
    assert device.used_bytes() == 1 * GB + 100 * MB
    for pool, index in ((0, 0), 1), ((0, 1), 0), ((0, 3), 1):  # a CUDA graph's pool is nobody else's
        segment = {"segment_pool_id": pool, "device": index, "total_size": 300 * MB, "allocated_size": MB}
        card.segments.append(segment)
    assert device.used_bytes() == 1 * GB + 100 * MB + 299 * MB
    card.get_memory_info = 23 * GB, 24 * GB
    assert device.memory().ours_bytes == 1 * GB  # never more than is taken in all
    with device.measure() as peak:
        card.max_memory_allocated, card.max_memory_reserved, card.memory_reserved = 4 * GB, 7 * GB, 7 * GB
        card.get_memory_info = 24 * GB - 7 * GB - GB // 4, 24 * GB
    assert peak.added_bytes == 3 * GB  # beyond the one that was allocated before
    assert (peak.process_before_bytes, peak.process_bytes) == (2 * GB, 7 * GB + GB // 4)
    assert device.read().peak_bytes == 5 * GB  # from before the pass, in the same step
    device.reset_peak()
    assert device.read().peak_bytes == 1 * GB


def test_what_an_engine_that_sleeps_has_unmapped_is_not_held(card):
    """torch goes on counting it (vllm#17117): of 12 GB allocated 8 are asleep, and nobody else is there."""
    card.memory_allocated, card.memory_reserved = 12 * GB, 13 * GB
    card.get_memory_info = 24 * GB - 5 * GB - 300 * MB, 24 * GB
    held = Device(CUDA), Device(CUDA, counts_by_driver=True)
    assert [device.used_bytes() for device in held] == [12 * GB, 4 * GB + 300 * MB]
    assert held[1].room_bytes() - held[0].room_bytes() == 8 * GB - 300 * MB


@pytest.mark.parametrize(
    ("outside", "kept_back"),  # what is there already, and what kernels and recordings add to it
    [(100 * MB, CONTEXT_BYTES), (649 * MB, 649 * MB + KERNELS_BYTES), (2 * GB, MAX_NON_TORCH_BYTES)],
)
def test_on_cuda_the_allocator_gets_the_budget_less_the_context_for_as_long_as_that_lasts(
    card, outside, kept_back
):
    card.get_memory_info = 24 * GB - card.memory_reserved - outside, 24 * GB
    half = [(0.5, CUDA), (1.0, CUDA)]
    for options, shares in (
        ({"limit_bytes": 12 * GB + kept_back}, half),
        ({"utilization": 0.5 + kept_back / (24 * GB)}, half),  # always
        ({"limit_bytes": GB // 4}, [(0.0, CUDA), (1.0, CUDA)]),
    ):
        card.shares.clear()
        with pytest.raises(KeyError), Device(CUDA, **options).capped() as how:
            assert how.startswith("enforced by the CUDA allocator (")
            raise KeyError
        assert [share for share, _ in card.shares] == pytest.approx([share for share, _ in shares])
        assert {device for _, device in card.shares} == {CUDA}
    device = Device(CUDA, limit_bytes=12 * GB)
    with device.capped():  # the plan keeps back the same
        assert device.used_bytes() == card.memory_allocated + max(kept_back, min(outside, GB))
    with mock.patch.object(Device, "budget"), Device("mps").capped() as how:
        assert how.startswith("a guide for the plan only")


def test_who_else_holds_memory_on_a_card_is_told_by_the_driver_or_not_at_all(monkeypatch):
    told = [
        f"GPU:1\nprocess     17 uses   350.000 MB GPU memory\nprocess {os.getpid()} uses 9.000 MB GPU memory"
    ]
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda device: told.pop())
    assert Device(CUDA).neighbours() == "process 17 uses 350.000 MB GPU memory"
    assert Device(CUDA).neighbours() == ""  # it can fail in many ways: none is in the way


def test_on_mps_there_are_no_peaks(monkeypatch: pytest.MonkeyPatch):
    for name, size in ("current_allocated", GB), ("driver_allocated", 2 * GB), ("recommended_max", 12 * GB):
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda size=size: size)
    device = Device("mps")
    device.reset_peak()
    assert device.read() == MemoryReading("GPU 0", 1 * GB, 2 * GB, 2 * GB)
    with device.measure(exact=True) as peak:
        pass
    assert peak.added_bytes is None and peak.process_bytes == 2 * GB and device.slack == FIRST_SLACK
    assert device.memory() == DeviceMemory(12 * GB, 10 * GB, 2 * GB) and device.used_bytes() == GB


# -------------------------------------------------------------------------------------- the budget


def test_the_budget_is_the_least_of_share_free_memory_and_limit(card):
    """Budgets of 100 bytes; of a card sold as 24 GB, which offers 23.5; and of one that two processes
    share."""
    for free, limit, usable, reason in (
        (80, None, 75, "75% of"),
        (40, 60, 50, "what others leave free"),
        (80, 30, 30, "--memory-limit"),
        (80, 76, 75, "75% of"),
    ):
        made = make_budget(DeviceMemory(100, free, 10), utilization=0.75, limit_bytes=limit)
        assert made.usable_bytes == usable and made.reason.startswith(reason)
    sold = card_memory(24 * GB)
    assert sold.total_bytes == sold.free_bytes == pytest.approx(23.52 * GB, abs=1)
    assert (sold.ours_bytes, sold.others_bytes) == (0, 0)
    assert str(make_budget(sold, utilization=0.85)) == "19.99 GB (85% of 23.52 GB)"
    assert DeviceMemory(100, 60, 50).others_bytes == 0  # what we hold may be counted twice
    assert Device("cpu", limit_bytes=2**40).is_limited and not Device(CUDA, limit_bytes=GB).is_limited
    budgets = [Device(CUDA, utilization=0.5, ranks_on_device=sharing).budget() for sharing in (1, 2)]
    assert [made.usable_bytes for made in budgets] == [12 * GB, 6 * GB]


def within_a_limit() -> tuple[str, list[bool]]:
    """With 192 MB more than now: what is said; that 64 MB fit, 512 MB are refused, and fit afterwards."""
    device = Device(limit_bytes=Device(limit_bytes=2**40).memory().ours_bytes + 192 * MB)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    refused = True
    with device.capped() as how:
        found = [abs(device.budget().usable_bytes - 192 * MB - device.memory().ours_bytes) < 32 * MB]
        found.append(abs(device.room_bytes() - (192 - 64) * MB) < 16 * MB)  # 64 for what comes later
        grown = torch.ones(80 * MB, dtype=torch.uint8)
        found.append(abs(device.room_bytes() - (192 - 80) * MB) < 16 * MB)
        del grown
        found.append(torch.empty(64 * MB, dtype=torch.uint8).numel() == 64 * MB)
        try:
            refused = torch.empty(512 * MB, dtype=torch.uint8) is None
        except RuntimeError as error:
            refused = is_out_of_memory(error)
    found += [refused, resource.getrlimit(resource.RLIMIT_DATA) == before]
    return how, [*found, torch.empty(512 * MB, dtype=torch.uint8).numel() == 512 * MB]


def below_ulimit() -> tuple[str, list[bool]]:
    """One that is there is all there is, and is made no wider."""
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GB, 3 * GB))
    device = Device(utilization=1.0)
    memory = device.memory()
    found = [memory.total_bytes == 3 * GB, abs(memory.free_bytes + memory.ours_bytes - 3 * GB) < MB]
    found += [memory.ours_bytes > resident_bytes(), memory.ours_bytes >= device.used_bytes() > 0]
    with device.capped() as how:
        found.append(2 * GB < resource.getrlimit(resource.RLIMIT_DATA)[0] <= 3 * GB)
    return how, [*found, resource.getrlimit(resource.RLIMIT_DATA) == (3 * GB, 3 * GB)]


def without_a_limit() -> tuple[str, list[bool]]:
    """The share of what is there is enforced, too: beside what was reserved and never touched."""
    device, untouched = Device(utilization=0.5), fresh(256 * MB)
    usable = device.budget().usable_bytes
    with device.capped() as how:
        most = resource.getrlimit(resource.RLIMIT_DATA)[0]
        found = [usable + 256 * MB <= most < usable + 4 * GB]
    untouched.close()
    return how, [*found, resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY]


def freed_memory() -> tuple[str, list[bool]]:
    """Freed memory goes back where it counts towards a limit, and is kept elsewhere and afterwards."""

    def kept_bytes() -> int:
        before = counted.memory().ours_bytes
        blocks = [torch.ones(4 * MB, dtype=torch.uint8) for _ in range(16)]
        held = counted.memory().ours_bytes - before
        del blocks
        assert held > 60 * MB
        return counted.memory().ours_bytes - before

    counted = Device(limit_bytes=2**40)
    keep_freed()
    with Device(limit_bytes=counted.memory().ours_bytes + 512 * MB).capped() as how:
        found = [kept_bytes() < 8 * MB]
    with Device().capped():
        found.append(kept_bytes() > 56 * MB)
    return how, found


def limited(rank: int) -> tuple[str, list[bool]]:
    return (within_a_limit, below_ulimit, without_a_limit, freed_memory)[rank]()


def test_a_limited_process_keeps_what_it_frees_where_that_may_come_to_three_times_as_much(monkeypatch):
    keep, give, limited = mock.Mock(), mock.Mock(), Device(limit_bytes=GB)
    monkeypatch.setattr(devices, "keep_freed", keep)
    monkeypatch.setattr(devices, "return_freed_memory", give)
    limited.room_bytes = lambda: 300 * MB
    for added, calls in (99 * MB, (1, 0)), (101 * MB, (1, 1)):
        limited.choose_malloc_policy(added)
        assert (keep.call_count, give.call_count) == calls
    Device().choose_malloc_policy(2**60)
    assert give.call_count == 1


@LINUX
def test_on_linux_the_system_enforces_the_budget_and_a_limit_that_is_there_is_all_there_is():
    """Each in a process of its own, whose other tests would have to live with it."""
    for how, found in values(in_processes(4, limited)):
        assert how == "enforced by the system (RLIMIT_DATA)" and found == [True] * len(found)


# ------------------------------------------------------------------------------- control groups

ROOT = {"/proc/self/cgroup": "4:memory:/\n3:cpu:/x\n0::/\n"}
NESTED = {"/proc/self/cgroup": "4:memory:/a/b\n0::/a.slice/b\n"}
MOUNTED_AS_ROOT = {"/proc/self/cgroup": "0::/docker/1/job\n"}
"""A container without a namespace of its own: /proc names the path that the host sees."""
V2, V1 = ("max", "current"), ("limit_in_bytes", "usage_in_bytes")


def group(folder: str, limit: object, used: int, names: tuple[str, str] = V2) -> dict[str, str]:
    """A control group's limit and use, in kB, as its files have them."""
    limit = limit * KB if isinstance(limit, int) else limit
    path = f"/sys/fs/cgroup/{folder}memory."
    return {path + names[0]: f"{limit}\n", path + names[1]: str(used * KB)}


@LINUX
@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        (ROOT | group("", "max", 5), 1000, 700),
        (ROOT | group("", 500, 100), 500, 400),
        (ROOT | group("", 900, 100), 900, 700),
        (ROOT | group("", 500, 501), 500, 0),
        (ROOT | group("memory/", 500, 200, V1), 500, 300),
        (ROOT | group("memory/", "9223372036854771712", 1, V1), 1000, 700),
        # files that a container has read do not count as used
        (
            ROOT
            | group("", 500, 450)
            | {"/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {200 * KB}\n"},
            500,
            250,
        ),
        # the group a process is in; one around it; what throttles before that; another's
        (NESTED | group("memory/a/b/", 500, 0, V1), 500, 500),
        (NESTED | group("a.slice/", 600, 0), 600, 600),
        (NESTED | group("a.slice/b/", 600, 0) | group("a.slice/b/", 400, 0, ("high", "current")), 400, 400),
        (NESTED | group("other/", 5, 0), 1000, 700),
        # the smallest limit, and the least room: another group's
        (NESTED | group("a.slice/b/", 500, 0) | group("", 900, 800), 500, 100),
        (MOUNTED_AS_ROOT | group("job/", 300, 0), 300, 300),
    ],
)
def test_a_containers_limit_counts_where_it_is_lower(monkeypatch, files, total, available):
    class File(type(Path())):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            if str(self) not in files:
                raise FileNotFoundError(self)
            return files[str(self)]

    host = SimpleNamespace(total=1000 * KB, available=700 * KB)
    monkeypatch.setattr(budget.psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(budget, "Path", File)
    assert budget.host_total_and_available() == (total * KB, available * KB)


def test_the_cap_grows_with_what_neighbours_leave(monkeypatch):
    """Room beyond an old cap would run out of memory; the limits that the process came with stay."""
    device, limits = Device(limit_bytes=None), []
    ours = device.memory().ours_bytes
    beside = DeviceMemory(24 * GB, 2 * GB, ours)
    alone = DeviceMemory(24 * GB, 18 * GB, ours)
    monkeypatch.setattr(device, "memory", lambda: beside)
    monkeypatch.setattr("grpo.memory.device.resource.setrlimit", lambda _, limit: limits.append(limit[0]))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr("grpo.memory.device.resource.getrlimit", lambda _: unlimited)
    with device.capped():
        before = device.room_bytes()
        assert len(limits) == 1
        monkeypatch.setattr(device, "memory", lambda: alone)
        assert device.room_bytes() > before + 10 * GB and limits[1] - limits[0] > 10 * GB
        monkeypatch.setattr(device, "memory", lambda: beside)
        assert abs(device.room_bytes() - before) < 64 * MB and len(limits) == 2  # never lowered
    assert limits[2] == resource.RLIM_INFINITY
    device.room_bytes()
    assert len(limits) == 3
    low = (3 * GB, 4 * GB)
    monkeypatch.setattr("grpo.memory.device.resource.getrlimit", lambda _: low)
    monkeypatch.setattr(device, "memory", lambda: alone)
    with device.capped():
        device.room_bytes()
    assert set(limits[3:]) == {3 * GB}
