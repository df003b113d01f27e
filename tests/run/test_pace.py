"""How slow a plan of few rows is, said before the first step."""

import dataclasses

import pytest

from grpo.memory.step_plan import StepPlan
from grpo.run import pace
from grpo.run.pace import Pace, StepPace
from grpo.run.setup import open_run

pytestmark = pytest.mark.usefixtures("made_up_plans")


def test_a_pass_and_a_row_are_told_apart_by_two_passes(monkeypatch):
    """0.5 s a pass and 0.1 s a row; the first time takes 3 s more, which is not counted."""
    now, done = [0.0], set()

    def work(rows: int) -> None:
        now[0] += 0.5 + 0.1 * rows + (0.0 if rows in done else 3.0)
        done.add(rows)

    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    measured = pace.pace(work, 1, 8)
    assert (measured.pass_s, measured.row_s) == (pytest.approx(0.5), pytest.approx(0.1))
    assert measured.seconds(256, 24) == pytest.approx(11 * 0.5 + 25.6)


def test_noise_makes_no_negative_time(monkeypatch):
    seconds = iter([2.0, 2.0, 1.0, 1.0])
    monkeypatch.setattr(pace, "_seconds", lambda work, rows: next(seconds))
    assert pace.pace(lambda rows: None, 1, 8) == Pace(2.0, 0.0)


@pytest.fixture
def room_for(monkeypatch):
    """room_for(rows): memory in which learning has so many at once."""
    plan_one = StepPlan.plan_one

    def limit(rows: int) -> None:
        def planned(plan, phase, budget, batch_size, *lengths):
            return plan_one(plan, phase, budget, rows if phase == "learn" else batch_size, *lengths)

        monkeypatch.setattr(StepPlan, "plan_one", planned)

    return limit


@pytest.mark.parametrize(("rows", "times"), [(4, "1.1"), (1, "1.8")])
def test_a_run_says_how_slow_its_plan_is(config, logged, monkeypatch, room_for, rows, times):
    """7 s of sampling, 1 of scoring, learning 1 a pass: 10 with 2, 16 with 8, and 9 with all at once."""
    done: list[float] = []
    monkeypatch.setattr(pace, "pace", lambda *_: Pace(1.0, 0.0))
    monkeypatch.setattr(pace.time, "perf_counter", lambda: float(len(done)))
    for work in ("_sample", "_pass"):
        monkeypatch.setattr(StepPace, work, lambda *_: done.append(1.0))
    monkeypatch.setattr(StepPace, "_lengths", 7.0)
    room_for(rows)
    with open_run(config):
        said = [line for line in logged if "times as long" in line]
    assert len(said) == 1 and f"learn {rows} of 8 rows at once" in said[0]
    assert f"{times} times as long" in said[0]


def test_passes_are_as_planned_and_leave_nothing_behind(config, room_for):
    room_for(1)
    with open_run(config) as run:
        assert all(parameter.grad is None for parameter in run.policy.model.parameters())
        assert run.memory.plan["learn"].rows == 1


@pytest.mark.parametrize("asked_for", [{}, {"rollout_rows": 4, "score_rows": 2, "train_rows": 1}])
def test_a_run_of_all_rows_at_once_or_as_few_as_given_says_nothing(config, logged, monkeypatch, asked_for):
    monkeypatch.setattr(pace, "pace", None)
    with open_run(dataclasses.replace(config, **asked_for)):
        assert not any("times as long" in line for line in logged)
