"""The lines of a run, on a screen and on the disk: how far it is, and where its time goes."""

import io
import json
import math
import re
import resource
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from loguru import logger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from whole_runs import train

from grpo.config.groups import OptimizerSettings
from grpo.data.reward_functions import Scores
from grpo.distributed import World
from grpo.learning.optimizer import learning_rate
from grpo.logs import clock as clock_module
from grpo.logs import tracking, waiting
from grpo.logs.clock import Clock
from grpo.logs.metrics import warnings_of
from grpo.logs.progress import Progress
from grpo.logs.screen import LOG_FILE, StepProgress, configure_logging, held_out_line, in_one_line, keep_log
from grpo.logs.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, RunTracker, read_lines
from grpo.run.checkpoint import CheckpointFolder

LINE = OptimizerSettings(learning_rate=1.0, lr_schedule="linear", min_lr_ratio=0.0, warmup_steps=2)
METRICS = {
    "reward": 0.8365,
    "reward_std_within_groups": 0.151,
    "completions/mean_length": 144.2,
    "kl": 0.0123,
    "learning_rate": 1e-5,
    "step_time": 0.51,
    "memory/peak_gb": 20.016,
}
SAID = {"rewards": {"right": 1.0}, "components": {}, "prompt": "2 + 2?", "completion": "4\x1b[2J\nor so"}


