import json
import shutil

import huggingface_hub.constants
import pytest
import torch
from conftest import CPU
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from grpo.model.hub import out_of_reach
from grpo.model.load import RolloutModel, context_length, default_shape, frozen_copy, load_policy
from grpo.model.target import HUB_DEFAULT, choose_device, choose_model, compute_dtype
from grpo.scoring.model_checks import check_scorer

IDS = torch.tensor([[5, 6, 7, 8]])


# ------------------------------------------------------------------------------------- which model


@pytest.mark.parametrize(
    ("device", "chosen"), [("cpu", "rook-tiny"), ("cuda", HUB_DEFAULT), ("mps", "rook-tiny")]
)
def test_auto_says_which_model_it_is_and_how_to_choose(logged, device, chosen):
    assert choose_model("auto", torch.device(device)) == chosen
    (line,) = logged
    assert line.startswith(f"INFO model: {chosen} (") and "--model" in line and "hub id or a folder" in line


def test_a_model_that_was_named_is_taken(logged):
    assert choose_model("gpt2", torch.device("cuda")) == "gpt2"
    assert logged == []


def test_without_the_hub_the_error_names_two_ways_out(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        load_policy("nobody/no-such-model", CPU)
    message = str(error.value)
    assert "nobody/no-such-model" in message and "could not be fetched" in message
    assert "hf download nobody/no-such-model --local-dir FOLDER" in message
    assert "give the folder as the model" in message and "rook-tiny" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["/tmp/no-model-here", "./no-model-here", "~/no-model", "runs/a/no-model"])
def test_what_can_only_be_a_folder_is_missed_as_a_folder(name):
    with pytest.raises(ValueError) as error:
        load_policy(name, CPU)
    assert str(error.value) == f"model is {name!r}: there is no such folder."


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    asked = []

    def no_network(self, name, timeout):
        asked.append(name)
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    for _ in range(2):
        assert out_of_reach("nobody/asked-once")
    assert asked == ["nobody/asked-once"]
    assert not out_of_reach("/tmp/no-model-here")


def test_a_card_that_is_planned_for_is_not_said_to_be_present(logged):
    choose_model("auto", torch.device("cuda"), absent="8GB")
    assert "(a card of 8GB is planned for)" in logged[0]


def test_the_built_in_shape_is_gpt2s():
    shape = default_shape()
    assert (shape.vocab_size, shape.n_positions, shape.n_embd) == (50257, 1024, 768)
    assert (shape.n_layer, shape.n_head, shape.resid_pdrop) == (12, 12, 0.0)
    assert shape.activation_function == "gelu_pytorch_tanh"


def test_what_is_neither_folder_nor_hub_id_is_an_error_of_the_users(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="Two ways out"):
        load_policy("not a model", CPU)


