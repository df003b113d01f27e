"""LoRA, on a base in 4 bits too: what is trained, that others load what is saved, and what the KL is to."""

import copy
import math
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import CPU, learned_logprobs
from peft import PeftModel
from real_phases import RealPhases, Setting, allocator_peak
from transformers import AutoModelForCausalLM, LlamaConfig
from whole_runs import metrics_of, train

from grpo.config.groups import LoraSettings, OptimizerSettings
from grpo.learning.optimizer import make_optimizer
from grpo.memory import PassSize
from grpo.memory.live import LiveBytes
from grpo.model.adapters import (
    adapter_parameters,
    adapters_off,
    add_adapters,
    save_adapters,
    save_merged,
    store_base,
)
from grpo.model.four_bits import dequantized, layers_in_4_bits
from grpo.model.load import ModelSource, load_config, load_policy
from grpo.model.weights import RolloutModel, make_reference, sampling_in
from grpo.plan.trace import TracedPhases
from grpo.run.checkpoint import CheckpointFolder
from grpo.run.loading import check_quantized
from grpo.run.setup import Run, open_run
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.model_checks import made_up

pytestmark = pytest.mark.usefixtures("made_up_plans")

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
EVERYWHERE = LoraSettings(lora_rank=4, lora_targets=("all-linear",))
IN_4_BITS = replace(EVERYWHERE, load_in_4bit=True)


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    with sampling_in(model):
        return model(input_ids=IDS).logits.float().log_softmax(-1)


def move(model) -> None:
    """As after some training: its adapters or, without any, all of it."""
    generator = torch.Generator().manual_seed(3)
    for parameter in adapter_parameters(model).values() or model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def adapted(load, name="gpt2", lora=EVERYWHERE, precision="fp32", *, seed=0, moved=True):
    """A model with adapters."""
    model = load(name, precision).model
    add_adapters(model, lora, seed=seed, base=str(model.config._name_or_path))
    if moved:
        move(model)
    return model


def trained(config, **changes) -> Run:
    """A run that is over."""
    trainers = []
    train(replace(config, **changes), trainers.append)
    return trainers[0].run


@pytest.fixture
def lora_config(config):
    return replace(config, lora_rank=4, learning_rate=1e-2)


@pytest.mark.parametrize(("name", "precision"), [("gpt2", "bf16"), ("llama", "fp32"), ("qwen", "fp64")])
def test_new_adapters_change_nothing_and_with_them_off_the_model_is_the_base(load, name, precision):
    plain = logprobs(load(name, precision).model)
    model = adapted(load, name, precision=precision, moved=False)
    assert torch.equal(logprobs(model), plain)
    move(model)
    assert not torch.equal(logprobs(model), plain)
    with adapters_off(model) as base:
        assert torch.equal(logprobs(base), plain)
    assert all(parameter.requires_grad for parameter in adapter_parameters(model).values())


def test_new_adapters_are_the_seeds(load):
    load("gpt2")
    before = torch.get_rng_state()
    models, name = [adapted(load, seed=seed, moved=False) for seed in (0, 0, 1)], "h.0.attn.c_attn.lora_A"
    own, again, other = (adapter_parameters(each)[f"transformer.{name}.default.weight"] for each in models)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers
    assert torch.equal(again, own) and not torch.equal(other, own)


def test_only_adapters_are_trained_and_a_frozen_base_in_bf16_serves_the_sampler_too(load):
    model = adapted(load, precision="bf16")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapter_parameters(model)) and len(trained) == 2 * 2 * 4
    assert len(make_optimizer(model, OptimizerSettings()).state) == len(trained)
    assert type(model).__name__ == "GPT2LMHeadModel"  # which decides on the decoder
    store_base(model, torch.bfloat16)
    sampler = RolloutModel(model, torch.bfloat16).model
    assert sampler.base_model is model.base_model
    assert sampler.get_output_embeddings().weight is not model.get_output_embeddings().weight
    assert model.transformer.wte.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in adapter_parameters(model).values()} == {torch.float32}