class Seconds:
    """A clock that is set by hand; it stands for the module `time` as well."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__


def begun(steps: int, minutes: float | None) -> tuple[Seconds, Progress]:
    progress = Progress(steps, minutes, now=(clock := Seconds()))
    progress.begin()
    return clock, progress


def rates(steps: int, minutes: float | None, step_s: float, settings=LINE) -> list[float]:
    """The learning rate of each step of a run whose steps take so long."""
    clock, progress = begun(steps, minutes)
    found: list[float] = []
    while True:
        found.append(learning_rate(progress.position(len(found)), steps, settings))
        clock.now += step_s
        if progress.is_over(len(found), World()):
            return found


def test_a_schedule_goes_by_steps_and_where_minutes_end_a_run_they_have_annealed_it():
    """Ten steps are wanted, a minute holds five of 12 s: each is worth two, warm-up as well. At last, after 7
    of 20 s a run of 10 steps has done 3.5 of the 4 that warm up, which never exceeds its peak."""
    assert rates(6, None, 100.0) == rates(6, 1000.0, 1.0) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(6, None, 100.0) == [learning_rate(step, 6, LINE) for step in range(6)]
    assert rates(10, 1.0, 12.0) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25])
    constant = replace(LINE, warmup_steps=4, lr_schedule="constant")
    assert rates(10, 1 / 3, 7.0, constant) == pytest.approx([0.25, 1.0, 1.0])


def test_a_run_that_goes_on_counts_what_it_trained_and_not_the_pause():
    clock, first = begun(100, 1.0)
    clock.now += 24
    state = first.state(finished=3)
    assert state == {"trained_s": 24, "progress": pytest.approx(0.4)}
    clock.now += 10_000
    again = Progress(100, 1.0, now=clock)
    again.restore(state)
    assert again.position(3) == pytest.approx(40)
    again.begin()
    clock.now += 6
    assert not again.is_over(4, World()) and again.position(4) == pytest.approx(50)
    clock.now += 31
    assert again.is_over(5, World()) and again.share(5) == 1.0
    older = Progress(10, 1.0, now=clock)  # whose checkpoint says nothing of it
    older.restore({"step": 4})
    assert older.trained_s == 0 and older.position(4) == 4.0


def test_it_is_said_after_some_steps_what_will_end_the_run_and_at_last_what_has():
    """The first takes no time here: 60 more of 10 s, or 46 of 6 s."""
    for steps, step_s, said in (
        (110, 10.0, "minutes will end this run, after about 61 of 110 steps"),
        (50, 6.0, "steps will end this run, in about 4.6 minutes; it has 10"),
    ):
        clock, progress = begun(steps, 10.0)
        lines = []
        for step in range(1, 8):
            lines.append(progress.forecast(step))
            clock.now += step_s
        assert [line for line in lines if line] == [said] == lines[3:4]
    progress = Progress(110, 1.0, now=Seconds())
    assert progress.ended(38, 0.0) == "ended by minutes after 38 of 110 steps, learning rate 0"
    assert progress.ended(110, 1e-6) == "ended by steps after 110 of 110 steps, learning rate 1e-06"
    assert Progress(5, None).ended(5, 1e-6) == "done after 5 steps"
    assert (progress.of_steps, Progress(5, None).of_steps) == ("", " of 5")


def test_a_run_of_minutes_anneals_in_metrics_and_checkpoints_and_ends_once(config, made_up_plans):
    """Every look at the clock is 15 s of a minute and a half later, whatever the machine."""
    config = replace(config, steps=50, minutes=1.5, lr_schedule="linear", min_lr_ratio=0.0)
    clock = Seconds()

    def by_the_clock(trainer) -> None:
        trainer.progress._now, log = clock, trainer.log

        def thirty_seconds_later(*arguments):
            log(*arguments)
            clock.now += 30

        trainer.log = thirty_seconds_later

    folder = train(config, by_the_clock)
    state = CheckpointFolder(folder / "checkpoints", keep=1).newest_intact().state
    lines = read_lines(folder / METRICS_FILE)
    peak = config.learning_rate
    assert [line["learning_rate"] for line in lines] == pytest.approx([peak, 2 / 3 * peak, peak / 3])
    assert [line["progress"] for line in lines] == pytest.approx([0.02, 1 / 3, 2 / 3])
    assert (state["step"], state["trained_s"], state["progress"]) == (3, 90, 1.0)
    train(replace(config, resume=folder), by_the_clock)  # its minutes are used up
    assert read_lines(folder / METRICS_FILE) == lines


def test_phases_add_up_to_the_step_and_one_within_another_is_no_part_of_it(monkeypatch):
    """At any depth, and however often; one that ends in an error is counted, too."""
    monkeypatch.setattr(clock_module, "time", time := Seconds())
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
    with pytest.raises(ZeroDivisionError), clock("reward"):
        time.now += 7.0
        raise ZeroDivisionError
    time.now += 1.0
    assert clock.lap() == {
        "timing/sync_s": 200.0,
        "timing/update_s": 60.0,
        "timing/learn_s": 5.0,
        "timing/reward_s": 7.0,
        "timing/other_s": 1.0,
        "step_time": 273.0,
    }
    assert clock.lap() == {"timing/other_s": 0.0, "step_time": 0.0}


def warnings_in(logged: list[str]) -> list[str]:
    return [line.removeprefix("WARNING ") for line in logged if line.startswith("WARNING")]


def test_steps_are_warned_of_whose_rewards_are_equal_or_whose_completions_are_cut():
    def kinds(equal: float, cut: int) -> dict[str, str]:
        metrics = {"frac_reward_zero_std": equal, "completions/clipped_ratio": cut / 20}
        return warnings_of(7, metrics, num_rows=20, max_new_tokens=32, ends=["<|im_end|>", "<end>"])

    assert kinds(0.7, 9) == {} and kinds(0.75, 9).keys() == {"equal"} and kinds(0.7, 10).keys() == {"cut"}
    equal, cut = kinds(1.0, 20).values()
    assert "100% of the groups of step 7" in equal and "--temperature" in equal
    assert "20 of 20 completions of step 7" in cut
    assert "max_new_tokens 32" in cut and "|im_end|>, <end>" in cut


def test_a_run_that_learns_nothing_says_so(config, logged, monkeypatch, made_up_plans):
    """All rewards the same, and a model that never ends: each is said once a run."""
    monkeypatch.setattr(Scores, "rewards", property(lambda self: torch.zeros(len(self.table))))

    def never_ends(trainer) -> None:
        with torch.no_grad():
            trainer.model.lm_head.weight[0] = 0

    train(config, never_ends)
    equal, cut = sorted(warnings_in(logged))
    assert "100% of the groups of step 1" in equal and "8 of 8 completions of step 1" in cut


@pytest.fixture
def terminal():
    """A terminal of 80 columns that is read along; afterwards logs go where they went."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, markup=False)
    configure_logging("INFO", console)
    yield console, file
    logger.remove()
    logger.add(sys.stderr)
    waiting.show_on(None)


def test_what_takes_long_is_told_while_it_lasts_and_not_afterwards(logged, monkeypatch):
    timers = []
    monkeypatch.setattr(
        waiting, "threading", mock.Mock(Timer=lambda *of: timers.append((of, mock.Mock())) or timers[-1][1])
    )
    with waiting.log_if_slow("loading a {model}"):
        ((seconds, tell, words), timer) = timers[0]
        assert seconds == 2.0 and timer.start.called and not timer.cancel.called
        tell(*words)
    with pytest.raises(ValueError), waiting.log_if_slow("failing"):
        raise ValueError
    assert all(timer.cancel.called for _, timer in timers) and len(timers) == 2
    assert logged == ["INFO loading a {model} …"]


