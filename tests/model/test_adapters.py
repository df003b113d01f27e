"""LoRA: what is trained, what the reference costs, and that others load what is saved."""

import dataclasses
import json
import shutil

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo.config import SettingsError, from_flat
from grpo.config.groups import LoraSettings, OptimizerSettings
from grpo.learning.optimizer import make_optimizer
from grpo.memory.live import LiveBytes
from grpo.model.adapters import (
    adapter_parameters,
    adapters_off,
    add_adapters,
    other_adapters,
    save_adapters,
    store_base,
)
from grpo.model.load import RolloutModel, load_config, load_policy, save_merged
from grpo.run.checkpoint import CheckpointFolder
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
EVERYWHERE = LoraSettings(lora_rank=4, lora_targets=("all-linear",))


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    return model(input_ids=IDS).logits.float().log_softmax(-1)


def adapted(load, name="gpt2", lora=EVERYWHERE, precision="fp32", *, moved=True):
    """A model with adapters; `moved`: as after some training."""
    model = load(name, precision).model
    add_adapters(model, lora, base=str(model.config._name_or_path))
    generator = torch.Generator().manual_seed(3)
    for parameter in adapter_parameters(model).values() if moved else ():
        parameter.data.normal_(std=0.05, generator=generator)
    return model


def trained(config, **changes):
    config = dataclasses.replace(config, **changes)
    with open_run(config) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    return run


def stored(run, step, file="adapter_model.safetensors"):
    return load_file(run.folder / f"checkpoints/step-{step:06d}" / file)


@pytest.fixture
def lora_config(config):
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e-2)
    return dataclasses.replace(config, lora=LoraSettings(lora_rank=4), optimizer=optimizer)


# --------------------------------------------------------------------------------- in the model


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_with_adapters_off_the_model_is_the_base(load, name, precision):
    plain = logprobs(load(name, precision).model)
    model = adapted(load, name, precision=precision)
    assert not torch.equal(logprobs(model), plain)
    with adapters_off(model) as base:
        assert torch.equal(logprobs(base), plain)
    assert all(parameter.requires_grad for parameter in adapter_parameters(model).values())


def test_new_adapters_change_nothing_and_are_the_seeds(load):
    model = adapted(load, moved=False)
    assert torch.equal(logprobs(model), logprobs(load("gpt2").model))
    again, other = load("gpt2").model, load("gpt2").model
    before = torch.get_rng_state()
    add_adapters(again, EVERYWHERE, seed=0)
    add_adapters(other, EVERYWHERE, seed=1)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers
    name = "transformer.h.0.attn.c_attn.lora_A.default.weight"
    own = adapter_parameters(model)[name]
    assert torch.equal(adapter_parameters(again)[name], own)
    assert not torch.equal(adapter_parameters(other)[name], own)


def test_only_adapters_are_trained(load):
    model = adapted(load)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapter_parameters(model)) and len(trained) == 2 * 2 * 4
    optimizer = make_optimizer(model, OptimizerSettings())
    assert len(optimizer.state) == len(trained)
    assert type(model).__name__ == "GPT2LMHeadModel"  # which decides on the decoder


def test_peft_chooses_the_targets_where_none_are_given(load):
    for name, layers in (("gpt2", {"c_attn"}), ("llama", {"q_proj", "v_proj"})):
        model = adapted(load, name, LoraSettings(lora_rank=2))
        assert {each.split(".lora_")[0].rpartition(".")[2] for each in adapter_parameters(model)} == layers


@pytest.mark.parametrize("target", ["q_proj", "lm_head", "wte", "attn"])
def test_a_target_that_is_none_is_an_error_that_lists_them(load, target):
    with pytest.raises(
        ValueError, match=rf"'{target}', which is none .*give some of c_attn, c_fc, c_proj, or"
    ):
        add_adapters(load("gpt2").model, LoraSettings(lora_rank=2, lora_targets=("c_attn", target)))


def test_an_architecture_that_peft_does_not_know_wants_targets(load):
    model = load("llama").model
    model.config.model_type = "new"
    with pytest.raises(ValueError, match="peft knows none for this architecture: give some of down_proj, "):
        add_adapters(model, LoraSettings(lora_rank=2))


def test_alpha_is_twice_the_rank(load):
    assert LoraSettings(lora_rank=8).alpha == 16 and LoraSettings(lora_rank=8, lora_alpha=4).alpha == 4
    model = adapted(load, lora=LoraSettings(lora_rank=4, lora_alpha=6))
    assert model.transformer.h[0].attn.c_attn.scaling == {"default": 1.5}


