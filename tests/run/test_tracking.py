import errno
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo.run import tracking
from grpo.run.tracking import (
    COMPLETIONS_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    NewLines,
    RunTracker,
    check_trackers,
    process_file,
    read_lines,
)


def tracker(folder, *, before_step=0, trackers=()) -> RunTracker:
    return RunTracker(folder, trackers=trackers, settings={}, before_step=before_step)


def steps(folder, name=METRICS_FILE) -> list[int]:
    return [record["step"] for record in read_lines(folder / name)]


def test_metrics_and_completions_are_json_lines_at_once(tmp_path):
    """Readable while the run goes on: each line is flushed."""
    run = tracker(tmp_path)
    run.log(1, {"reward": 0.25, "kl": 0.5})
    run.log_completions(1, [{"row": 0, "completion": "a\nb é \u2028"}, {"row": 4, "completion": ""}])
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"step": 1, "reward": 0.25, "kl": 0.5}
    lines = read_lines(tmp_path / COMPLETIONS_FILE)
    assert [line["row"] for line in lines] == [0, 4] and lines[0]["completion"] == "a\nb é \u2028"
    run.close()


def test_memory_has_a_line_a_phase_and_begins_again_after_the_checkpoint(tmp_path):
    run = tracker(tmp_path)
    for step in (1, 2):
        run.log_memory(step, [[{"phase": "sample", "rows": 8}, {"phase": "learn", "rows": 4}], [{"rows": 3}]])
    assert read_lines(tmp_path / MEMORY_FILE)[1] == {"step": 1, "phase": "learn", "rows": 4}
    run.close()
    run = tracker(tmp_path, before_step=1)
    run.log_memory(2, [[{"phase": "sample", "rows": 2}]])
    run.close()
    assert steps(tmp_path, MEMORY_FILE) == [1, 1, 2]
    assert read_lines(tmp_path / MEMORY_FILE)[-1]["rows"] == 2
    of_another_process = read_lines(tmp_path / process_file(MEMORY_FILE, 1))
    assert of_another_process == [{"step": 1, "rows": 3}, {"step": 2, "rows": 3}]


def test_what_is_not_finite_is_null(tmp_path):
    """NaN is no JSON, and other readers refuse it."""
    run = tracker(tmp_path)
    run.log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    run.close()
    text = (tmp_path / METRICS_FILE).read_text()
    refused = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert refused == {"step": 1, "a": None, "b": None, "c": 1.0}


def test_on_resume_lines_after_the_checkpoint_go(tmp_path):
    run = tracker(tmp_path)
    for step in (0, 1, 2, 3, 4):
        run.log(step, {"reward": step / 10})
        run.log_completions(step, [{"row": 0}, {"row": 1}])
    run.close()
    run = tracker(tmp_path, before_step=2)
    run.log(3, {"reward": 9.0})
    run.close()
    records = read_lines(tmp_path / METRICS_FILE)
    assert [(r["step"], r["reward"]) for r in records] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 9.0)]
    assert steps(tmp_path, COMPLETIONS_FILE) == [0, 0, 1, 1, 2, 2]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("tail", ['{"step": 3, "rew', "\0\0\0\0", '{"step": 3, "reward": 1'])
def test_a_last_line_that_a_kill_cut_short_is_dropped_with_a_warning(tmp_path, logged, tail):
    run = tracker(tmp_path)
    run.log(1, {"reward": 0.5})
    run.log(2, {"reward": 0.6})
    run.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(tail)
    assert steps(tmp_path) == [1, 2]
    assert any("WARNING" in line and "broken line" in line for line in logged)
    run = tracker(tmp_path, before_step=2)
    run.log(3, {"reward": 0.7})
    run.close()
    assert steps(tmp_path) == [1, 2, 3]
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 3


def test_a_kill_while_the_file_is_cut_loses_nothing(tmp_path, monkeypatch):
    run = tracker(tmp_path)
    for step in (1, 2, 3):
        run.log(step, {})
    run.close()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        tracker(tmp_path, before_step=2)
    assert steps(tmp_path) == [1, 2, 3]