def test_a_step_is_one_line_of_80_columns_that_stays(terminal):
    """A completion moves no cursor. What is for programs is not shown, and lines are wrapped at words."""
    console, file = terminal
    bar = StepProgress(console, Progress(1000, None), finished=0)
    bar.update(1000, in_one_line(METRICS, 64))
    bar.show(SAID)
    bar.show({**SAID, "messages": [{"role": "user", "content": "Two and two?"}], "completion": "x" * 500})
    bar.close()
    (line,) = (line for line in file.getvalue().splitlines() if "reward" in line)
    line = line[line.index("step 1000:") :]
    assert line.rstrip() == "step 1000: reward 0.837 ± 0.15, 144 tokens, kl 0.0123, lr 1e-05, 125/s, 20.02 GB"
    assert len(line) <= 82  # of a thousand steps, on a large card
    without = in_one_line({name: value for name, value in METRICS.items() if name != "kl"}, 64)
    assert "kl" not in without and "144 tokens, lr 1e-05" in without
    said = file.getvalue()
    assert "2 + 2?" in said and "→ 4�[2J" in said and "(right 1.00)" in said
    assert "Two and two?" in said and "…" in said and "x" * 400 not in said
    logger.bind(piped=True).info("CPU memory - process: 0.60GB, peak: 0.60GB")
    logger.info("held-out at step 0: {}", held_out_line({f"eval_c{n}/some_column": 0.5 for n in range(9)}))
    said = re.sub(r"\x1b\[\d*m", "", file.getvalue()[len(said) :])
    assert "CPU memory" not in said
    assert max(map(len, said.splitlines())) <= 80 and said.count("0.500") == 9
    metrics = {"eval_policy/legal": 0.5, "eval_reward": 0.75, "eval_rewards/policy/mean": 0.8}
    assert held_out_line(metrics) == "reward 0.750, policy/legal 0.500, rewards/policy 0.800"


def test_the_log_beside_a_run_stands_a_full_disk_and_a_folder_in_its_place(tmp_path, logged):
    file = tmp_path / LOG_FILE
    with keep_log(tmp_path):
        logger.info("one")
    logger.info("two")
    assert [line.split()[-1] for line in file.read_text().splitlines()] == ["one"]
    for put_there in (lambda: file.symlink_to("/dev/full"), file.mkdir):
        file.unlink()
        put_there()
        with keep_log(tmp_path):
            logger.info("three")
    assert any("log.txt cannot be written" in line for line in logged)


@contextmanager
def tracker(folder, *, before_step=0, trackers=()):
    yield (run := RunTracker(folder, trackers=trackers, settings={}, before_step=before_step))
    run.close()


def steps(folder, name=METRICS_FILE) -> list[int]:
    return [record["step"] for record in read_lines(folder / name)]


def test_metrics_and_completions_are_json_lines_at_once(tmp_path):
    """Readable while the run goes on: each line is flushed. NaN is no JSON, and other readers refuse it."""
    assert read_lines(tmp_path / "no.jsonl") == []
    with tracker(tmp_path) as run:
        run.log(1, {"reward": 0.25, "kl": 0.5, "a": math.nan, "b": math.inf})
        run.log_completions(1, [{"row": 0, "completion": "a\nb é \u2028"}, {"row": 4, "completion": ""}])
        text = (tmp_path / METRICS_FILE).read_text()
        lines = read_lines(tmp_path / COMPLETIONS_FILE)
    record = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert record == {"step": 1, "reward": 0.25, "kl": 0.5, "a": None, "b": None}
    assert [line["row"] for line in lines] == [0, 4] and lines[0]["completion"] == "a\nb é \u2028"


def test_on_resume_lines_after_the_checkpoint_go(tmp_path, monkeypatch):
    """There is a line of memory a phase, in a file for each process. A kill meanwhile loses nothing."""
    with tracker(tmp_path) as run:
        for number in (0, 1, 2, 3):
            run.log(number, {"reward": number / 10})
            run.log_completions(number, [{"row": 0}, {"row": 1}])
            run.log_memory(number, [[{"phase": "sample"}, {"phase": "learn", "rows": 4}], [{"rows": 3}]])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", mock.Mock(side_effect=KeyboardInterrupt))
        tracker(tmp_path, before_step=1).__enter__()
    assert steps(tmp_path) == [0, 1, 2, 3]
    with tracker(tmp_path, before_step=2) as run:
        run.log(3, {"reward": 9.0})
        run.log_memory(3, [[{"phase": "sample", "rows": 2}]])
    records = [(each["step"], each["reward"]) for each in read_lines(tmp_path / METRICS_FILE)]
    assert records == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 9.0)]
    assert steps(tmp_path, COMPLETIONS_FILE) == [0, 0, 1, 1, 2, 2]
    memory = read_lines(tmp_path / MEMORY_FILE)
    assert memory[1] == {"step": 0, "phase": "learn", "rows": 4}
    assert [each["step"] for each in memory] == [0, 0, 1, 1, 2, 2, 3] and memory[-1]["rows"] == 2
    others = read_lines(tmp_path / tracking.process_file(MEMORY_FILE, 1))[:2]
    assert others == [{"step": n, "rows": 3} for n in (0, 1)]
    assert not list(tmp_path.glob("*.tmp"))


