"""Where a step's time goes, with a clock that is set by hand."""

import pytest
import torch

from grpo.run import clock as module
from grpo.run.clock import Clock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


def test_phases_add_up_to_the_step_and_the_rest_is_other(time: Time):
    clock = Clock(torch.device("cpu"))
    for seconds in (2.0, 3.0):
        with clock("sample"):
            time.now += seconds
    time.now += 1.0
    assert clock.lap() == {"timing/sample_s": 5.0, "timing/other_s": 1.0, "step_time": 6.0}
    assert clock.lap() == {"timing/other_s": 0.0, "step_time": 0.0}


def test_a_phase_within_another_is_no_part_of_it(time: Time):
    """At any depth, and however often."""
    clock = Clock(torch.device("cpu"))
    with clock("learn"):
        time.now += 1.0
        for _ in range(2):
            with clock("update"):
                time.now += 10.0
                with clock("sync"):
                    time.now += 100.0
                time.now += 20.0
            time.now += 2.0
    with clock("reward"):
        time.now += 7.0
    assert clock.lap() == {
        "timing/sync_s": 200.0, "timing/update_s": 60.0, "timing/learn_s": 5.0, "timing/reward_s": 7.0,
        "timing/other_s": 0.0, "step_time": 272.0,
    }  # fmt: skip


def test_a_phase_that_ends_in_an_error_is_counted_too(time: Time):
    clock = Clock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock("learn"):
        time.now += 1.0
        with clock("update"):
            time.now += 2.0
            raise ZeroDivisionError
    assert clock.lap() == {
        "timing/update_s": 2.0, "timing/learn_s": 1.0, "timing/other_s": 0.0, "step_time": 3.0
    }  # fmt: skip
