"""The sampler's copy is the policy's model, whatever weights are stored in and wherever adapters are."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from grpo.model.first_layers import first_layers
from grpo.model.weights import RolloutModel, make_reference, multiply_head, reference_bytes, sampling_in
from grpo.rollout.decoder import check_decoder, has_static_cache
from grpo.scoring.head import chunked_lm_head

BF16, FP32 = torch.bfloat16, torch.float32
IDS = torch.randint(260, (2, 16), generator=torch.Generator().manual_seed(0))
STORED = {
    "4 bits": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "4 bits within bf16": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16),
    "4 bits, products in bf16": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "8 bits": BitsAndBytesConfig(load_in_8bit=True),
}
HEADS = {
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both ends": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "adapter of the head": {"target_modules": ["q_proj", "lm_head"]},
    "magnitudes of the head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "all layers": {"target_modules": "all-linear"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose logits are spread by some nats, as those of trained models are."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            max_position_embeddings=512,
            bos_token_id=256,
            eos_token_id=257,
        )
    )
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def adapted(folder, *, is_prepared=False, dtype=torch.float32, quantization=None, **adapters):
    """peft's model around one that is loaded so, and the model within; its adapters have moved."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization)
    if is_prepared:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    outer = get_peft_model(model, LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM"} | adapters))
    move(outer)
    return outer, outer.get_base_model().eval()


@torch.no_grad()
def move(model) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def correlation(model, sampler) -> float:
    """Returns the gap between log-probs as they are scored and as they are sampled."""
    with torch.autocast("cpu", torch.bfloat16):
        scored = model(IDS).logits.float().log_softmax(-1)
    with sampling_in(sampler.model):
        hidden = sampler.model.base_model(IDS).last_hidden_state
        sampled = sampler.model.get_output_embeddings()(hidden).float().log_softmax(-1)
    return torch.corrcoef(torch.stack([scored.flatten(), sampled.flatten()]))[0, 1].item()


@pytest.mark.parametrize("is_prepared", [False, True], ids=["as loaded", "prepared by peft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stored", STORED)
def test_a_quantized_base_is_sampled_from_as_it_is_and_never_copied(folder, stored, dtype, is_prepared):
    quantization = copy.deepcopy(STORED[stored])
    _, model = adapted(
        folder, is_prepared=is_prepared, dtype=dtype, quantization=quantization, target_modules="all-linear"
    )
    packed = {id(p) for p in model.parameters() if type(p) not in (torch.nn.Parameter, torch.Tensor)}
    assert len(packed) == 14
    sampler = RolloutModel(model, torch.bfloat16)
    assert packed <= {id(parameter) for parameter in sampler.model.parameters()}
    assert sampler.check() is None and correlation(model, sampler) > 0.998
    move(model)
    sampler.refresh()
    assert sampler.check() is None and correlation(model, sampler) > 0.998
    check_decoder(model)
    assert has_static_cache(model.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["base in fp32", "base in bf16"])
@pytest.mark.parametrize("kind", HEADS)
def test_adapters_of_the_head_are_followed(folder, kind, dtype):
    _, model = adapted(folder, dtype=dtype, **HEADS[kind])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sampler = RolloutModel(model, torch.bfloat16)
    assert sampler.check() is None and correlation(model, sampler) > 0.998
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    move(model)
    is_copied = dtype == torch.float32 and kind in ("saved head", "both ends")  # in bf16 it is shared
    assert not is_copied or sampler.check() is not None
    sampler.refresh()
    assert sampler.check() is None and correlation(model, sampler) > 0.998


@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "adapters"])
def test_in_bf16_the_samplers_states_are_those_that_the_scorer_sees_to_the_bit(folder, has_adapters):
    """Embeddings, norms and what is added up between layers stay in fp32; a copy all in bf16 is far off."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if has_adapters:
        _, model = adapted(folder, target_modules="all-linear")
    sampler = RolloutModel(model, torch.bfloat16).model
    assert sampler.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert sampler.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model.model(IDS).last_hidden_state
    with torch.no_grad(), sampling_in(sampler):
        assert torch.equal(sampler.model(IDS).last_hidden_state, expected)
        assert not torch.is_autocast_cache_enabled()  # recorded steps would keep what it casts once
    assert not torch.equal(copy.deepcopy(model).bfloat16().model(IDS).last_hidden_state.float(), expected)


@pytest.mark.parametrize("adds", [False, True], ids=["plain", "as CUDA adds"])
def test_with_fp32_logits_a_sampler_s_head_is_the_scorer_s(folder, monkeypatch, adds):
    """Both make the same log-probs of the same states, by products that are not rounded to bf16."""

    def add(total, left, right, *, out_dtype, out):
        return out.addmm_(left.to(out_dtype), right.to(out_dtype))

    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *of, **to: (add if "out_dtype" in to else addmm)(*of, **to))
    monkeypatch.setattr("grpo.model.head.adds_in", lambda *of: adds)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    targets, errors = IDS[0, 1:], {}
    for fp32_logits in (False, True):
        sampler = RolloutModel(model, torch.bfloat16, fp32_logits=fp32_logits).model
        weight = sampler.lm_head.weight
        assert (weight is model.lm_head.weight) == (fp32_logits and not adds)
        with torch.no_grad(), sampling_in(sampler):
            states = sampler.model(IDS[:1, :-1]).last_hidden_state[0]
            logits = multiply_head(sampler, states)
            scored = chunked_lm_head(states, model.lm_head.weight, targets, fp32_logits=fp32_logits).logp
        assert logits.dtype == (torch.float32 if fp32_logits else torch.bfloat16)
        sampled, exact = (
            each.float().log_softmax(-1).gather(1, targets.unsqueeze(1))[:, 0]
            for each in (logits, states.to(weight.dtype).float() @ weight.float().T)
        )
        torch.testing.assert_close(sampled, scored, rtol=1e-5, atol=1e-5)
        errors[fp32_logits] = (sampled - exact).norm()
    assert errors[True] < 1e-4 < errors[False]
    assert RolloutModel(model, torch.bfloat16, fp32_logits=True).check() is None


def test_a_reference_holds_the_weights_of_products_in_bf16_and_scores_the_same_to_the_bit(folder, logged):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(model) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(IDS).logits

    whole, reference = (make_reference(model, IDS.device, dtype)._model for dtype in (FP32, BF16))
    assert torch.equal(logits(reference), logits(whole)) and torch.equal(logits(reference), logits(model))
    held = sum(weight.nbytes for weight in reference.parameters())
    assert held == reference_bytes(model, BF16) < 0.7 * sum(weight.nbytes for weight in whole.parameters())
    assert reference.lm_head.weight.dtype == reference.model.norm.weight.dtype == FP32
    assert not any(weight.requires_grad for weight in reference.parameters()) and not logged

    class Exact(torch.nn.Linear):
        """A router, as some are, whose product is always in fp32."""

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return torch.nn.functional.linear(states.float(), self.weight.float())

    model.model.layers[0].mlp.gate_proj.__class__ = Exact
    reference = make_reference(model, IDS.device, BF16)._model
    assert {weight.dtype for weight in reference.parameters()} == {FP32}
    assert torch.equal(logits(reference), logits(model))
    (line,) = logged
    assert "stays in torch.float32: in torch.bfloat16 its log-probs would be others" in line


def test_a_copy_of_other_weights_is_told(folder):
    """As one whose packed bits were taken for weights would be."""
    _, model = adapted(folder, target_modules="all-linear")
    sampler = RolloutModel(model, torch.bfloat16)
    weight = sampler.model.get_submodule("model.layers.0.mlp.down_proj.base_layer").weight
    weight.data = torch.randint(256, weight.shape, dtype=torch.uint8).to(torch.bfloat16)
    assert "differ from its own" in sampler.check()


def test_a_copy_is_outdated_when_other_weights_are_trained(folder):
    outer, model = adapted(folder, target_modules=["q_proj"])
    sampler = RolloutModel(model, torch.bfloat16)
    assert not sampler.is_outdated()
    outer.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    outer.set_adapter("other")
    assert sampler.is_outdated() and not RolloutModel(model, torch.bfloat16).is_outdated()
    model.model.norm.weight.requires_grad_(True)
    assert RolloutModel(model, torch.bfloat16).check() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_compared_by_its_first_layers_in_fp32(folder, dtype):
    """Its own rounding is larger than the faults that are looked for."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    check_decoder(model)
    assert has_static_cache(model.config)
    part = first_layers(model, torch.device("cpu"))
    assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
    with torch.no_grad():
        theirs, ours = (each(IDS).logits.float().log_softmax(-1) for each in (model, part))
    assert 1e-3 < (theirs - ours).abs().max() < 0.5


def test_where_the_device_has_no_room_for_the_check_it_is_done_on_the_host(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    asked = []

    def without_room(model, device):
        asked.append(device.type)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return first_layers(model, device)

    monkeypatch.setattr("grpo.rollout.decoder.first_layers", without_room)
    check_decoder(model)
    assert has_static_cache(model.config) and len(asked) == 2
