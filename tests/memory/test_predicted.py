"""Rows that fit, against brute force; bytes by what is measured, and what that makes of a formula's."""

import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_processes import in_processes

from grpo.memory import Budget, DoesNotFit, Fit, Predictor, Shape, largest_rows, make_budget, predictor
from grpo.memory.budget import GB, DeviceMemory, larger_budget
from grpo.memory.loop import AGAIN_AFTER, Pass
from grpo.memory.monitor import PhaseReading
from grpo.memory.phase import Footprint
from grpo.memory.planner import even_rows, smaller_rows
from grpo.memory.predictor import LEAST_ERROR, REMEMBERED

pytestmark = pytest.mark.usefixtures("frozen")
MB = 2**20
GROUPS = st.integers(1, 16)

# ------------------------------------------------------------------------------- rows that fit


def test_sizes_to_try_halve_by_whole_groups_and_then_divide_the_group():
    for group_size, sizes in {8: [56, 24, 8, 4, 2, 1], 12: [20, 12, 6, 4, 3, 2, 1], 1: [7, 3, 1]}.items():
        assert [smaller_rows(rows, group_size) for rows in sizes] == [*sizes[1:], None]


@given(group_size=GROUPS, groups=GROUPS, odd=st.integers(0, 15), capacity=st.integers(0, 300))
def test_the_largest_rows_are_those_of_brute_force(group_size: int, groups: int, odd: int, capacity: int):
    batch_size = groups * group_size + odd % group_size  # a ceiling need not be whole groups
    asked: list[int] = []

    def fits(rows: int) -> bool:
        asked.append(rows)
        return rows <= capacity

    whole = [rows for rows in range(group_size, batch_size + 1, group_size) if rows <= capacity]
    parts = [rows for rows in range(1, group_size) if group_size % rows == 0 and rows <= capacity]
    found = largest_rows(fits, batch_size=batch_size, group_size=group_size)
    assert found == max(whole or parts, default=None)
    assert max(asked) <= batch_size
    assert len(asked) <= 1 + math.ceil(math.log2(groups + 1)) + group_size


@given(group_size=GROUPS, groups=GROUPS, at_once=GROUPS)
def test_even_rows_take_as_many_passes_and_no_smaller_ones_would_do(group_size, groups, at_once):
    batch_size, rows = groups * group_size, min(at_once, groups) * group_size
    even = even_rows(rows, batch_size=batch_size, group_size=group_size)
    passes = math.ceil(batch_size / rows)
    assert even <= rows and even % group_size == 0 and math.ceil(batch_size / even) == passes
    assert even == group_size or math.ceil(batch_size / (even - group_size)) > passes
    assert even_rows(3, batch_size=12, group_size=6) == 3  # parts of a group stay as they are


