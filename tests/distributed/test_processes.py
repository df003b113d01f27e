"""Invariance I3 and its accidents: a step is the same step however many processes share its work."""

import shutil
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from several_processes import (
    Ended,
    Trained,
    accident,
    begin,
    in_processes,
    kept_together,
    train,
    train_in_python,
    values,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import PASSING, metrics_of

from grpo.config import Config
from grpo.distributed import World
from grpo.logs.tracking import COMPLETIONS_FILE, MEMORY_FILE, process_file, read_lines
from grpo.run.checkpoint import find_damage

OTHER_PLANS = {
    1: {"rollout_rows": 2, "train_rows": 2, "score_rows": 4},
    2: {"rollout_rows": 4, "train_rows": 1},
}
NOT_THE_SAME = (*PASSING, "processes/")


@pytest.fixture(scope="module")
def fp64(model_folders, data_file, tmp_path_factory) -> Config:
    """Five groups of four in float64: no share of two or three processes is like another."""
    return Config(
        steps=3,
        batch_size=20,
        group_size=4,
        model=str(model_folders["gpt2"]),
        prompts=str(data_file),
        precision="fp64",
        device="cpu",
        heldout_share=0.2,
        engine="off",
        max_new_tokens=10,
        kl_coef=0.05,
        learning_rate=1e-3,
        eval_interval=1,
        eval_prompts=5,
        checkpoint_interval=0,
        trackers=(),
        logged_completions=20,
        name="alone",
        runs_dir=tmp_path_factory.mktemp("runs"),
    )


@pytest.fixture(scope="module")
def alone(fp64) -> Trained:
    return values(in_processes(1, train, fp64))[0]


@pytest.fixture(scope="module")
def writes_fields(model_folders, tmp_path_factory) -> str:
    """A model of environments whose texts often look like boards, and often end a field."""
    folder = shutil.copytree(model_folders["gpt2"], tmp_path_factory.mktemp("models") / "fields")
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = model.get_output_embeddings().weight.data
    torch.manual_seed(1)
    for letter, std in {"+": 0.55, **dict.fromkeys("12345678/", 0.385), tokenizer.eos_token: 0.8}.items():
        rows[tokenizer.convert_tokens_to_ids(letter)].normal_(std=std)
    model.save_pretrained(folder)
    return str(folder)


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
    assert_same_metrics(*(metrics_of(run.folder, NOT_THE_SAME) for run in (one, other)))


def assert_same_metrics(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-9, abs=1e-12, nan_ok=True)


def rows_to_learn(run: Trained, rank: int, size: int, config: Config) -> list[int]:
    """Rows of each optimizer step: of groups without an advantage no more than one, where there is no KL."""
    world = World()
    world.rank, world.size = rank, size
    rows = []
    for credit in run.credit:
        own = (credit != 0).view(config.num_prompts, -1).any(1)[[*world.share(config.num_prompts)]]
        groups = min(len(own), max(1, int(own.sum()))) if config.kl_in_reward else len(own)
        rows += [groups * config.group_size] * config.num_iterations
    return rows


def assert_same_together(one: Trained, together: list[Trained], config: Config) -> None:
    """The same run, not one bit apart among themselves, and each learned from its share of the rows."""
    assert_same_run(one, together[0])
    for rank, run in enumerate(together):
        assert torch.equal(run.weights, together[0].weights)
        assert run.rows_learned == rows_to_learn(one, rank, len(together), config)


def test_i3_a_step_does_not_depend_on_how_many_processes_share_it(fp64, writes_fields):
    """Uneven shares, another plan in each process; and the credit is the fields', as the demo's is."""
    config = replace(
        fp64,
        name="rich",
        steps=2,
        num_iterations=2,
        kl_in_reward=True,
        refill_groups=2,
        importance_cap=2.0,
        advantage_scale="batch",
        mask_truncated=True,
        credit="field",
        model=writes_fields,
        policy_share=0.2,
    )
    (one,) = values(in_processes(1, train, config))
    split = [len(set(row[row != 0].tolist())) > 1 for credit in one.credit for row in credit]
    assert len(split) == 40 and sum(split) >= 8  # rows whose tokens have unlike advantages
    for size in (2, 3):
        together = values(in_processes(size, train, replace(config, name=f"rich-{size}"), OTHER_PLANS))
        assert_same_together(one, together, config)


def test_i3_holds_with_a_process_that_has_nothing_to_do(fp64):
    config = replace(fp64, batch_size=8, steps=2, name="idle")
    begun = begin(3, train, replace(config, name="idle-3"), OTHER_PLANS)
    (one,), together = values(in_processes(1, train, config)), values(begun())
    assert_same_together(one, together, config)
    assert [sum(run.rows_learned) for run in together] == [0, 8, 8]
    assert all(read_lines(together[0].folder / process_file(MEMORY_FILE, rank)) for rank in (1, 2))


def test_i4_memory_may_run_out_in_any_process_in_any_phase(fp64, alone):
    """One process replays by itself while the others wait; nobody hangs, and the steps are the same.

    In each step another process, in all of its phases.
    """
    phases = ("sample", "score", "learn", "evaluation")
    faults = [(rank + 1, phase, rank) for rank in range(3) for phase in phases]
    together = values(in_processes(3, partial(train, faults=faults), replace(fp64, name="faults")))
    assert_same_run(alone, together[0])
    for rank, run in enumerate(together):
        assert run.fired == [(rank + 1, phase) for phase in phases]


@pytest.fixture(scope="module")
def accidents(fp64) -> dict[str, list[Ended]]:
    """Each of two processes, all at the same time: they wait more than they compute."""

    def begun(kind):
        work = partial(train, during=partial(accident, kind))
        return begin(2, work, replace(fp64, eval_interval=0, name=kind, wait_minutes=2))

    every = {kind: begun(kind) for kind in ("killed", "first-killed", "broken", "stopped", "stuck")}
    return {kind: ended() for kind, ended in every.items()}


LATE = ["lives but has not come to the sampling of step 2 for 0.1 minutes", "--wait-minutes"]


@pytest.mark.parametrize(
    ("kind", "rank", "says"),
    [
        ("killed", 0, ["is gone: its connection is closed", "came to the sampling of step 3"]),
        ("first-killed", 1, ["is gone: its connection is closed", "came to the sampling of step 3"]),
        ("broken", 0, ["ended with ValueError: the reward broke"]),
        ("stopped", 1, LATE),
        ("stuck", 0, LATE),
        ("stuck", 1, ["ended with ProcessLost: process 1 ("]),  # it wakes, and finds itself alone
    ],
)
def test_processes_say_which_of_them_is_lost_and_why(accidents, kind, rank, says):
    error = accidents[kind][rank].error
    assert error.startswith(f"ProcessLost: process {1 - rank} (") and all(words in error for words in says)
    assert accidents["broken"][1].error == "ValueError: the reward broke"


def test_a_killed_process_s_run_goes_on_with_any_number(fp64, alone, accidents):
    assert accidents["killed"][1].exit_code == -9
    folder = fp64.runs_dir / "killed"
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-000002"  # the last whole step, though none was due
    steps = [line for line in metrics_of(alone.folder, NOT_THE_SAME) if "reward" in line]
    for size in (1, 3):
        copy = shutil.copytree(folder, fp64.runs_dir / f"resumed-by-{size}")
        resumed = values(in_processes(size, train, replace(fp64, eval_interval=0, resume=copy, name=None)))[0]
        assert (resumed.weights - alone.weights).norm() <= 1e-12 * alone.weights.norm()
        assert_same_metrics(steps, metrics_of(copy, NOT_THE_SAME))


def test_where_the_first_process_is_lost_the_second_one_saves(fp64, accidents):
    assert accidents["first-killed"][0].exit_code == -9
    (checkpoint,) = (fp64.runs_dir / "first-killed" / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-000002" and find_damage(checkpoint) is None


def test_an_error_in_the_python_api_is_told_to_the_others_at_once(fp64):
    """A reward breaks in one process, and a `with` or a loop of a caller's in another run."""
    config = replace(fp64, eval_interval=0, wait_minutes=2)
    began = time.monotonic()
    by_kind = {
        kind: begin(2, train_in_python, replace(config, name=f"in-python-{kind}"), kind)
        for kind in ("reward", "loop", "with")
    }
    for kind, ended in by_kind.items():
        whole, broken = ended()
        assert broken.error == f"ZeroDivisionError: the {kind} broke"
        assert whole.error.startswith("ProcessLost: process 1 (") and "has not come" not in whole.error
    assert time.monotonic() - began < 100  # nobody has waited for two minutes


def test_a_process_without_groups_learns_nothing_and_all_end(fp64):
    config = replace(fp64, eval_interval=0, kl_coef=0.0, steps=1, batch_size=8, name="few-groups")
    weights = [run.weights for run in values(in_processes(3, train, config))]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_a_base_in_4_bits_is_shared_by_several_processes(fp64):
    config = replace(
        fp64,
        precision="fp32",
        eval_interval=0,
        steps=1,
        lora_rank=2,
        load_in_4bit=True,
        name="4-bits",
        lora_targets=("all-linear",),
    )
    first, second = values(in_processes(2, train, config))
    assert first.finished == second.finished == 1


def test_processes_agree_on_settings_on_when_to_stop_and_on_the_batch(fp64):
    stop, auto = (replace(fp64, eval_interval=0, name=name) for name in ("stop", "auto"))
    auto = replace(auto, batch_size="auto", max_batch_size=68, steps=1)
    stopped, found, unlike = (
        begin(2, partial(train, stop_after=(1, 2)), stop),
        begin(2, train, auto),
        begin(2, train, replace(fp64, name="unlike"), {1: {"policy_share": 0.25}}),
    )
    together = values(stopped())
    assert [run.finished for run in together] == [2, 2]  # asked of one, all stop after the same step
    (checkpoint,) = (together[0].folder / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-000002" and load_file(checkpoint / "model.safetensors")
    assert [run.rows_learned for run in values(found())] == [[32], [32]]  # 68 are no groups for two
    for ended in unlike():
        assert "for policy_share" in ended.error and "0.25" in ended.error


def test_weights_that_rounding_drives_apart_are_brought_together():
    """As unlike cards would; where they are the same nothing is copied."""
    begun = {apart: begin(2, kept_together, apart) for apart in (0.0, 1e-6)}
    for apart, ended in begun.items():
        (weights, moment), (others, other_moment) = values(ended())
        assert torch.equal(weights, others)
        assert torch.equal(moment, other_moment) == (apart > 0)
