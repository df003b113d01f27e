"""QLoRA: a base in 4 bits is the same base dequantized, in fewer bytes, and adapters are what is trained."""

import dataclasses
import math

import pytest
import torch
from benchmarks.real_phases import RealPhases, Setting, allocator_peak
from conftest import CPU
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo.config import SettingsError
from grpo.config.groups import LoraSettings, SamplingSettings
from grpo.learning.loss import LossSettings
from grpo.memory import Shape
from grpo.model.adapters import adapter_parameters, adapters_off, add_adapters, store_base
from grpo.model.four_bits import dequantized, layers_in_4_bits
from grpo.model.load import load_for, load_policy, save_merged
from grpo.plan.trace import PHASES, PhaseSettings, PhaseTracer
from grpo.run.given import Given
from grpo.run.interrupt import StopRequest
from grpo.run.loading import check_quantized
from grpo.run.setup import open_run
from grpo.scoring.micro_batches import micro_batch_logprobs
from grpo.scoring.model_checks import made_up_batch
from grpo.trainer import Trainer

LORA = LoraSettings(lora_rank=4, lora_targets=("all-linear",), load_in_4bit=True)


def in_4_bits_and_dequantized(load, folder, dtype: torch.dtype):
    """Two models of one base, with the same adapters, as after some training."""
    plain = load(folder.name, "fp32")
    model = load_for(plain.target, str(folder), in_4bit=True).model
    with torch.no_grad():
        for name, layer in layers_in_4_bits(model).items():
            plain.model.get_submodule(name).weight.copy_(dequantized(layer))
    for each in (model, plain.model):
        add_adapters(each, LORA)
        generator = torch.Generator().manual_seed(3)
        for parameter in adapter_parameters(each).values():
            parameter.data.normal_(std=0.05, generator=generator)
        store_base(each, dtype)
    return model, plain.model


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
@pytest.mark.parametrize(("dtype", "exactness"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_the_dequantized_base(load, model_folders, name, dtype, exactness):
    """Relative to their norm: to rounding in fp32, and in bf16 to a few times its rounding, 2⁻⁸."""
    models = in_4_bits_and_dequantized(load, model_folders[name], dtype)
    assert len(layers_in_4_bits(models[0])) > 7 and not layers_in_4_bits(models[1])
    gradients = []
    for model in models:
        batch = made_up_batch(model, 24)
        with adapters_off(model), torch.no_grad():  # layers are used without gradients first, as in sampling
            micro_batch_logprobs(model, batch, temperature=1.0, dtype=dtype)
        logp, _ = micro_batch_logprobs(model, batch, temperature=1.0, dtype=dtype)
        logp.sum().backward()
        gradients.append({name: each.grad for name, each in adapter_parameters(model).items()})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys() and all(gradient.any() for gradient in ours.values())
    difference = math.hypot(*((ours[name] - theirs[name]).norm() for name in theirs))
    assert difference / math.hypot(*(gradient.norm() for gradient in theirs.values())) < exactness


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_merged_is_the_dequantized_base_with_adapters(load, model_folders, tmp_path, name):
    model, _ = in_4_bits_and_dequantized(load, model_folders[name], torch.float32)
    save_merged(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not hasattr(merged.config, "quantization_config") and merged.dtype == torch.float32
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert (merged(ids).logits - model(ids).logits).abs().max() < 1e-5


@pytest.mark.usefixtures("made_up_plans")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(config, precision):
    """Its checkpoints are adapters; the base that it began with has not moved."""
    config = dataclasses.replace(config, lora=LORA, precision=precision, eval_interval=0)

    def train(**changes):
        with open_run(dataclasses.replace(config, **changes)) as run:
            Trainer(run, Console(quiet=True)).train(StopRequest())
        return run

    straight, cut = train(name="straight"), train(name="cut", steps=2)
    resumed = train(resume=cut.folder)
    last = "checkpoints/step-000004"
    for file in ("adapter_model.safetensors", "trainer.safetensors"):
        ours, theirs = (load_file(run.folder / last / file) for run in (resumed, straight))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert not (cut.folder / last / "model.safetensors").exists()
    assert any(each.any() for name, each in adapter_parameters(straight.policy.model).items() if "_B" in name)
    base = load_for(straight.policy.target, config.model, in_4bit=True).model
    ours, theirs = map(layers_in_4_bits, (straight.policy.model, base))
    assert all(torch.equal(ours[f"{name}.base_layer"].weight, theirs[name].weight) for name in theirs)


@pytest.mark.usefixtures("made_up_plans")
def test_adapters_on_top_of_merged_adapters(config, load):
    """What they were merged into is nowhere as a whole: the run keeps it, and reads it from there."""
    plain = dataclasses.replace(LORA, load_in_4bit=False)
    first = dataclasses.replace(config, steps=1, lora=plain, name="first")
    second = dataclasses.replace(first, lora=LORA, name="second")
    for each in (first, second):
        if each is second:
            each = dataclasses.replace(each, model=str(config.runs_dir / "first/checkpoints/step-000001"))
        with open_run(each) as run:
            Trainer(run, Console(quiet=True)).train(StopRequest())
    assert layers_in_4_bits(run.policy.model)
    assert load_policy(str(run.folder / "checkpoints/step-000001"), CPU, "fp32").model.dtype == torch.float32


def test_nothing_is_merged_into_weights_of_another_kind(config):
    shape = LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    merging = dataclasses.replace(config, lora=LoraSettings(lora_rank=4, lora_merge=True))
    with pytest.raises(SettingsError, match=r"lora_merge is True, but .* quantized \(bitsandbytes\)"):
        check_quantized(merging, shape)
    plain = dataclasses.replace(config, lora=LoraSettings(lora_rank=4))
    assert check_quantized(plain, shape) == plain  # and not taken for one in 4 bits


@pytest.mark.usefixtures("made_up_plans")
def test_weights_that_come_in_4_bits_train_adapters_or_not_at_all(config, load, model_folders, tmp_path):
    target, tokenizer = load("gpt2").target, load("gpt2").tokenizer
    load_for(target, str(model_folders["gpt2"]), in_4bit=True).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = dataclasses.replace(config, model=str(tmp_path), steps=1)
    with (
        pytest.raises(SettingsError, match=r"quantized \(bitsandbytes in 4 bits\).* give --lora-rank"),
        open_run(config),
    ):
        pass
    with open_run(dataclasses.replace(config, lora=LoraSettings(lora_rank=4))) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    assert len(layers_in_4_bits(run.policy.model)) == 8
    merged = load_policy(str(run.folder), CPU, "fp32").model
    assert not layers_in_4_bits(merged)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert (merged(ids).logits - run.policy.model(ids).logits).abs().max() < 1e-4


SHAPE = Shape(16, 40, 24)
SIZES = LlamaConfig(
    vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=192,
)  # fmt: skip


def test_the_plan_counts_a_base_in_4_bits(tmp_path):
    """Its bytes exactly, and what a phase adds, where layers are dequantized in turn."""
    setting = Setting("llama", SIZES, torch.float32, group_size=4, lora=LORA)
    real = RealPhases(setting)
    traces = PhaseTracer(
        PhaseSettings(
            setting.target, 4, SamplingSettings(max_new_tokens=24), LossSettings(kl_coef=0.02), lora=LORA
        ),
        cache_folder=tmp_path,
    )
    held = sum(each.nbytes for each in real.model.parameters() if not each.requires_grad)
    for layer in layers_in_4_bits(real.model).values():
        state = layer.weight.quant_state
        tables = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        held += sum(each.nbytes for each in tables)
    assert traces.frozen_bytes == held
    for phase in PHASES:
        allocated = allocator_peak(real.prepare(phase, SHAPE))
        assert held + traces.peak_bytes(phase, SHAPE) == pytest.approx(held + allocated, rel=0.02), phase


def test_a_model_that_is_loaded_already_is_refused(config, load):
    config = dataclasses.replace(config, lora=LORA)
    with pytest.raises(SettingsError, match="load_in_4bit is True, but the model is loaded already"):
        Given(load("gpt2").model).model_source(config)


def test_without_bitsandbytes_it_says_what_to_install(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else name)
    config = dataclasses.replace(config, lora=LORA, model="/no/such/model")
    with (
        pytest.raises(ValueError, match=r"load_in_4bit is True, which needs .* pip install bitsandbytes"),
        open_run(config),
    ):
        pass