def test_a_folder_of_pickles_is_refused_and_never_opened(tmp_path, model_folders, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"])
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model folder '.*' does not hold .* in safetensors: "):
        load_policy(str(tmp_path), CPU)


@pytest.mark.parametrize(
    "damage", ["empty folder", "no config", "no tokenizer", "broken config", "broken weights"]
)
def test_a_folder_that_is_not_whole_is_an_error_of_the_users(tmp_path, load, damage):
    if damage != "empty folder":
        policy = load("gpt2")
        policy.model.save_pretrained(tmp_path)
        if damage != "no tokenizer":
            policy.tokenizer.save_pretrained(tmp_path)
    if damage == "no config":
        (tmp_path / "config.json").unlink()
    if damage == "broken config":
        (tmp_path / "config.json").write_text("{")
    if damage == "broken weights":
        (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=r"model folder '.*' does not hold a causal language model"):
        load_policy(str(tmp_path), CPU)


@pytest.mark.parametrize(
    ("architecture", "change", "said"),
    [
        ("llama", "classifier", r"lacks lm_head.weight; has besides score.weight"),
        ("gpt2", "classifier", r"it has besides score.weight\."),  # whose head is the embedding
        ("llama", "a layer less", r"lacks model.layers.1.\S+, .* and 6 more\."),
        ("llama", "a wider vocabulary", r"has in another shape lm_head.weight, model.embed_tokens.weight\."),
    ],
)
def test_weights_that_are_not_the_models_are_an_error(
    tmp_path, model_folders, load, architecture, change, said, capfd
):
    """And not a head at random, with a table on the screen; the same way come checkpoints and evaluations."""
    if change == "classifier":
        kind = AutoModelForSequenceClassification
        kind.from_pretrained(model_folders[architecture]).save_pretrained(tmp_path)
        capfd.readouterr()
    else:
        load(architecture).model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        if change == "a layer less":
            weights = load_file(tmp_path / "model.safetensors")
            kept = {name: each for name, each in weights.items() if ".layers.1." not in name}
            save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        else:
            config["vocab_size"] += 8
        (tmp_path / "config.json").write_text(json.dumps(config))
    load(architecture).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said) as error:
        load_policy(str(tmp_path), CPU)
    assert "\n" not in str(error.value) and "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"\(gptq\).*optimum.*--lora-rank 16"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"\(awq\).*gptqmodel.*--lora-rank 16"),
        ({"tokenizer_class": "GPTSw3Tokenizer"}, r"needs a package that is not installed: .* SentencePiece"),
    ],
    ids=["gptq", "awq", "sentencepiece"],
)
def test_a_package_that_is_missing_is_named(tmp_path, model_folders, kept, said):
    shutil.copytree(model_folders["gpt2"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / ("tokenizer_config.json" if "tokenizer_class" in kept else "config.json")
    settings = json.loads(file.read_text()) if file.name == "config.json" else {}
    file.write_text(json.dumps(settings | kept))
    if settings == {}:
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(ValueError, match=said) as error:
        load_policy(str(tmp_path), CPU)
    assert "\n" not in str(error.value)


def test_code_from_a_model_is_never_run(tmp_path, model_folders, tokenizer):
    config = json.loads((model_folders["gpt2"] / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not hold"):
        load_policy(str(tmp_path), CPU)
    assert not (tmp_path / "ran").exists()


# -------------------------------------------------------------------------------- as it is trained


def test_gelu_new_becomes_the_same_formula_in_one_kernel(model_folders, load):
    plain = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]).eval()
    assert plain.config.activation_function == "gelu_new"
    ours = load("gpt2").model
    assert ours.config.activation_function == "gelu_pytorch_tanh"
    assert torch.allclose(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-5)


def test_dropout_is_off_in_the_configuration_and_in_every_module(model_folders, load):
    stored = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]).config
    assert (stored.resid_pdrop, stored.embd_pdrop, stored.attn_pdrop) == (0.1, 0.1, 0.1)
    model = load("gpt2").model
    config = model.config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0, 0, 0)
    drops = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert drops and all(module.p == 0 for module in drops)
    assert not model.training
    model.train()  # and even then
    assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_masters_are_fp32_even_if_the_file_is_bf16(tmp_path, load):
    """In bf16 a step of 1e-5 on a weight of 1 rounds to nothing."""
    stored = load("gpt2")
    stored.model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored.tokenizer.save_pretrained(tmp_path)
    for precision in ("fp32", "bf16", "auto"):
        policy = load_policy(str(tmp_path), CPU, precision)
        assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, stored.model.get_parameter(name).float())
    weight = policy.model.transformer.ln_f.weight
    with torch.no_grad():
        weight.add_(1e-5)
    assert (weight > 1).all() and (weight.bfloat16() == 1).all()