def test_the_memory_that_would_do_is_rounded_up_and_of_a_share_it_is_more():
    limit = Budget(GB // 2, "--memory-limit")
    assert larger_budget(limit, 0.651 * GB, 0.4 * GB) == "As it is, --memory-limit has to be at least 0.66GB."
    alone = larger_budget(limit, 0.66 * GB, 0.58 * GB)
    assert alone == "This process alone takes 0.58 GB: --memory-limit has to be at least 0.66GB."
    assert larger_budget(Budget(GB // 2, "free"), GB, 0.4 * GB) == "As it is, 1.00 GB have to be there."
    said = larger_budget(make_budget(DeviceMemory(GB, GB, 0), utilization=0.8), GB, 0.4 * GB)
    assert said == "As it is, 1.25 GB have to be there, of which 80% are used (--memory-utilization)."
    assert make_budget(DeviceMemory(5 * GB // 4, 2 * GB, 0), utilization=0.8).usable_bytes == GB


# ------------------------------------------------------------------- a loop nothing is known about


class Device:
    """One of 100 MB, of which 10 are held. A pass takes `pass_mb`, a row `row_mb` for every 100 tokens."""

    device = torch.device("cuda")

    def __init__(self, row_mb: float, pass_mb: float = 2.0) -> None:
        self.row_mb, self.pass_mb, self.rows = row_mb, pass_mb, 0
        self.memory, self.used_bytes = lambda: DeviceMemory(100 * MB, 90 * MB, 10 * MB), lambda: 10 * MB

    @contextmanager
    def phase(self, **_):
        reading = PhaseReading(process_before_bytes=10 * MB)
        yield reading
        reading.added_bytes = int((self.pass_mb + self.rows * self.row_mb) * MB)
        reading.process_bytes = 10 * MB + reading.added_bytes

    def take(self, rows: int, tokens: int = 100) -> int:
        self.rows = rows * tokens / 100
        if 10 + self.pass_mb + self.rows * self.row_mb > 100:
            raise torch.OutOfMemoryError("out of memory")
        return rows

    def fit(self, **options) -> Fit:
        fit = Fit("cpu", **{"group_size": 4, "utilization": 1.0, **options})
        fit._monitor = self
        return fit

    def taken(self, fit: Fit, passes: int, batch: int = 400, tokens: int = 100) -> list[int]:
        """Rows of passes that learn."""
        found = []
        for _ in range(passes):
            with fit.rows("learn", batch, tokens=tokens) as rows:
                found.append(self.take(rows, tokens))
        return found


@pytest.fixture
def device() -> Device:
    return Device(1.0)


@pytest.fixture
def fit(device: Device) -> Fit:
    return device.fit()


def test_rows_grow_as_they_are_seen_to_fit_and_stop_before_they_do_not(device, fit):
    """Of 88 MB a row takes 1; the formula of two sizes tells, with some error to count with."""
    found = device.taken(fit, 9)
    assert found[:3] == [4, 8, 32]  # a group, twice as many, four times as many
    assert found[3:] == [80] * 6  # 86 would fit, with the error stated; these go evenly into 400
    assert device.taken(device.fit(), 4, batch=8) == [4, 8, 8, 8]
    *_, last = fit.take_passes()
    assert last.rows == 80 and last.peak_bytes == 92 * MB and last.retries == 0
    assert abs(last.predicted_bytes - 92 * MB) < last.error_bytes < 2 * MB
    assert fit.take_passes() == []
    # Of 88 MB that are free gradients take 40, so that twice the rows seem not to fit, and do.
    device = Device(1.0, pass_mb=40.0)
    assert device.taken(device.fit(), 5, batch=24) == [4, 2, 12, 24, 24]


def test_rows_follow_the_tokens_of_which_only_the_result_may_tell(device, fit):
    device.taken(fit, 6)
    assert fit.plan("learn", 400, tokens=200) == 40  # half as many of twice the length
    device.taken(fit, 4, tokens=50)
    assert fit.plan("learn", 400, tokens=50) >= 134
    for _ in range(6):  # planned for the longest completions there may be; what is seen is shorter
        fit.run("sample", lambda rows: device.take(rows, 50), 400, tokens=100, took=lambda rows: 50)
    assert fit.take_passes()[-1].tokens == 50
    assert fit.plan("sample", 400, tokens=100) == 80


def test_a_row_that_takes_more_widens_the_error_at_once(device, fit):
    device.taken(fit, 6)
    device.row_mb = 1.09
    device.taken(fit, 1)
    assert sum(fit._predict("learn", 80, 100)) > (2 + 80 * 1.09) * MB
    device.taken(fit, 2)
    assert fit.plan("learn", 400, tokens=100) < 80


def test_what_runs_out_is_done_again_with_fewer_and_remembered_and_an_error_in_the_block_goes_its_way(
    device, fit
):
    discarded = []
    device.taken(fit, 6)
    device.row_mb = 1.5
    done = fit.run("learn", device.take, 400, tokens=100, discard=lambda: discarded.append(1))
    assert done == 40 and len(discarded) == 2  # once more with 80, then half
    assert fit.take_passes()[-1].retries == 2
    assert fit.plan("learn", 400, tokens=100) <= 40
    device.row_mb = 0.5
    device.taken(fit, AGAIN_AFTER + 20)
    assert fit.plan("learn", 400, tokens=100) > 40  # after a while it tries again
    device = Device(30.0)
    fit = device.fit()
    assert fit.run("learn", device.take, 8) == 2 == fit.plan("learn", 8)  # of the four that are first tried
    assert device.fit(limit_bytes=15 * MB).budget().usable_bytes == 15 * MB
    with pytest.raises(DoesNotFit):
        Device(200.0).fit().run("learn", Device(200.0).take, 8)
    device = Device(1.0)
    fit = device.fit()
    device.taken(fit, 5)
    with pytest.raises(torch.OutOfMemoryError), fit.rows("learn", 400, tokens=100) as rows:
        raise torch.OutOfMemoryError("out of memory")
    assert fit.plan("learn", 400, tokens=100) <= rows // 2
    with pytest.raises(KeyError), fit.rows("learn", 400):
        raise KeyError("another")


def test_processes_that_have_to_agree_take_as_many_and_do_not_do_it_again(device):
    fit = device.fit(agree=lambda rows: min(rows, 16), replays=False)
    assert device.taken(fit, 5) == [4, 8, 16, 16, 16]
    device.row_mb = 9.0
    with pytest.raises(DoesNotFit, match="16 rows"):
        fit.run("learn", device.take, 400)


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
    assert [each.rows for each in passes] == [4, 8, 32, 64] and all(each.peak_bytes > 0 for each in passes)
    assert 2 * 64 * MB <= added < 3 * 64 * MB and error > 0


# ------------------------------------------------------------------------------------- corrections

SHAPE = Shape(8, 50, 20)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Predictor]:
    """Of few bytes, and with an error of 5 % before anything is measured."""
    monkeypatch.setattr(predictor, "LEAST_ERROR_BYTES", 0.0)
    monkeypatch.setattr(predictor, "UNCALIBRATED_ERROR", 0.05)
    fits = {"learn": lambda shape: 10.0 * shape.rows, "score": lambda shape: 5.0 * shape.rows}
    return partial(Predictor, fits)


def learned(made: Predictor, *measured: float, shape: Shape = SHAPE) -> Footprint:
    """What SHAPE is predicted to take to learn, after measurements."""
    for size in measured:
        made.observe("learn", shape, size)
    return made.predict("learn", SHAPE)


def test_measured_peaks_correct_a_phase_by_the_median_of_the_newest_where_large_ones_weigh_more(made):
    each, first = made(), learned(made())
    assert (first.peak_bytes, first.error_bytes) == (80, 0.05 * 80)
    assert learned(made(), 0.0) == first  # what held nothing teaches nothing
    assert learned(each, 96, 96, 96, 800).peak_bytes == pytest.approx(96)  # one went wrong
    assert each.predict("score", SHAPE).peak_bytes == 40
    assert learned(made(bias=0.6)).peak_bytes == pytest.approx(48)
    assert learned(made(bias=0.6), 80).peak_bytes == pytest.approx(80)  # mended by one
    assert learned(made(), *[160] * REMEMBERED, *[80] * REMEMBERED).peak_bytes == 80
    each = made()
    learned(each, 5.0, shape=Shape(1, 50, 20))
    assert learned(each, 704.0, shape=Shape(64, 50, 20)).peak_bytes == pytest.approx(1.1 * 80)
    for measured in ((), (80,)):  # what no trace sees
        assert learned(made(scratch_bytes={"learn": 7.0}), *measured).error_bytes == 7.0
    # Measured at 1,000 bytes, predicted for 4,000: a small error is bytes, a large one a slope.
    for ratio, beyond in (0.98, -20.0), (1.04, 40.0), (0.9, -400.0), (1.6, 2400.0):
        each = made()
        each.observe("learn", Shape(100, 1, 1), ratio * 1000)
        predicted = [each.predict("learn", Shape(rows, 1, 1)).peak_bytes for rows in (50, 100, 400)]
        assert predicted == pytest.approx([ratio * 500, ratio * 1000, 4000 + beyond])


def test_the_error_is_the_scatter_narrows_with_each_measurement_and_survives_a_checkpoint(made):
    each, other = made(), made()
    errors = [learned(each, 80).error_bytes / 80 for _ in range(9)]
    assert errors[:3] == pytest.approx([0.05 / 2, 0.05 / 3, 0.05 / 4])
    assert errors[-1] == LEAST_ERROR  # never below
    wide = learned(each, *(72, 88) * 10)  # ten percent off: 95 % of them within that
    assert (wide.peak_bytes, wide.error_bytes / 80) == pytest.approx((80, 0.1 + 0.05 / 30))
    other.observe("score", SHAPE, 1000.0)  # forgotten: it is no part of the state
    other.restore(json.loads(json.dumps({**each.state(), "a phase of before": [1.0]})))
    for phase in ("learn", "score"):
        assert other.predict(phase, SHAPE) == each.predict(phase, SHAPE)
