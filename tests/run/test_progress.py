"""Schedules go by whichever of steps and minutes is further, and a pause is no training."""

import dataclasses

import pytest
from rich.console import Console

from grpo.config.groups import OptimizerSettings
from grpo.distributed import World
from grpo.learning.optimizer import learning_rate
from grpo.run.interrupt import StopRequest
from grpo.run.progress import Progress
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.trainer import Trainer

LINE = OptimizerSettings(learning_rate=1.0, lr_schedule="linear", min_lr_ratio=0.0, warmup_steps=2)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def rates(
    steps: int, minutes: float | None, step_s: float, settings: OptimizerSettings = LINE
) -> list[float]:
    """The learning rate of each step of a run whose steps take so long."""
    clock = Clock()
    progress = Progress(steps, minutes, now=clock)
    progress.begin()
    found: list[float] = []
    while True:
        found.append(learning_rate(progress.position(len(found)), steps, settings))
        clock.seconds += step_s
        if progress.is_over(len(found), World()):
            return found


def test_without_minutes_a_schedule_goes_by_steps_alone():
    expected = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(6, None, 100.0) == rates(6, 1000.0, 1.0) == expected
    assert rates(6, None, 100.0) == [learning_rate(step, 6, LINE) for step in range(6)]


def test_where_minutes_end_a_run_they_have_annealed_it_as_well():
    """Ten steps are wanted, a minute holds five of 12 s: each is worth two, warm-up as well."""
    assert rates(10, 1.0, 12.0) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25])


def test_a_warm_up_never_exceeds_its_peak():
    """Parts of steps: after 7 of 20 s a run of 10 steps has done 3.5 of the 4 that warm up."""
    settings = dataclasses.replace(LINE, warmup_steps=4, lr_schedule="constant")
    assert rates(10, 1 / 3, 7.0, settings) == pytest.approx([0.25, 1.0, 1.0])


def test_a_run_that_goes_on_counts_what_it_trained_and_not_the_pause():
    clock = Clock()
    first = Progress(100, 1.0, now=clock)
    first.begin()
    clock.seconds += 24
    state = first.state(finished=3)
    assert state == {"trained_s": 24, "progress": pytest.approx(0.4)}
    clock.seconds += 10_000
    again = Progress(100, 1.0, now=clock)
    again.restore(state)
    assert again.position(3) == pytest.approx(40)
    again.begin()
    clock.seconds += 6
    assert not again.is_over(4, World()) and again.position(4) == pytest.approx(50)
    clock.seconds += 31
    assert again.is_over(5, World()) and again.share(5) == 1.0


def test_checkpoints_of_before_count_from_their_resumption():
    progress = Progress(10, 1.0, now=Clock())
    progress.restore({"step": 4})
    assert progress.trained_s == 0 and progress.position(4) == 4.0


@pytest.mark.parametrize(
    ("steps", "step_s", "said"),
    [
        (110, 10.0, "minutes will end this run, after about 61 of 110 steps"),
        (50, 6.0, "steps will end this run, in about 4.6 minutes; it has 10"),
    ],
)
def test_after_some_steps_it_is_said_what_will_end_the_run(steps, step_s, said):
    """The first takes no time here: 60 more of 10 s, or 46 of 6 s."""
    clock = Clock()
    progress = Progress(steps, 10.0, now=clock)
    progress.begin()
    lines = []
    for step in range(1, 8):
        lines.append(progress.forecast(step))
        clock.seconds += step_s
    assert [line for line in lines if line] == [said] == lines[3:4]


def test_what_has_ended_a_run():
    clock = Clock()
    progress = Progress(110, 1.0, now=clock)
    assert progress.ended(38, 0.0) == "ended by minutes after 38 of 110 steps, learning rate 0"
    assert progress.ended(110, 1e-6) == "ended by steps after 110 of 110 steps, learning rate 1e-06"
    assert Progress(5, None).ended(5, 1e-6) == "done after 5 steps"
    assert (progress.of_steps, Progress(5, None).of_steps) == ("", " of 5")


def test_a_run_of_minutes_anneals_in_metrics_and_checkpoints_and_ends_once(config, made_up_plans):
    """Every look at the clock is 15 s of a minute and a half later, whatever the machine."""
    optimizer = dataclasses.replace(config.optimizer, lr_schedule="linear", min_lr_ratio=0.0)
    config = dataclasses.replace(config, steps=50, minutes=1.5, eval_interval=0, optimizer=optimizer)
    clock = Clock()

    def trainer(run) -> Trainer:
        made = Trainer(run, Console(quiet=True))
        made.progress._now = clock
        log = made.log

        def thirty_seconds_later(*arguments):
            metrics = log(*arguments)
            clock.seconds += 30
            return metrics

        made.log = thirty_seconds_later
        return made

    with open_run(config) as run:
        trainer(run).train(StopRequest())
        state = run.checkpoints.newest_intact().state
        lines = read_lines(run.folder / METRICS_FILE)
    peak = config.optimizer.learning_rate
    assert [line["learning_rate"] for line in lines] == pytest.approx([peak, 2 / 3 * peak, peak / 3])
    assert [line["progress"] for line in lines] == pytest.approx([0.02, 1 / 3, 2 / 3])
    assert (state["step"], state["trained_s"], state["progress"]) == (3, 90, 1.0)
    with open_run(dataclasses.replace(config, resume=run.folder)) as run:
        over = trainer(run)
        over.train(StopRequest())
        assert over.finished == 3  # its minutes are used up