def test_new_lines_come_once_and_half_a_line_waits_for_its_rest(tmp_path, logged):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    new_lines = tracking.NewLines(file)
    assert new_lines() == [{"step": 1}, {"step": 2}]
    assert new_lines() == []
    with file.open("a") as growing:
        growing.write('{"step": 3}\n{"st')
        growing.flush()
        assert new_lines() == [{"step": 3}]
        growing.write('ep": 4}\n')
    assert new_lines() == [{"step": 4}] and not logged


def test_a_full_disk_is_one_warning_each_time_and_not_the_end(tmp_path, logged):
    """A real one: for a while no file may grow beyond 2 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tracker(tmp_path) as run:
        for _ in range(2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
            for number in range(200):
                run.log(number, {f"metric_{i}": 0.5 for i in range(20)})
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            run.log(200, {"reward": 0.5})  # there is room again
    assert len(logged) == 2 and all(f"{METRICS_FILE} cannot be written" in line for line in logged)
    assert run.unwritten == [METRICS_FILE] and steps(tmp_path)[-1] == 200


def test_tensorboard_gets_the_same_names_and_where_it_cannot_open_the_run_goes_on(tmp_path, logged):
    with tracker(tmp_path, trackers=("tensorboard",)) as run:
        for number in (1, 2):
            run.log(number, {"rewards/policy/mean": number / 4, "kl": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("rewards/policy/mean")]
    assert scalars == [(1, 0.25), (2, 0.5)]
    (other := tmp_path / "other").mkdir()
    (other / "tensorboard").write_text("in the way")
    with tracker(other, trackers=("tensorboard",)) as run:
        run.log(1, {"reward": 0.5})
    assert read_lines(other / METRICS_FILE) == [{"step": 1, "reward": 0.5}]
    assert [line for line in logged if "tensorboard cannot be written" in line] and len(logged) == 1


def test_wandb_wants_a_login_beforehand_and_a_resumed_run_goes_on_as_the_same_one(monkeypatch, tmp_path):
    """Unless it is to be offline. Who is not installed is told in test_setup.py."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "wandb", wandb := mock.Mock())
    for mode, logged_in in (("online", True), ("offline", False)):
        monkeypatch.setenv("WANDB_MODE", mode)
        wandb.login.return_value = logged_in
        tracking.check_trackers(("tensorboard", "wandb"))
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match="nobody is logged in: wandb login, or set WANDB_MODE=offline"):
        tracking.check_trackers(("wandb",))
    for folder in (tmp_path / "a", tmp_path / "b", tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        with tracker(folder, trackers=("wandb",)):
            pass
    begun = [call.kwargs for call in wandb.init.call_args_list]
    first, other, again = (each["id"] for each in begun)
    assert first == again != other and all(each["resume"] == "allow" for each in begun)
    assert not any(call.kwargs["prompt"] for call in wandb.login.call_args_list)  # as a run begins


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_completions_are_a_table_in_trackers_that_have_one(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, library := mock.Mock())
    library.Table.side_effect = lambda columns, data: (columns, data)
    with tracker(tmp_path, trackers=(name,)) as run:
        run.log(3, {"reward": 0.5})
        run.log_completions(
            3, [{"completion": "a", "rewards": {"right": 1.0}}, {"completion": "b", "row": 4}]
        )
    table = (["completion", "rewards", "row"], [["a", '{"right": 1.0}', None], ["b", None, 4]])
    sent = [(call.args[0], call.kwargs) for call in library.init.return_value.log.call_args_list]
    assert sent == [({"reward": 0.5}, {"step": 3}), ({"completions": table}, {"step": 3})]
    assert library.init.call_args.kwargs["name"] == tmp_path.name
    library.init.return_value.finish.assert_called_once()