def test_peft_chooses_the_targets_where_none_are_given_and_alpha_is_twice_the_rank(load):
    for name, layers in (("gpt2", {"c_attn"}), ("llama", {"q_proj", "v_proj"})):
        model = adapted(load, name, LoraSettings(lora_rank=2))
        assert {each.split(".lora_")[0].rpartition(".")[2] for each in adapter_parameters(model)} == layers
    assert [LoraSettings(lora_rank=8, lora_alpha=alpha).used_alpha for alpha in (None, 4)] == [16, 4]
    model = adapted(load, lora=LoraSettings(lora_rank=4, lora_alpha=6))
    assert model.transformer.h[0].attn.c_attn.scaling == {"default": 1.5}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_others_load_what_is_saved(load, model_folders, tmp_path, name):
    """Plain peft the adapters, plain transformers the merged model, and we both, whatever is beside them."""
    model = adapted(load, name)
    expected = logprobs(model)
    save_adapters(model, tmp_path)
    model.config.save_pretrained(tmp_path)  # the shape of their base, as transformers saves it
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
    layer = model.transformer.h[0].attn.c_attn
    delta = layer.scaling["default"] * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).T
    weight = AutoModelForCausalLM.from_pretrained(tmp_path).transformer.h[0].attn.c_attn.weight
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.detach(), (layer.base_layer.weight.float() + delta).detach())


def test_a_run_on_adapters_may_be_moved(lora_config):
    """Its base, with adapters merged, is nowhere else as a whole: the run keeps it, and reads it there."""
    first = train(replace(lora_config, steps=1, name="first"))
    second = trained(lora_config, steps=1, name="second", model=str(first))
    third = trained(lora_config, steps=1, name="third", model=str(first), **vars(IN_4_BITS))
    assert layers_in_4_bits(third.policy.model)
    expected = logprobs(load_policy(str(second.folder), CPU, "fp32").model)
    moved = second.folder.with_name("moved").resolve()
    second.folder.rename(moved)
    shutil.rmtree(first)
    for place in (moved, moved / "checkpoints/step-000001"):
        assert torch.equal(logprobs(load_policy(str(place), CPU, "fp32").model), expected)
    assert load_policy(str(third.folder), CPU, "fp32").model.dtype == torch.float32
    assert train(replace(second.config, model=str(first), steps=2, name=None, resume=moved)) == moved


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "kl_in_reward": True, "gradient_checkpointing": "full"},
        {"precision": "bf16"},
        vars(IN_4_BITS),
    ],
    ids=["rich", "bf16", "4 bits"],
)
def test_a_run_moves_the_adapters_and_nothing_else(lora_config, changes):
    seen = []
    folder = train(
        replace(lora_config, **changes),
        lambda trainer: seen.extend((trainer.model, copy.deepcopy(trainer.model.state_dict()))),
    )
    model, before = seen
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert moved == set(adapter_parameters(model))
    checkpoint = {file.name for file in (folder / "checkpoints/step-000002").iterdir()}
    assert "adapter_model.safetensors" in checkpoint
    assert not checkpoint & {"model.safetensors", "reference.safetensors"}
    if "kl_in_reward" not in changes:
        kls = [metrics["kl"] for metrics in metrics_of(folder) if "kl" in metrics]
        assert kls[0] < 1e-3 and kls[-1] > 0


def test_the_reference_needs_no_weights(lora_config):
    """Bytes that set-up leaves behind, counted tensor by tensor, with and without a reference."""
    held = []
    for kl_coef in (0.05, 0.0):
        config = replace(lora_config, kl_coef=kl_coef, name=f"kl{kl_coef}")
        with LiveBytes() as live, open_run(config) as run:
            assert (run.reference is None) == (not kl_coef)
            held.append(live.live_bytes)
    copy = sum(parameter.nbytes for parameter in run.policy.model.parameters())
    assert abs(held[0] - held[1]) < 0.03 * copy  # some small things are made once only


