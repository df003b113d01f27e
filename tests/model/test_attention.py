"""Attention of our own in bf16 on a CPU."""

import dataclasses

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from grpo.model.cpu import attention
from grpo.model.target import choose_attention
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

R, H, Q, K, D = 5, 6, 7, 11, 8


def plain(query, key, value, mask, scale):
    return (query @ key.mT * scale + mask).softmax(-1) @ value


def example(dtype, heads=H):
    torch.manual_seed(0)
    query = torch.randn(R, Q, H, D).transpose(1, 2).to(dtype).requires_grad_()
    key, value = (torch.randn(R, heads, K, D).to(dtype).requires_grad_() for _ in range(2))
    beyond = torch.ones(Q, K).triu(K - Q + 1).bool()
    mask = torch.zeros(R, 1, Q, K).masked_fill(beyond, torch.finfo(torch.float32).min)
    mask[1, 0, :, :3] = torch.finfo(torch.float32).min  # a row with a shorter prompt
    return query, key, value, mask.to(torch.promote_types(dtype, torch.float32))


@pytest.fixture(params=[True, False], ids=["tiles", "no tiles"])
def tiles(request, monkeypatch):
    """As on a processor with them, whose forward pass is fused, and as on one without."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: request.param)
    return request.param


@pytest.mark.usefixtures("made_up_plans")
@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32"])
def test_a_step_is_trained_on_either_kind_of_processor(config, tiles, precision, monkeypatch):
    """The first command: checks of the model, whose products are exact, an evaluation, a step."""
    monkeypatch.setattr("grpo.model.target._cpu_flags", lambda: {"amx_bf16"} if tiles else {"avx2"})
    config = dataclasses.replace(config, precision=precision, steps=1, checkpoint_interval=0)
    with open_run(config) as run:
        lower = precision == "bf16" or (precision == "auto" and tiles)
        assert run.policy.target.dtype == (torch.bfloat16 if lower else torch.float32)
        trainer = Trainer(run, Console(quiet=True))
        trainer.train(StopRequest())
    assert trainer.finished == trainer.saved == 1


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("heads", [H, 2])
def test_values_and_gradients_are_those_of_plain_attention(parts, heads, monkeypatch):
    monkeypatch.setattr(attention, "_PARTS", parts)
    query, key, value, mask = example(torch.float64, heads)
    inputs = query, key, value
    mixed, weights = attention.attend(None, *inputs, mask, scaling=0.3, dropout=0.0)
    shared = (each.repeat_interleave(H // heads, 1) for each in (key, value))
    expected = plain(query, *shared, mask, 0.3).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(mixed)
    ours, theirs = (torch.autograd.grad(each, inputs, grad) for each in (mixed, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("tiles")
def test_in_bf16_it_is_no_farther_from_the_truth_than_plain_attention():
    lower = example(torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in lower[:3]]
    truth = plain(*exact, lower[3].double(), D**-0.5)
    grad = torch.randn(truth.shape).bfloat16()

    def errors(mixed):
        grads = torch.autograd.grad(mixed, lower[:3], grad)
        pairs = zip((mixed, *grads), (truth.detach(), *true_grads), strict=True)
        return [float((ours.double() - true).detach().norm() / true.norm()) for ours, true in pairs]

    true_grads = torch.autograd.grad(truth, exact, grad.double(), retain_graph=True)
    ours = errors(attention.attend(None, *lower)[0].transpose(1, 2))
    eager = errors(plain(*lower[:3], lower[3].bfloat16(), D**-0.5))
    assert all(one <= 1.2 * other for one, other in zip(ours, eager, strict=True))


@pytest.mark.usefixtures("tiles")
def test_autocast_decides_the_dtype_and_does_not_reach_the_backward_pass():
    inputs = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = attention.attend(None, *inputs)
        assert mixed.dtype == torch.bfloat16
        grads = torch.autograd.grad(mixed, inputs[:3], torch.ones_like(mixed), retain_graph=True)
    outside = torch.autograd.grad(mixed, inputs[:3], torch.ones_like(mixed))
    assert all(torch.equal(*pair) for pair in zip(grads, outside, strict=True))
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match="softcap, which is not supported here"):
        attention.attend(None, *example(torch.float64), softcap=50.0, s_aux=None)


def test_without_a_mask_all_is_attended_to():
    query, key, value, _ = example(torch.float64)
    mixed, _ = attention.attend(None, query, key, value, None)
    torch.testing.assert_close(mixed.transpose(1, 2), plain(query, key, value, 0.0, D**-0.5))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32),
        LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16,
            intermediate_size=32, vocab_size=40,
        ),
    ],
    ids=["gpt2", "llama"],
)  # fmt: skip
def test_models_know_it_by_name(config):
    name = choose_attention(torch.device("cpu"), torch.bfloat16)
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    ids = torch.randint(0, 40, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    logits, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, eager))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for ours_p, eager_p in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours_p.grad, eager_p.grad, rtol=1e-3, atol=1e-4)
