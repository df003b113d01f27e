"""Rows for a loop that nothing is known about, on a device that is made up."""

from contextlib import contextmanager

import pytest
import torch
from several_processes import in_processes

from grpo.memory import DoesNotFit, Fit
from grpo.memory.budget import DeviceMemory
from grpo.memory.loop import AGAIN_AFTER, Pass
from grpo.memory.monitor import PhaseReading

MB = 2**20


class Device:
    """One of 100 MB, of which 10 are held. A pass takes `pass_mb`, a row `row_mb` for every 100 tokens."""

    device = torch.device("cuda")

    def __init__(self, row_mb: float, pass_mb: float = 2.0) -> None:
        self.row_mb, self.pass_mb, self.rows = row_mb, pass_mb, 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(100 * MB, 90 * MB, 10 * MB)

    def used_bytes(self) -> int:
        return 10 * MB

    @contextmanager
    def phase(self, *, exact: bool = False):
        reading = PhaseReading(process_before_bytes=10 * MB)
        yield reading
        reading.added_bytes = int((self.pass_mb + self.rows * self.row_mb) * MB)
        reading.process_bytes = 10 * MB + reading.added_bytes

    def take(self, rows: int, tokens: int = 100) -> int:
        self.rows = rows * tokens / 100
        if 10 + self.pass_mb + self.rows * self.row_mb > 100:
            raise torch.OutOfMemoryError("out of memory")
        return rows


@pytest.fixture
def fit_on(monkeypatch):
    def made(device: Device, **options) -> Fit:
        fit = Fit("cpu", **{"group_size": 4, "utilization": 1.0, **options})
        fit._monitor = device
        return fit

    return made


def taken(fit: Fit, device: Device, passes: int, batch: int = 400, tokens: int = 100) -> list[int]:
    found = []
    for _ in range(passes):
        with fit.rows("learn", batch, tokens=tokens) as rows:
            found.append(device.take(rows, tokens))
    return found


def test_rows_grow_as_they_are_seen_to_fit_and_stop_before_they_do_not(fit_on):
    """Of 88 MB a row takes 1; the formula of two sizes tells, with some error to count with."""
    device = Device(1.0)
    fit = fit_on(device)
    found = taken(fit, device, 9)
    assert found[:3] == [4, 8, 32]  # a group, twice as many, four times as many
    assert found[3:] == [80] * 6  # 86 would fit, with the error stated; these go evenly into 400
    assert taken(fit_on(device), device, 4, batch=8) == [4, 8, 8, 8]
    *_, last = fit.take_passes()
    assert last.rows == 80 and last.peak_bytes == 92 * MB and last.retries == 0
    assert abs(last.predicted_bytes - 92 * MB) < last.error_bytes < 2 * MB
    assert fit.take_passes() == []


def test_rows_follow_the_tokens(fit_on):
    device = Device(1.0)
    fit = fit_on(device)
    taken(fit, device, 6)
    assert fit.plan("learn", 400, tokens=200) == 40  # half as many of twice the length
    taken(fit, device, 4, tokens=50)
    assert fit.plan("learn", 400, tokens=50) >= 134


def test_a_row_that_takes_more_widens_the_error_at_once(fit_on):
    device = Device(1.0)
    fit = fit_on(device)
    taken(fit, device, 6)
    device.row_mb = 1.09
    taken(fit, device, 1)
    assert sum(fit._predict("learn", 80, 100)) > (2 + 80 * 1.09) * MB
    taken(fit, device, 2)
    assert fit.plan("learn", 400, tokens=100) < 80


def test_what_runs_out_is_done_again_with_fewer_and_remembered(fit_on):
    device, discarded = Device(1.0), []
    fit = fit_on(device)
    taken(fit, device, 6)
    device.row_mb = 1.5
    done = fit.run("learn", device.take, 400, tokens=100, discard=lambda: discarded.append(1))
    assert done == 40 and len(discarded) == 2  # once more with 80, then half
    assert fit.take_passes()[-1].retries == 2
    assert fit.plan("learn", 400, tokens=100) <= 40
    device.row_mb = 0.5
    taken(fit, device, AGAIN_AFTER + 20)
    assert fit.plan("learn", 400, tokens=100) > 40  # after a while it tries again


def test_an_error_in_the_block_goes_its_way_and_is_remembered(fit_on):
    device = Device(1.0)
    fit = fit_on(device)
    taken(fit, device, 5)
    with pytest.raises(torch.OutOfMemoryError), fit.rows("learn", 400, tokens=100) as rows:
        raise torch.OutOfMemoryError("out of memory")
    assert fit.plan("learn", 400, tokens=100) <= rows // 2
    with pytest.raises(KeyError), fit.rows("learn", 400):
        raise KeyError("another")
    with pytest.raises(DoesNotFit):
        fit_on(Device(200.0)).run("learn", Device(200.0).take, 8)


def test_a_group_that_does_not_fit_is_parted(fit_on):
    device = Device(30.0)
    fit = fit_on(device)
    assert fit.run("learn", device.take, 8) == 2  # of the four that are first tried
    assert fit.plan("learn", 8) == 2
    assert fit_on(device, limit_bytes=15 * MB).budget().usable_bytes == 15 * MB


def test_what_a_pass_takes_whatever_its_rows_is_found_out_with_fewer(fit_on):
    """Of 88 MB that are free gradients take 40, so that twice the rows seem not to fit, and do."""
    device = Device(1.0, pass_mb=40.0)
    assert taken(fit_on(device), device, 5, batch=24) == [4, 2, 12, 24, 24]


def test_processes_that_have_to_agree_take_as_many_and_do_not_do_it_again(fit_on):
    device = Device(1.0)
    fit = fit_on(device, agree=lambda rows: min(rows, 16), replays=False)
    assert taken(fit, device, 5) == [4, 8, 16, 16, 16]
    device.row_mb = 9.0
    with pytest.raises(DoesNotFit, match="16 rows"):
        fit.run("learn", device.take, 400)


def test_what_only_the_result_tells_is_measured_by_it(fit_on):
    """Sampling is planned for the longest completions there may be; what is seen is shorter."""
    device = Device(1.0)
    fit = fit_on(device)
    for _ in range(6):
        fit.run("sample", lambda rows: device.take(rows, 50), 400, tokens=100, took=lambda rows: 50)
    assert fit.take_passes()[-1].tokens == 50
    assert fit.plan("sample", 400, tokens=100) == 80


def two_megabytes_a_row(rank: int) -> tuple[list[Pass], tuple[float, float]]:
    """Four passes, and what 64 rows are then said to add."""
    fit = Fit("cpu", group_size=4)
    for _ in range(4):
        fit.run("learn", lambda rows: torch.ones(rows, 2**18).add(1.0).sum(), 64)
    return fit.take_passes(), fit._predict("learn", 64, 1)


def test_on_a_cpu_what_the_process_takes_beside_its_tensors_counts():
    """In a process of its own: what other tests freed and kept would play a part."""
    (ended,) = in_processes(1, two_megabytes_a_row)
    assert ended.error is None
    passes, (added, error) = ended.value
    assert [each.rows for each in passes] == [4, 8, 32, 64]
    assert all(each.peak_bytes > 0 for each in passes)
    assert 2 * 64 * MB <= added < 3 * 64 * MB and error > 0