def test_a_run_goes_on_with_the_adapters_it_began_with(config, lora_config):
    """Or without any."""
    with_ = train(replace(lora_config, steps=1, name="with"))
    without = train(replace(config, steps=1, name="without"))
    assert not [*without.rglob("reference.safetensors")]  # as it never followed
    for folder, lora, said in (
        (with_, {"lora_rank": 8}, r"lora_rank is 8, but .* has 4: go on with that"),
        (with_, {"lora_rank": 4, "lora_alpha": 1}, r"lora_alpha is 1, but .* has 8"),
        (with_, {"lora_rank": 4, "lora_targets": ("c_fc",)}, "lora_targets are others than .* c_attn"),
        (with_, {"lora_rank": 0}, r"lora_rank is 0, but .* has 4"),
        (without, {"lora_rank": 8}, r"lora_rank is 8, but .* has 0"),
    ):
        with pytest.raises(ValueError, match=said):
            train(replace(lora_config, resume=folder, **lora))


def test_a_checkpoint_is_merged_on_request_and_evaluated_as_it_is(lora_config):
    run = trained(lora_config, lora_rank=4, lora_merge=True)
    folder = run.folder / "checkpoints/step-000002"
    expected = logprobs(run.policy.model)
    for each in (load_policy(str(folder), CPU, "fp32"), load_policy(str(folder / "merged"), CPU, "fp32")):
        assert (logprobs(each.model) - expected).abs().max() < 1e-5
        assert each.tokenizer.eos_token_id == run.policy.tokenizer.eos_token_id
    assert CheckpointFolder(run.folder / "checkpoints", keep=1).newest_intact().state["step"] == 2


@pytest.mark.parametrize(
    ("name", "dtype", "exactness"),
    [("qwen", torch.bfloat16, 2e-2), ("llama", torch.float32, 1e-5), ("gpt2", torch.float32, 1e-5)],
)
def test_gradients_are_those_of_the_dequantized_base(load, model_folders, tmp_path, name, dtype, exactness):
    """Relative to their norm: in bf16 to a few times its rounding, 2⁻⁸. Merged it is what it was."""
    target, theirs = load(name).target, load(name).model
    ours = ModelSource(str(model_folders[name])).load(target, in_4bit=True).model
    assert len(layers_in_4_bits(ours)) > 7 and not layers_in_4_bits(theirs)
    with torch.no_grad():
        for layer_name, layer in layers_in_4_bits(ours).items():
            theirs.get_submodule(layer_name).weight.copy_(dequantized(layer))
    gradients = []
    for model in (ours, theirs):
        add_adapters(model, IN_4_BITS)
        move(model)
        store_base(model, dtype)
        batch = made_up(model, 24).stream()
        with adapters_off(model), torch.no_grad():  # layers are used without gradients first, as in sampling
            token_logprobs(model, batch, temperature=1.0, dtype=dtype)
        learned_logprobs(model, batch, temperature=1.0, dtype=dtype)
        gradients.append({name: each.grad for name, each in adapter_parameters(model).items()})
    found, expected = gradients
    assert found.keys() == expected.keys() and all(gradient.any() for gradient in found.values())
    difference = math.hypot(*((found[name] - expected[name]).norm() for name in expected))
    assert difference / math.hypot(*(gradient.norm() for gradient in expected.values())) < exactness
    if dtype == torch.float32:
        save_merged(ours, tmp_path)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert not hasattr(merged.config, "quantization_config") and merged.dtype == torch.float32
        assert (logprobs(merged) - logprobs(ours)).abs().max() < 1e-4


def test_weights_that_come_in_4_bits_are_trained_by_adapters(lora_config, load, model_folders, tmp_path):
    target, tokenizer = load("gpt2").target, load("gpt2").tokenizer
    ModelSource(str(model_folders["gpt2"])).load(target, in_4bit=True).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run = trained(lora_config, model=str(tmp_path), steps=1)
    assert len(layers_in_4_bits(run.policy.model)) == 8
    merged = load_policy(str(run.folder), CPU, "fp32").model
    assert not layers_in_4_bits(merged)
    assert (logprobs(merged) - logprobs(run.policy.model)).abs().max() < 1e-4
    eight = LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert check_quantized(lora_config, eight) == lora_config  # not taken for one in 4 bits