def test_new_lines_come_once_and_half_a_line_waits_for_its_rest(tmp_path, logged):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    new_lines = NewLines(file)
    assert new_lines() == [{"step": 1}, {"step": 2}]
    assert new_lines() == []
    with file.open("a") as growing:
        growing.write('{"step": 3}\n{"st')
        growing.flush()
        assert new_lines() == [{"step": 3}]
        growing.write('ep": 4}\n')
    assert new_lines() == [{"step": 4}] and not logged


def test_without_a_file_there_are_no_lines(tmp_path):
    assert read_lines(tmp_path / "no.jsonl") == []


class FullDisk:
    def write(self, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = close = add_scalar = write


def test_a_full_disk_is_one_warning_each_and_not_the_end(tmp_path, logged):
    run = tracker(tmp_path)
    metrics_file, run._metrics._file = run._metrics._file, FullDisk()
    run._board = FullDisk()
    for step in (1, 2):
        run.log(step, {"reward": 0.5})
    run._metrics._file = metrics_file  # there is room again
    run.log(3, {"reward": 0.5})
    run._metrics._file = FullDisk()
    run.close()
    warnings = [line for line in logged if "cannot be written" in line]
    assert [METRICS_FILE in line for line in warnings] == [True, False, True]
    assert "tensorboard" in warnings[1]
    metrics_file.close()
    assert steps(tmp_path) == [3]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_real_full_disk(tmp_path, logged):
    run = tracker(tmp_path)
    run._metrics.close()
    run._metrics._file = Path("/dev/full").open("a")  # noqa: SIM115
    for step in range(200):  # more than any buffer holds
        run.log(step, {f"metric_{i}": 0.5 for i in range(20)})
    run.close()
    assert sum("No space left" in line for line in logged) == 1


def test_tensorboard_gets_the_same_names(tmp_path):
    run = tracker(tmp_path, trackers=("tensorboard",))
    for step in (1, 2):
        run.log(step, {"rewards/policy/mean": step / 4, "kl": math.nan})
    run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("rewards/policy/mean")]
    assert scalars == [(1, 0.25), (2, 0.5)]


def test_a_tracker_that_is_not_installed_is_said_beforehand(monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="trackers names wandb, which is not installed: pip install wandb"):
        check_trackers(("tensorboard", "wandb"))
    check_trackers(("tensorboard",))


class Wandb:
    """What W&B is asked."""

    def __init__(self, logged_in: bool = True) -> None:
        self.logged_in, self.begun = logged_in, []

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt  # in the middle of a run's beginning
        return self.logged_in

    def init(self, **options):
        self.begun.append(options)
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)


@pytest.mark.parametrize(("mode", "logged_in"), [("online", False), ("online", True), ("offline", False)])
def test_a_tracker_that_wants_a_login_says_so_before_anything_is_loaded(monkeypatch, mode, logged_in):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "wandb", Wandb(logged_in))
    monkeypatch.setenv("WANDB_MODE", mode)
    if logged_in or mode == "offline":
        check_trackers(("wandb",))
    else:
        with pytest.raises(ValueError, match="nobody is logged in: wandb login, or set WANDB_MODE=offline"):
            check_trackers(("wandb",))


def test_a_resumed_run_goes_on_as_the_same_one_of_wandb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Wandb())
    for folder in (tmp_path / "a", tmp_path / "b", tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        RunTracker(folder, trackers=("wandb",), settings={}).close()
    first, other, again = (each["id"] for each in wandb.begun)
    assert first == again != other and all(each["resume"] == "allow" for each in wandb.begun)


def test_a_board_that_cannot_be_opened_is_said_and_the_run_goes_on(tmp_path, logged):
    (tmp_path / "tensorboard").write_text("in the way")
    tracker = RunTracker(tmp_path, trackers=("tensorboard",), settings={})
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    assert read_lines(tmp_path / METRICS_FILE) == [{"step": 1, "reward": 0.5}]
    assert [line for line in logged if "tensorboard cannot be written" in line] and len(logged) == 1
