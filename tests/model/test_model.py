"""Which model is taken, as what it is loaded, which cannot be trained, and copies of the policy."""

import json
from unittest import mock

import huggingface_hub
import pytest
import torch
from conftest import ARCHITECTURES, CPU
from test_checkpointing import made
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from grpo.model.load import context_length, is_cut_short, load_policy
from grpo.model.names import out_of_reach
from grpo.model.target import HUB_DEFAULT, choose_model, compute_dtype
from grpo.model.weights import RolloutModel
from grpo.scoring.model_checks import check_scorer

IDS = torch.tensor([[5, 6, 7, 8]])


def test_auto_says_which_model_it_is_and_how_to_choose(logged):
    assert choose_model("gpt2", CPU) == "gpt2" and logged == []  # that was named
    wanted = {"cpu": "rook-tiny", "cuda": HUB_DEFAULT, "mps": "rook-tiny"}
    assert {device: choose_model("auto", torch.device(device)) for device in wanted} == wanted
    for line, name in zip(logged, wanted.values(), strict=True):
        assert line.startswith(f"INFO model: {name} (") and "--model" in line and "hub id or a folder" in line
    choose_model("auto", torch.device("cuda"), absent="8GB")
    assert "(a card of 8GB is planned for)" in logged[-1]  # not said to be present


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    no_network = mock.Mock(side_effect=TimeoutError)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    assert out_of_reach("nobody/asked-once") and out_of_reach("nobody/asked-once")
    assert no_network.call_count == 1 and "nobody/asked-once" in no_network.call_args.args
    assert not out_of_reach("/tmp/no-model-here")


def test_a_classifier_is_an_error(tmp_path, model_folders, tokenizer, capfd):
    """And not a head at random, with a table on the screen; the same way come checkpoints and evaluations."""
    for name, said in (
        ("llama", "lacks lm_head.weight; has besides score.weight"),
        ("gpt2", "it has besides score.weight."),  # whose head is the embedding
    ):
        folder = tmp_path / name
        AutoModelForSequenceClassification.from_pretrained(model_folders[name]).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        capfd.readouterr()
        with pytest.raises(ValueError) as error:
            load_policy(str(folder), CPU)
        assert said in str(error.value) and "\n" not in str(error.value)
        assert "LOAD REPORT" not in capfd.readouterr().err


def test_code_from_a_model_is_never_run(tmp_path, model_folders, tokenizer):
    config = json.loads((model_folders["gpt2"] / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not hold"):
        load_policy(str(tmp_path), CPU)
    assert not (tmp_path / "ran").exists()


def test_gelu_new_becomes_the_same_formula_in_one_kernel_and_dropout_is_off(model_folders, load):
    """In the configuration and in every module, so even while training."""
    plain = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]).eval()
    stored, model = plain.config, load("gpt2").model
    assert (stored.activation_function, model.config.activation_function) == ("gelu_new", "gelu_pytorch_tanh")
    assert torch.allclose(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-5)
    for config, share in ((stored, 0.1), (model.config, 0)):
        assert {config.resid_pdrop, config.embd_pdrop, config.attn_pdrop} == {share}
    drops = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert drops and all(module.p == 0 for module in drops) and not model.training
    model.train()
    assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_masters_are_fp32_even_if_the_file_is_bf16_and_float64_throughout_on_request(tmp_path, load):
    """In bf16 a step of 1e-5 on a weight of 1 rounds to nothing. Texts are padded with their end."""
    stored = load("gpt2")
    stored.model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored.tokenizer.pad_token = None
    stored.tokenizer.save_pretrained(tmp_path)
    for precision in ("fp64", "fp32", "bf16", "auto"):
        policy = load_policy(str(tmp_path), CPU, precision)
        dtype = torch.float64 if precision == "fp64" else torch.float32
        assert {p.dtype for p in policy.model.parameters()} == {dtype}
        assert policy.target.dtype == compute_dtype(precision, CPU)
        assert policy.tokenizer.pad_token_id == policy.tokenizer.eos_token_id is not None
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, stored.model.get_parameter(name).float())
    weight = policy.model.transformer.ln_f.weight
    with torch.no_grad():
        weight.add_(1e-5)
    assert (weight > 1).all() and (weight.bfloat16() == 1).all()