def test_the_plan_counts_a_base_in_4_bits():
    """Its bytes exactly, and what a phase adds, where layers are dequantized in turn."""
    sizes = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
    )
    setting, size = Setting("llama", sizes, torch.float32, group_size=4, lora=IN_4_BITS), PassSize(16, 24, 40)
    real, traced = RealPhases(setting), TracedPhases(setting.workload())
    held = sum(each.nbytes for each in real.policy.parameters() if not each.requires_grad)
    for layer in layers_in_4_bits(real.policy).values():
        state = layer.weight.quant_state
        tables = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        held += sum(each.nbytes for each in tables)
    assert traced.phases.resident()["weights"] == held + 4 * sum(traced.phases.trained_sizes)
    for phase in setting.workload().phases:
        allocated = allocator_peak(partial(real.run, phase, size))
        assert held + traced.added_bytes(phase, size) == pytest.approx(held + allocated, rel=0.02), phase


@pytest.mark.parametrize("rank", [0, 4], ids=["copy", "adapters"])
def test_it_stays_what_the_policy_was_until_it_follows_and_can_be_restored(load, rank):
    """And gradients are the policy's alone."""
    policy = adapted(load, lora=LoraSettings(lora_rank=4), moved=False) if rank else load().model
    reference, other, first = make_reference(policy, CPU), make_reference(policy, CPU), logprobs(policy)
    learns = [parameter.requires_grad for parameter in policy.parameters()]

    def scores(reference) -> torch.Tensor:
        with reference.model() as model:
            frozen = not model.training and not any(each.requires_grad for each in model.parameters())
            assert frozen or model is policy
            return logprobs(model)

    move(policy)
    assert torch.equal(scores(reference), first) and not torch.equal(logprobs(policy), first)
    assert reference.tensors() == {}
    reference.restore({})  # nothing changes
    reference.sync(policy)
    second = logprobs(policy)
    assert torch.equal(scores(reference), second)
    saved = reference.tensors()
    assert len(saved) == len(adapter_parameters(policy) or list(policy.parameters()))
    move(policy)
    third = logprobs(policy)
    assert torch.equal(scores(reference), second) and not torch.equal(third, second)
    assert torch.equal(logprobs(policy), third)  # has its own adapters again
    other.restore(saved)
    assert torch.equal(scores(other), second) and other.tensors().keys() == saved.keys()
    assert [parameter.requires_grad for parameter in policy.parameters()] == learns


@pytest.mark.parametrize("rank", [0, 4], ids=["copy", "adapters"])
def test_a_run_has_the_reference_follow_every_so_many_steps(lora_config, rank):
    """Step 3 is scored by the policy of step 2; what never followed is in no checkpoint."""
    config = replace(lora_config, steps=3, reference_sync=2, lora_rank=rank)
    folder = train(config)
    _, moved, followed = (metrics["kl"] for metrics in metrics_of(folder))
    assert followed < 1e-6 < moved
    assert (folder / "checkpoints/step-000003/reference.safetensors").exists()


def test_a_base_in_fp32_is_sampled_by_a_whole_copy_in_bf16_that_follows_its_adapters(load):
    """As TRL loads one; where the base is in bf16 already, the copy shares it."""
    model = load("llama", "fp32").model
    add_adapters(model, EVERYWHERE)
    sampler = RolloutModel(model, torch.bfloat16)
    layers = {weight.dtype for name, weight in sampler.model.named_parameters() if "proj" in name}
    assert layers == {torch.bfloat16} == {sampler.model.lm_head.weight.dtype}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    before = logprobs(sampler.model)
    rounding = (before - logprobs(model)).abs().mean()
    move(model)
    sampler.refresh()
    after = logprobs(sampler.model)
    assert (after - logprobs(model)).abs().mean() < 2 * rounding < (after - before).abs().mean()
    store_base(model, torch.bfloat16)
    shared = {id(weight) for weight in model.parameters()} & {
        id(weight) for weight in RolloutModel(model, torch.bfloat16).model.parameters()
    }
    assert len(shared) > len(list(model.parameters())) / 2
