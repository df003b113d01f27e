"""A model that two processes hold together does what one does that holds it alone."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.real_phases import Setting
from safetensors.torch import load_file
from several_processes import in_processes
from sharded import added_bytes, gradient_errors, parts, rollouts, trained
from transformers import LlamaConfig

from grpo.config import Config, SettingsError
from grpo.config.groups import LoraSettings, OptimizerSettings
from grpo.distributed.share import Share
from grpo.memory import DoesNotFit, Shape, survive
from grpo.model.target import make_target
from grpo.plan.trace import PhaseTracer
from grpo.plan.workload import Workload, resident_parts
from grpo.run.loading import check_shard
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.types import Rollout

RICH = {
    "num_iterations": 2, "kl_in_reward": True, "refill_groups": 1, "mask_truncated": True,
    "gradient_checkpointing": "full", "train_rows": 2, "rollout_rows": 4, "reference_sync": 1,
}  # fmt: skip


def values(work, *arguments) -> list:
    ended = in_processes(2, work, *arguments)
    assert [each.error for each in ended] == [None, None]
    return [each.value for each in ended]


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_gradients_are_the_sums_of_a_whole_model_s(model_folders, name):
    for errors in values(gradient_errors, model_folders[name]):
        assert max(errors) < 1e-12


def test_processes_whose_rows_end_at_other_times_sample_what_one_would(model_folders, prompts):
    many = [dataclasses.replace(prompt, id=f"{i}") for i, prompt in enumerate([*prompts, *prompts[::-1]])]
    lengths = []
    for (*sharded, alone), gathers in values(rollouts, model_folders["llama"], many):
        for ids, logp in sharded:
            assert np.array_equal(ids, alone[0])
            assert np.abs(logp - alone[1]).max() < 1e-12
        assert gathers[0] > 2 * gathers[1] and gathers[1:] == [3, 0]  # two layers, and what is outside
        lengths.append(alone[0].shape[1])
    assert max(lengths) > 1


def test_what_a_sharded_phase_holds_is_foreseen_within_a_tenth(tmp_path):
    """Weights are about as much as activations here: 3.7 MB, of 3 to 23 MB that phases add."""
    model = LlamaConfig(
        vocab_size=512, max_position_embeddings=192, hidden_size=128, intermediate_size=384,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    setting, shape = Setting("wide", model, checkpointing="full", group_size=4), Shape(8, 24, 12)
    phases = ("sample", "score", "learn", "learn split")
    settings = dataclasses.replace(setting.workload(shape).phase_settings(), processes=2)
    tracer = PhaseTracer(settings, cache_folder=tmp_path)
    foreseen = {phase: tracer.peak_bytes(phase, shape) for phase in phases}
    for measured in values(added_bytes, setting, shape, phases):
        assert measured == pytest.approx(foreseen, rel=0.1)


def test_a_part_is_a_process_s_own():
    assert values(parts) == [[0, 1, 2, 3, 4]] * 2


# --------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def fp64(config, model_folders) -> Config:
    """Three groups, so that one of two processes has an idle one."""
    return dataclasses.replace(
        config, model=str(model_folders["qwen"]), steps=2, batch_size=12, precision="fp64", eval_prompts=5,
        optimizer=OptimizerSettings(learning_rate=1e-3),
    )  # fmt: skip


def assert_same_checkpoint(one: Path, other: Path, step: int) -> None:
    folders = [run / "checkpoints" / f"step-{step:06d}" for run in (one, other)]
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        mine, theirs = (load_file(folder / name) for folder in folders)
        assert mine.keys() == theirs.keys()
        for tensor in mine.keys() - {"random_state"}:
            assert (mine[tensor] - theirs[tensor]).abs().max() < 1e-12, tensor


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_lines(folder / METRICS_FILE) if "loss" in record]


@pytest.mark.parametrize("more", [{}, RICH], ids=["plain", "rich"])
def test_a_sharded_run_is_the_run_of_one_and_each_goes_on_with_the_other_s(fp64, more):
    fp64 = dataclasses.replace(fp64, **more)
    alone = trained(0, dataclasses.replace(fp64, name="alone"))
    sharded, _ = values(trained, dataclasses.replace(fp64, name="sharded", shard=True))
    assert_same_checkpoint(alone, sharded, step=2)
    assert losses(sharded) == pytest.approx(losses(alone), rel=1e-9, abs=1e-12)

    longer = dataclasses.replace(fp64, steps=3)
    values(trained, dataclasses.replace(longer, resume=alone, shard=True))
    trained(0, dataclasses.replace(longer, resume=sharded))
    assert_same_checkpoint(alone, sharded, step=3)
    config = json.loads((sharded / "checkpoints" / "step-000002" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


# ------------------------------------------------------------------------------------- in one process


def test_shard_wants_several_processes(config):
    match = r"shard is on, but there is one process.*torchrun"
    with pytest.raises(SettingsError, match=match), open_run(dataclasses.replace(config, shard=True)):
        pass


@pytest.mark.parametrize(
    "setting",
    [
        {"lora": LoraSettings(lora_rank=4)},
        {"optimizer": OptimizerSettings(optimizer_kind="adamw8bit")},
        {"reference_device": "cpu"},
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(config, setting):
    with pytest.raises(SettingsError, match=r"shard is on, and (lora_|optimizer_|reference_)\w+ is"):
        check_shard(dataclasses.replace(config, shard=True, **setting), SimpleNamespace(size=2))


def test_out_of_memory_is_an_error_at_once_where_others_take_part():
    tried = []

    def work(rows: int) -> None:
        tried.append(rows)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DoesNotFit, match=r"learn ran out of memory with 8 rows.*--memory-utilization"):
        survive(work, 8, phase="learn", replays=False)
    assert tried == [8]


def test_each_process_is_planned_with_its_part_of_what_stays(config):
    of = {}
    for shard in (False, True):
        here = dataclasses.replace(config, shard=shard)
        target = make_target(LlamaConfig(), torch.device("cpu"), torch.bfloat16)
        work = Workload(here, target, 9, reference_here=True, processes=4)
        of[shard] = resident_parts(work, num_parameters=1000)
    assert of[False] == {"weights": 4000, "optimizer": 8000, "reference": 4000, "sampler's copy": 2000}
    assert of[True] == {"weights": 1000, "optimizer": 2000, "reference": 1000}


def test_an_idle_group_has_no_tokens_and_no_advantage(prompts):
    made = Rollout(
        prompts=prompts[:3], prompt_ids=[[1], [2], [3]], completion_ids=torch.arange(12).view(6, 2),
        lengths=torch.tensor([1, 2, 2, 1, 2, 2]), terminated=torch.ones(6, dtype=torch.bool),
        sampler_logp=torch.zeros(6, 2), completions=["a"] * 6,
    )  # fmt: skip
    share = Share(range(2, 3), 2, idle=1)
    own = share.rollout(made)
    assert own.prompt_ids == [[3], [1]]
    assert own.lengths.tolist() == [2, 2, 0, 0]
    assert not own.mask[2:].any()
    assert share.rows(torch.arange(1.0, 7.0)).tolist() == [5, 6, 0, 0]
    assert share.rows(torch.arange(12).view(6, 2)).tolist() == [[8, 9], [10, 11], [0, 0], [0, 0]]
    assert (share.num_rows, share.prompts([*"abc"])) == (2, ["c"])
    assert not Share(range(1, 1), 2)
    assert Share(range(1, 1), 2, idle=1)