def test_float64_is_float64_throughout(load):
    policy = load("gpt2", "fp64")
    assert policy.target.dtype == torch.float64
    assert {p.dtype for p in policy.model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("precision", "flags", "dtype"),
    [
        ("auto", {"avx2", "avx512_bf16"}, torch.bfloat16), ("auto", {"amx_bf16"}, torch.bfloat16),
        ("auto", {"avx2", "avx512f"}, torch.float32), ("fp32", {"avx512_bf16"}, torch.float32),
        ("bf16", set(), torch.bfloat16), ("fp64", {"avx512_bf16"}, torch.float64),
    ],
)  # fmt: skip
def test_auto_computes_in_bf16_where_the_cpu_does(monkeypatch, precision, flags, dtype):
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: flags)
    assert compute_dtype(precision, CPU) == dtype


def test_a_tokenizer_without_an_end_is_refused_and_one_without_padding_pads_with_its_end(tmp_path, load):
    policy = load("gpt2")
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.pad_token = None
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path), CPU, "fp32").tokenizer
    assert again.pad_token_id == again.eos_token_id is not None
    policy.tokenizer.eos_token = None
    policy.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer without an end-of-text token"):
        load_policy(str(tmp_path), CPU, "fp32")


def test_a_device_that_is_not_there_is_an_error_of_the_users():
    assert choose_device("cpu") == CPU
    missing = "cuda" if not torch.cuda.is_available() else "cuda:99"
    for name in (missing, "warp-drive"):
        with pytest.raises(ValueError, match=rf"device is '{name}', which cannot be used here .*: give cpu"):
            choose_device(name)


# -------------------------------------------------------------------------- models we cannot train


SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def test_a_head_that_is_more_than_linear_is_refused():
    """Granite divides its logits: log-probs from the plain head would be wrong by nats, silently."""
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)).eval()
    with pytest.raises(ValueError, match=r"GraniteForCausalLM cannot be trained here: .* nats wrong"):
        check_scorer(model, context_length(model.config))
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=1.0)).eval()
    check_scorer(model, context_length(model.config))


def test_products_are_exact_while_the_head_is_checked_and_as_before_afterwards(load, monkeypatch):
    """TF32 rounds to three digits: a sound model would pass for one with another head."""
    model = load("llama").model
    seen = []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward",
        lambda self, **words: seen.append(torch.get_float32_matmul_precision()) or forward(self, **words),
    )  # fmt: skip
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_scorer(model, 192)
        with pytest.raises(ValueError):
            check_scorer(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)).eval(), 24)
        assert set(seen) == {"highest"} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_model_without_keys_and_values_is_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="MambaForCausalLM cannot be trained here"):
        check_scorer(model, context_length(model.config))


def test_every_model_of_these_tests_passes(load):
    for name in ("gpt2", "llama", "qwen"):
        check_scorer(load(name).model, 192)


def test_a_text_may_be_longer_than_a_sliding_window():
    """Prompts of unequal length end beside each other then, as windows count places."""
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)).eval()
    assert context_length(model.config) == 64
    check_scorer(model, 64)


# ------------------------------------------------------------------------------ copies of the policy


def test_the_reference_is_a_frozen_twin(load):
    model = load("gpt2").model
    reference = frozen_copy(model)
    assert torch.equal(reference(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert not any(p.requires_grad for p in reference.parameters()) and not reference.training
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model.transformer.wte.weight.add_(1)
    assert not torch.equal(reference.transformer.wte.weight, model.transformer.wte.weight)


def test_in_the_masters_dtype_the_sampler_is_the_policy_itself(load):
    model = load("gpt2").model
    assert RolloutModel(model, torch.float32).model is model


def test_in_bf16_the_sampler_is_a_copy_that_is_refreshed_in_place():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    sampler = RolloutModel(model, torch.bfloat16)
    places = [p.data_ptr() for p in sampler.model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    sampler.refresh()
    *copied, head = sampler.model.parameters()
    for p, q in zip(copied, model.parameters(), strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, q.bfloat16())
    assert [p.data_ptr() for p in sampler.model.parameters()] == places  # recorded steps stay valid
    assert head is sampler.model.lm_head.weight and head.dtype == torch.bfloat16
    embedding = model.transformer.wte.weight  # which is the policy's head: the sampler's is centred
    assert torch.equal(head, (embedding - embedding.mean(0)).bfloat16())