def test_a_frozen_base_in_bf16_serves_the_sampler_too(load):
    model = adapted(load, precision="bf16")
    store_base(model, torch.bfloat16)
    sampler = RolloutModel(model, torch.bfloat16).model
    assert sampler.base_model is model.base_model
    assert sampler.get_output_embeddings().weight is not model.get_output_embeddings().weight
    assert model.transformer.wte.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in adapter_parameters(model).values()} == {torch.float32}


def test_other_adapters_are_there_inside_only(load):
    model = adapted(load)
    before, off = logprobs(model), {}
    for name, parameter in adapter_parameters(model).items():
        off[name] = torch.zeros_like(parameter)
    with other_adapters(model, off):
        assert torch.equal(logprobs(model), logprobs(load("gpt2").model))
    assert torch.equal(logprobs(model), before)


# ----------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_others_load_what_is_saved(load, model_folders, tmp_path, name):
    """Plain peft the adapters, plain transformers the merged model, and we both."""
    model = adapted(load, name)
    expected = logprobs(model)
    save_adapters(model, tmp_path)
    save_merged(model, tmp_path / "merged")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folders[name]), tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ours = load_policy(str(tmp_path), CPU, "fp32")
    without = (logprobs(load(name).model) - expected).abs().max()
    for each in (peft.eval(), merged.eval(), ours.model):  # rounding differs from processor to processor
        assert (logprobs(each) - expected).abs().max() < 1e-4 < without / 100
    assert merged.dtype == torch.float32 and type(ours.model) is type(model)
    assert ours.tokenizer("P: 8/8")["input_ids"] == load(name).tokenizer("P: 8/8")["input_ids"]
    assert load_config(str(tmp_path)).model_type == model.config.model_type


def test_merging_keeps_what_bf16_would_round_away(load, tmp_path):
    model = adapted(load, precision="bf16")
    store_base(model, torch.bfloat16)
    save_merged(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = model.transformer.h[0].attn.c_attn
    delta = layer.scaling["default"] * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).T
    weight = merged.transformer.h[0].attn.c_attn.weight
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.detach(), (layer.base_layer.weight.float() + delta).detach())


def test_adapters_that_do_not_say_of_which_model_are_an_error(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match="does not say of which model"):
        load_policy(str(tmp_path), CPU)


def test_adapters_are_adapters_whatever_is_beside_them(load, tmp_path):
    """The shape of their base, too, as transformers saves it; a whole model may be what is meant."""
    model = adapted(load)
    save_adapters(model, tmp_path)
    model.config.save_pretrained(tmp_path)
    assert (logprobs(load_policy(str(tmp_path), CPU, "fp32").model) - logprobs(model)).abs().max() < 1e-4
    load("gpt2").model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds adapters .* and a whole model .*: move one of the two"):
        load_policy(str(tmp_path), CPU)


