"""Rows for a loop that nothing is known about, on a device that is made up."""

from contextlib import contextmanager

import pytest
import torch

from grpo.memory import DoesNotFit, Fit
from grpo.memory.budget import DeviceMemory
from grpo.memory.loop import AGAIN_AFTER
from grpo.memory.monitor import PhaseReading

MB = 2**20


class Device:
    """One of 100 MB, of which 10 are held, and a row takes `row_mb` besides 2 that each pass takes."""

    def __init__(self, row_mb: float) -> None:
        self.row_mb, self.rows = row_mb, 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(100 * MB, 90 * MB, 10 * MB)

    def in_use_bytes(self) -> int:
        return 10 * MB

    @contextmanager
    def phase(self):
        reading = PhaseReading()
        yield reading
        reading.process_bytes = int((12 + self.rows * self.row_mb) * MB)

    def take(self, rows: int) -> int:
        self.rows = rows
        if 12 + rows * self.row_mb > 100:
            raise torch.OutOfMemoryError("out of memory")
        return rows


@pytest.fixture
def fit_on(monkeypatch):
    def made(device: Device, **options) -> Fit:
        fit = Fit("cpu", **{"group_size": 4, "utilization": 1.0, **options})
        fit._monitor = device
        return fit

    return made


def taken(fit: Fit, device: Device, passes: int, batch: int = 400) -> list[int]:
    found = []
    for _ in range(passes):
        with fit.rows("learn", batch) as rows:
            found.append(device.take(rows))
    return found


def test_rows_grow_as_they_are_seen_to_fit_and_stop_before_they_do_not(fit_on):
    """Of 90 MB a row takes 1.17 with what is added for longer ones and a pass's own 2 MB: 76 fit."""
    device = Device(1.0)
    found = taken(fit_on(device), device, 9)
    assert found[:5] == [4, 8, 16, 32, 60]  # doubled; 60 as whole groups go evenly into 400
    assert found[5:] == [68, 68, 68, 68]  # which go into 400 in as many passes
    assert taken(fit_on(device), device, 4, batch=8) == [4, 8, 8, 8]


def test_a_row_that_takes_more_lowers_them_at_once(fit_on):
    device = Device(1.0)
    fit = fit_on(device)
    taken(fit, device, 6)
    device.row_mb = 1.05
    taken(fit, device, 1)
    device.row_mb = 0.1  # and one that takes less does not raise them: the longest of the last passes counts
    assert max(taken(fit, device, 5)) <= 68


def test_what_runs_out_is_done_again_with_fewer_and_remembered(fit_on):
    device, discarded = Device(1.0), []
    fit = fit_on(device)
    taken(fit, device, 6)
    device.row_mb = 1.5
    done = fit.run("learn", device.take, 400, discard=lambda: discarded.append(1))
    assert done == 32 and len(discarded) == 2  # once more with 68, then half
    assert fit.plan("learn", 400) <= 32
    device.row_mb = 0.5
    taken(fit, device, AGAIN_AFTER + 20)
    assert fit.plan("learn", 400) > 32  # after a while it tries again


def test_an_error_in_the_block_goes_its_way_and_is_remembered(fit_on):
    device = Device(1.0)
    fit = fit_on(device)
    taken(fit, device, 5)
    with pytest.raises(torch.OutOfMemoryError), fit.rows("learn", 400) as rows:
        raise torch.OutOfMemoryError("out of memory")
    assert fit.plan("learn", 400) <= rows // 2
    with pytest.raises(KeyError), fit.rows("learn", 400):
        raise KeyError("another")
    with pytest.raises(DoesNotFit):
        fit_on(Device(200.0)).run("learn", Device(200.0).take, 8)


def test_a_group_that_does_not_fit_is_parted(fit_on):
    device = Device(30.0)
    fit = fit_on(device)
    assert fit.run("learn", device.take, 8) == 2  # of the four that are first tried
    assert fit.plan("learn", 8) == 2
    assert fit_on(device, limit_bytes=15 * MB).usable_bytes() == 15 * MB