def test_auto_computes_in_bf16_where_the_cpu_does(monkeypatch):
    for precision, flags, dtype in (
        ("auto", {"avx2", "avx512_bf16"}, torch.bfloat16),
        ("auto", {"amx_bf16"}, torch.bfloat16),
        ("auto", {"avx2", "avx512f"}, torch.float32),
        ("fp32", {"avx512_bf16"}, torch.float32),
        ("bf16", set(), torch.bfloat16),
        ("fp64", {"avx512_bf16"}, torch.float64),
    ):
        monkeypatch.setattr("grpo.model.target._cpu_flags", lambda flags=flags: flags)
        assert compute_dtype(precision, CPU) == dtype, (precision, flags)


def test_models_of_plain_heads_and_attention_can(load):
    """Also one that may, but does not, divide its logits, and texts longer than a sliding window: prompts of
    unequal length end beside each other then, as windows count places."""
    for name in ARCHITECTURES:
        check_scorer(load(name).model, 192)
    check_scorer(made("granite", logits_scaling=1.0), 64)
    model = made("mistral", num_key_value_heads=2, sliding_window=24)
    assert context_length(model.config) == 64
    check_scorer(model, 64)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "factor": 3.4,
    "long_factor": [1.0, 4.0, 16.0, 48.0],
    "original_max_position_embeddings": 40,
}


@pytest.mark.parametrize(
    ("kind", "more", "context"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}, 40),
        ("llama", {"rope_parameters": LONGROPE}, 40),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 64),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, 64),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": LONGROPE,
                },
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            40,
        ),
    ],
)
def test_a_context_ends_where_a_longer_text_would_change_all_that_are_beside_it(kind, more, context):
    """longrope takes other frequencies for a whole pass; within the context a text says the same alone."""
    model = made(kind, max_position_embeddings=64, num_key_value_heads=2, head_dim=8, pad_token_id=0, **more)
    assert context_length(model.config) == context
    assert is_cut_short(model.config) == (context < 64)
    ids = torch.arange(context).view(1, -1) % 8
    with torch.no_grad():
        short, alone = ids[:, :9], model(ids[:, :9]).logits
        positions = torch.arange(context).view(1, -1)
        beside = model(torch.cat([short.expand(1, -1), ids[:, 9:]], 1), position_ids=positions).logits[:, :9]
    assert torch.allclose(beside, alone, atol=1e-5)
    if context < 64:
        longer = torch.arange(context + 1).view(1, -1)
        changed = model(longer % 8, position_ids=longer).logits[:, :9]
        assert (changed - alone).abs().max() > 1e-3


def test_products_are_exact_while_the_head_is_checked_and_as_before_afterwards(load, monkeypatch):
    """TF32 rounds to three digits: a sound model would pass for one with another head."""
    model, seen, before = load("llama").model, [], torch.get_float32_matmul_precision()
    model.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    try:
        check_scorer(model, 192)
        with pytest.raises(ValueError):
            check_scorer(made("llama", logits_scaling=4.0), 24)
        assert set(seen) == {"highest"} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_sampler_is_the_policy_itself_or_in_bf16_a_copy_that_is_refreshed_in_place():
    model = made("gpt2")
    assert RolloutModel(model, torch.float32).model is model
    sampler = RolloutModel(model, torch.bfloat16)
    places = [p.data_ptr() for p in sampler.model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    sampler.refresh()
    *own, head = sampler.model.parameters()
    for (name, q), p in zip(model.named_parameters(), own, strict=True):
        is_product = "attn." in name or "mlp." in name  # embeddings and norms are the policy's own
        assert (torch.equal(p, q.bfloat16()) and p.dtype == torch.bfloat16) if is_product else p is q, name
    assert [p.data_ptr() for p in sampler.model.parameters()] == places  # recorded steps stay valid
    assert head is sampler.model.lm_head.weight and head.dtype == torch.bfloat16
    embedding = model.transformer.wte.weight  # which is the policy's head: the sampler's is centred
    assert torch.equal(head, (embedding - embedding.mean(0)).bfloat16())