@pytest.mark.parametrize("change", ["missing", "of no layer"])
def test_adapters_that_are_not_whole_are_an_error(load, tmp_path, change):
    save_adapters(adapted(load), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = min(tensors)
    other = tensors.pop(name)
    if change == "of no layer":
        tensors |= {name: other, name.replace("h.0", "h.7"): other.clone()}
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    missing, besides = (1, 0) if change == "missing" else (0, 1)
    with pytest.raises(ValueError, match=rf"lacks {missing} of their weights and has {besides} besides"):
        load_policy(str(tmp_path), CPU)


def test_a_run_on_adapters_may_be_moved(lora_config):
    """Its base is nowhere else as a whole, and where it was is written in the checkpoint."""
    first = trained(lora_config, steps=1, name="first")
    second = trained(lora_config, steps=1, name="second", model=str(first.folder))
    expected = logprobs(load_policy(str(second.folder), CPU, "fp32").model)
    moved = second.folder.with_name("moved").resolve()
    second.folder.rename(moved)
    shutil.rmtree(first.folder)
    for place in (moved, moved / "checkpoints/step-000001"):
        assert torch.equal(logprobs(load_policy(str(place), CPU, "fp32").model), expected)
    config = dataclasses.replace(second.config, model=str(first.folder))
    assert trained(config, steps=2, name=None, resume=moved).folder == moved


# --------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_iterations": 2, "kl_in_reward": True, "gradient_checkpointing": "full"},
        {"precision": "bf16"},
    ],
)
def test_a_run_moves_the_adapters_and_nothing_else(lora_config, changes):
    config = dataclasses.replace(lora_config, **changes)
    with open_run(config) as run:
        model = run.policy.model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        Trainer(run, Console(quiet=True)).train(StopRequest())
        moved = {name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert moved == set(adapter_parameters(model))
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    kls = [metrics["kl"] for metrics in map(json.loads, lines) if "kl" in metrics]
    if "kl_in_reward" not in changes:
        assert kls[0] < 1e-3 and kls[-1] > 0


def test_the_reference_needs_no_weights(lora_config):
    """Bytes that set-up leaves behind, counted tensor by tensor, with and without a reference."""
    held = []
    for kl_coef in (0.05, 0.0):
        loss = dataclasses.replace(lora_config.loss, kl_coef=kl_coef)
        live = LiveBytes()
        with live, open_run(dataclasses.replace(lora_config, loss=loss, name=f"kl{kl_coef}")) as run:
            assert (run.reference is None) == (not kl_coef)
            held.append(live.live_bytes)
    copy = sum(parameter.nbytes for parameter in run.policy.model.parameters())
    assert abs(held[0] - held[1]) < 0.03 * copy  # some small things are made once only


def test_a_resumed_run_is_the_uninterrupted_one(lora_config):
    straight = trained(lora_config)
    cut = trained(lora_config, name="cut", steps=3)
    assert not (cut.folder / "checkpoints/step-000003/model.safetensors").exists()
    resumed = trained(lora_config, resume=cut.folder)
    for file in ("adapter_model.safetensors", "trainer.safetensors"):
        ours, theirs = stored(resumed, 4, file), stored(straight, 4, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_run_goes_on_with_the_adapters_it_began_with(lora_config):
    run = trained(lora_config, steps=1)
    for lora, said in (
        (LoraSettings(lora_rank=8), r"lora_rank is 8, but .* has 4: go on with that"),
        (LoraSettings(lora_rank=4, lora_alpha=1), r"lora_alpha is 1, but .* has 8"),
        (LoraSettings(lora_rank=4, lora_targets=("c_fc",)), r"lora_targets are others than .* has: c_attn"),
        (LoraSettings(), r"lora_rank is 0, but .* has 4"),
    ):
        changed = dataclasses.replace(lora_config, resume=run.folder, lora=lora)
        with pytest.raises(ValueError, match=said), open_run(changed):
            pass


def test_a_run_without_adapters_does_not_get_them_later(config):
    run = trained(config, steps=1)
    changed = dataclasses.replace(config, resume=run.folder, lora=LoraSettings(lora_rank=8))
    with pytest.raises(ValueError, match=r"lora_rank is 8, but .* has 0"), open_run(changed):
        pass


def test_a_checkpoint_is_merged_on_request_and_evaluated_as_it_is(lora_config):
    lora = LoraSettings(lora_rank=4, lora_merge=True)
    run = trained(lora_config, steps=2, lora=lora)
    folder = run.folder / "checkpoints/step-000002"
    expected = logprobs(run.policy.model)
    for each in (load_policy(str(folder), CPU, "fp32"), load_policy(str(folder / "merged"), CPU, "fp32")):
        assert (logprobs(each.model) - expected).abs().max() < 1e-5
        assert each.tokenizer.eos_token_id == run.policy.tokenizer.eos_token_id
    assert CheckpointFolder(run.folder / "checkpoints", keep=1).newest_intact().state["step"] == 2


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora_rank": -1}, "lora_rank is -1: give 0 or more"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha is 0.0: give more than 0"),
        ({"lora_alpha": 8.0}, "lora_alpha is 8.0, but lora_rank is 0: add --lora-rank 16"),
        ({"lora_targets": ["c_attn"]}, "but lora_rank is 0"),
        ({"lora_merge": True}, "but lora_rank is 0"),
        ({"load_in_4bit": True}, "load_in_4bit is True, but lora_rank is 0"),
        ({"lora_rank": 4, "load_in_4bit": True, "precision": "fp64"}, "precision is fp64, but load_in_4bit"),
        ({"lora_rank": 4, "reference_device": "cpu"}, "reference_device is cpu, but with lora_rank"),
    ],
)
def test_settings_that_cannot_be(values, said):
    with pytest.raises(SettingsError, match=said):
        from_flat(values)


def test_without_peft_it_says_what_to_install(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = dataclasses.replace(config, lora=LoraSettings(lora_rank=4), model="/no/such/model")
    with (
        pytest.raises(ValueError, match=r"lora_rank is 4, which needs .* pip install peft"),
        open_run(config),
    ):
        pass
