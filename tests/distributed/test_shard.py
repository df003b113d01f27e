"""A model that two processes hold together does what one does that holds it alone."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from several_processes import in_processes, values
from sharded import compared, rows_taken, trained
from whole_runs import metrics_of

from grpo.distributed.share import Share
from grpo.memory import DoesNotFit, survive
from grpo.phases import _with_padding_rows
from grpo.types import Batch


def test_gradients_and_samples_are_those_of_a_whole_model(model_folders, prompts):
    """Though the rows of two processes end at other times."""
    many = [replace(prompt, id=f"{i}") for i, prompt in enumerate([*prompts, *prompts[::-1]])]
    lengths = []
    both = values(in_processes(2, compared, model_folders["qwen"], many))
    for errors, (*sharded, alone), gathers in both:
        assert max(errors) < 1e-12
        for ids, logp in sharded:
            assert np.array_equal(ids, alone[0]) and np.abs(logp - alone[1]).max() < 1e-12
        assert gathers[0] > 2 * gathers[1] and gathers[1:] == [3, 0]  # two layers, and what is outside
        lengths.append(len(alone[0]))
    assert lengths[0] != lengths[1]


def test_a_sharded_run_measures_and_all_processes_take_as_many_rows(config, model_folders):
    """As the one that has room for the fewest: of groups that are learned from, one after two."""
    config = replace(config, model=str(model_folders["qwen"]), batch_size=16, shard=True)
    both = [*values(in_processes(2, rows_taken, config))]
    for planned, taken, added in both:
        assert planned == dict.fromkeys(("sample", "score", "learn"), 8)
        assert taken["learn"] == 4 and taken == both[0][1] and all(added[phase] > 0 for phase in planned)


def assert_same_checkpoint(one: Path, other: Path, step: int) -> None:
    mine, theirs = (
        {
            f"{file.name}: {name}": tensor
            for file in (run / "checkpoints" / f"step-{step:06d}").glob("*.safetensors")
            for name, tensor in load_file(file).items()
            if name != "random_state"
        }
        for run in (one, other)
    )
    assert mine and mine.keys() == theirs.keys()
    for name in mine:
        assert (mine[name] - theirs[name]).abs().max() < 1e-12, name


def test_a_sharded_run_is_the_run_of_one_and_each_goes_on_with_the_other_s(config, model_folders):
    """Three groups, so that one of two processes has an idle one."""
    config = replace(
        config,
        model=str(model_folders["qwen"]),
        batch_size=12,
        precision="fp64",
        num_iterations=2,
        eval_interval=2,
        eval_prompts=5,
        learning_rate=1e-3,
        kl_in_reward=True,
        refill_groups=1,
        mask_truncated=True,
        gradient_checkpointing="full",
        train_rows=2,
        rollout_rows=4,
        reference_sync=1,
    )
    alone = trained(0, replace(config, name="alone"))
    sharded, _ = values(in_processes(2, trained, replace(config, name="sharded", shard=True)))
    assert_same_checkpoint(alone, sharded, step=2)
    losses = [[line["loss"] for line in metrics_of(run) if "loss" in line] for run in (sharded, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9, abs=1e-12) and len(losses[0]) == 2

    values(in_processes(2, trained, replace(config, steps=3, resume=alone, shard=True)))
    trained(0, replace(config, steps=3, resume=sharded))
    assert_same_checkpoint(alone, sharded, step=3)
    saved = json.loads((sharded / "checkpoints" / "step-000002" / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"]


def test_out_of_memory_is_an_error_at_once_where_others_take_part():
    work = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(DoesNotFit, match=r"learn ran out of memory with 8 rows.*--memory-utilization"):
        survive(work, 8, phase="learn", replays=False)
    work.assert_called_once_with(8)


def test_an_idle_group_has_no_tokens_and_no_advantage(prompts):
    made = Batch.of_rows(
        prompts[:3],
        [[1], [2], [3]],
        torch.arange(12).view(6, 2),
        torch.tensor([1, 2, 2, 1, 2, 2]),
        terminated=torch.ones(6, dtype=torch.bool),
        sampler_logp=torch.zeros(6, 2),
        texts=["a"] * 6,
    ).with_columns(credit=torch.ones(10))
    own = _with_padding_rows(made.select_groups([2]), made.select_groups([0]).without_tokens())
    assert own.context_ids == [[3], [1]] and own.lengths.tolist() == [2, 2, 0, 0]
    assert own.ids.tolist() == [8, 9, 10, 11] and own.credit.tolist() == [1] * 4
    alone = _with_padding_rows(None, made.select_groups([0]).without_tokens())
    assert alone.lengths.tolist() == [0, 0] and len(alone.credit) == len(alone.ids) == 0
    share = Share([2], 2, padding_groups=1)
    assert (share.rows.tolist(), share.of_groups([*"abc"])) == ([4, 5], ["c"])
    assert not Share(range(1, 1), 2) and Share(range(1, 1), 2, padding_groups=1)
