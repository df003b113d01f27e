"""Invariance I3 and its accidents: a step is the same step however many processes share its work."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from several_processes import (
    Trained,
    attacked_at_step_two,
    broken_at_step_two,
    in_processes,
    kept_together,
    killed_at_step_three,
    stopped_at_step_two,
    stuck_at_step_two,
    train,
)

from grpo.config import Config
from grpo.config.groups import OptimizerSettings
from grpo.run.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, process_file, read_lines

STEPS = 2
VARIANTS = {
    "plain": {},
    "rich": {
        "num_iterations": 2, "kl_in_reward": True, "refill_groups": 2, "importance_cap": 2.0,
        "advantage_scale": "batch", "mask_truncated": True,
    },
}  # fmt: skip
OTHER_PLANS = {
    1: {"rollout_rows": 2, "train_rows": 2, "score_rows": 4},
    2: {"rollout_rows": 4, "train_rows": 1},
}


@pytest.fixture
def fp64(config) -> Config:
    """Five groups of four in float64: no share of two or three processes is like another."""
    optimizer = OptimizerSettings(learning_rate=1e-3)
    return dataclasses.replace(
        config, steps=STEPS, batch_size=20, precision="fp64", eval_prompts=5, optimizer=optimizer,
        logged_completions=20,
    )  # fmt: skip


def trained(size: int, config: Config, **options) -> list[Trained]:
    """A run in so many processes that all come to its end."""
    arguments = [options.get(name) for name in ("changes", "faults", "during", "stop_after")]
    ended = in_processes(size, train, config, arguments[0], arguments[1] or (), *arguments[2:])
    assert [each.error for each in ended] == [None] * size
    return [each.value for each in ended]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """All but times and memory."""
    # The noise is told from what each process has, or from halves: the same only in expectation.
    passing = ("timing/", "memory/", "step_time", "processes/", "gradient/noise_scale")
    return [
        {name: value for name, value in record.items() if not name.startswith(passing)}
        for record in read_lines(folder / METRICS_FILE)
    ]


def assert_same_run(one: Trained, other: Trained) -> None:
    """Gradients to 1e-12, tokens exactly, metrics as far as sums in another order can be the same."""
    assert len(one.gradients) == len(other.gradients)
    for gradient, theirs in zip(one.gradients, other.gradients, strict=True):
        assert gradient.norm() > 1e-3
        assert (gradient - theirs).norm() <= 1e-12 * gradient.norm()
    assert (one.weights - other.weights).norm() <= 1e-12 * one.weights.norm()
    lines = [read_lines(run.folder / COMPLETIONS_FILE) for run in (one, other)]
    for mine, theirs in zip(*lines, strict=True):
        assert mine.pop("advantage") == pytest.approx(theirs.pop("advantage"), rel=1e-9, abs=1e-12)
        assert mine == theirs
    for mine, theirs in zip(metrics_of(one.folder), metrics_of(other.folder), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_i3_a_step_does_not_depend_on_how_many_processes_share_it(fp64, variant):
    """Uneven shares, and another plan in each process."""
    config = dataclasses.replace(fp64, **VARIANTS[variant])
    (alone,) = trained(1, dataclasses.replace(config, name="alone"))
    for size in (2, 3):
        together = trained(size, dataclasses.replace(config, name=f"{size}"), changes=OTHER_PLANS)
        assert_same_run(alone, together[0])
        for run in together[1:]:  # not one bit apart
            assert torch.equal(run.weights, together[0].weights)
        steps = STEPS * config.num_iterations
        groups = {2: [2, 3], 3: [1, 2, 2]}[size]
        learned = sorted(run.rows_learned for run in together)
        dealt = [4 * steps * count for count in groups]
        # With the KL in the reward, groups without an advantage are left out.
        assert learned == dealt or (config.kl_in_reward and all(map(int.__le__, learned, dealt)))


def test_i3_holds_with_a_process_that_has_nothing_to_do(fp64):
    config = dataclasses.replace(fp64, batch_size=8)
    (alone,) = trained(1, dataclasses.replace(config, name="alone"))
    together = trained(3, dataclasses.replace(config, name="three"))
    assert_same_run(alone, together[0])
    assert sorted(run.rows_learned for run in together) == [0, 4 * STEPS, 4 * STEPS]
    assert torch.equal(together[0].weights, together[2].weights)
    for process in (1, 2):
        assert read_lines(together[0].folder / process_file(MEMORY_FILE, process))


def test_i4_memory_may_run_out_in_any_process_in_any_phase(fp64):
    """One process replays by itself while the others wait; nobody hangs, and the steps are the same."""
    phases = ("sample", "score", "learn", "evaluation")
    places = [(phase, rank) for rank in range(3) for phase in phases]
    faults = [(step, phase, rank) for step, (phase, rank) in enumerate(places, start=1)]
    config = dataclasses.replace(fp64, steps=len(faults), eval_interval=1, checkpoint_interval=0)
    (alone,) = trained(1, dataclasses.replace(config, name="alone"))
    together = trained(3, dataclasses.replace(config, name="three"), faults=faults)
    assert_same_run(alone, together[0])
    for rank, run in enumerate(together):
        assert run.fired == [(step, phase) for step, phase, of in faults if of == rank]


def test_a_killed_process_is_named_and_the_run_goes_on_with_any_number(fp64):
    config = dataclasses.replace(fp64, steps=4, name="killed", checkpoint_interval=0, eval_interval=0)
    (straight,) = trained(1, dataclasses.replace(config, name="straight"))
    first, second = in_processes(2, train, config, None, (), killed_at_step_three, None, 6.0)
    assert second.exit_code == -9
    assert first.error.startswith("ProcessLost: process 1 (") and "no sign of life" in first.error
    assert "waited for it in the sampling of step 3" in first.error
    killed = config.runs_dir / "killed"
    (checkpoint,) = (killed / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-000002"  # the last whole step, though none was due
    for size in (1, 3):
        copy = config.runs_dir / f"resumed-by-{size}"
        copy_folder(killed, copy)
        resumed = trained(size, dataclasses.replace(config, resume=copy, name=None))[0]
        assert (resumed.weights - straight.weights).norm() <= 1e-12 * straight.weights.norm()
        expected, found = metrics_of(straight.folder), metrics_of(copy)
        assert [record["step"] for record in found] == [1, 2, 3, 4]
        for mine, theirs in zip(expected, found, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-9, abs=1e-12, nan_ok=True)


def copy_folder(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def test_a_process_that_fails_says_why_to_the_others(fp64):
    first, second = in_processes(2, train, fp64, None, (), broken_at_step_two)
    assert second.error == "ValueError: the reward broke"
    assert first.error.startswith("ProcessLost: process 1 (")
    assert "failed: ValueError: the reward broke" in first.error


def test_a_stopped_first_process_is_named_by_the_others(fp64):
    """It keeps the store, which does not answer then: no call waits for it for ever."""
    _, second = in_processes(2, train, fp64, None, (), stopped_at_step_two, None, 4.0)
    assert second.error.startswith("ProcessLost: process 0 (")
    assert "its store does not answer (no answer for 4 seconds)" in second.error


def test_what_a_stranger_writes_to_the_port_is_refused_unread(fp64, tmp_path):
    told = tmp_path / "executed"
    longer = dataclasses.replace(fp64, steps=6)  # what is written is read by whoever comes to it first
    first, second = in_processes(2, train, longer, None, (), partial(attacked_at_step_two, told=told))
    assert not told.exists()
    for ended in (first, second):
        assert ended.error is not None and ended.error.startswith("ProcessLost: ")
    assert "somebody else writes to the port" in first.error


def test_a_process_that_hangs_is_named_when_the_others_have_waited_enough(fp64):
    config = dataclasses.replace(fp64, wait_minutes=0.1)
    first, second = in_processes(2, train, config, None, (), stuck_at_step_two)
    assert first.error.startswith("ProcessLost: process 1 (")
    assert "lives but has not come to the sampling of step 2" in first.error
    assert "--wait-minutes" in first.error
    assert second.error is not None and "process 0" in second.error  # it wakes, and finds itself alone


def test_processes_that_are_not_given_the_same_are_refused(fp64):
    changes = {1: {"policy_share": 0.25}}
    for ended in in_processes(2, train, fp64, changes):
        assert ended.error is not None
        assert "for policy_share" in ended.error and "0.25" in ended.error


def test_a_stop_asked_of_one_process_stops_all_after_the_same_step(fp64):
    config = dataclasses.replace(fp64, steps=4, checkpoint_interval=0)
    together = trained(2, config, stop_after=(1, 2))
    assert [run.finished for run in together] == [2, 2]
    (checkpoint,) = (together[0].folder / "checkpoints").glob("step-*")
    assert json.loads((checkpoint / "trainer.json").read_text())["step"] == 2
    assert load_file(checkpoint / "model.safetensors")


def test_a_batch_that_is_found_is_that_of_all_processes(fp64):
    config = dataclasses.replace(fp64, batch_size="auto", max_batch_size=68, steps=1, eval_interval=0)
    assert [run.rows_learned for run in trained(2, config)] == [32, 32]  # 68 are no groups for two


def test_weights_that_rounding_drives_apart_are_brought_together():
    """As unlike cards would; where they are the same nothing is copied."""
    for apart in (0.0, 1e-6):
        (weights, moment), (others, other_moment) = (
            ended.value for ended in in_processes(2, kept_together, apart)
        )
        assert torch.equal(weights, others)
        assert torch.equal(moment, other_moment) == (apart > 0)
