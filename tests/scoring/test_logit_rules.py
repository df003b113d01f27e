"""Models that scale logits, or cap them or scores: what is sampled, scored and learned is their own."""

from types import SimpleNamespace

import pytest
import torch
from conftest import CONTEXT
from families import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.config.groups import SamplingSettings
from grpo.model.head import LogitRule, centred_head
from grpo.model.load import Policy
from grpo.model.weights import RolloutModel
from grpo.rollout.decoder import check_decoder, has_static_cache
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.head import head_pass
from grpo.scoring.logprobs import score, token_logprobs
from grpo.scoring.model_checks import check_scorer
from grpo.scoring.packing import streams

MORE = {
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5}, "cohere2": {"logit_scale": 0.5, "sliding_window": 12},
    "nanochat": {"final_logit_softcapping": 3.0},
    "gemma2": {
        "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {"head_dim": 8, "sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip


BY_THEMSELVES = "gemma2", "gpt_oss"
"""Kinds whose scores are capped, or have sinks: they attend by themselves, over a growing cache."""


def model_of(name: str, vocabulary: int = 60):
    """With random weights, in fp32."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT}
    config = AutoConfig.for_model(name, **sizes, **MORE[name])
    attention = "eager" if name in BY_THEMSELVES else "sdpa"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


@pytest.mark.parametrize("name", MORE)
def test_log_probs_and_gradients_are_those_of_a_plain_forward_pass(name, tokenizer, prompts):
    """And so are entropies, of any split."""
    policy = Policy(model_of(name, len(tokenizer)), tokenizer, None)
    check_decoder(policy.model)
    check_scorer(policy.model, 64)
    assert has_static_cache(policy.model.config) == (name not in BY_THEMSELVES)
    settings = SamplingSettings(max_new_tokens=10, temperature=0.7)
    uniforms = step_uniforms(2 * len(prompts), 10, seed=0, step=1)
    sampled = rollout(policy.model, tokenizer, prompts, uniforms, settings, rows=3)
    tolerance = {"atol": 2e-5, "rtol": 0}
    exact, entropies = [], []
    for row, ids in enumerate(sampled.by_row(sampled.ids)):
        text = torch.tensor([sampled.context_ids[row // 2] + ids.tolist()])
        logits = policy.model(input_ids=text, use_cache=False).logits[0, -len(ids) - 1 : -1] / 0.7
        chances = torch.distributions.Categorical(logits=logits)
        exact.append(chances.log_prob(ids))
        entropies.append(chances.entropy())
    assert torch.allclose(sampled.sampler_logp, torch.cat(exact).detach(), **tolerance)
    scored = score(policy.model, sampled, rows=3, temperature=0.7, dtype=torch.float32)
    assert torch.allclose(scored, torch.cat(exact).detach(), **tolerance)
    weights = torch.randn(len(sampled.ids))
    (torch.cat(exact) * weights).sum().backward()
    expected = [p.grad for p in policy.model.parameters()]
    policy.model.zero_grad()
    for stream in streams(sampled, 3):
        own = weights[stream.tokens]
        _, found = token_logprobs(
            policy.model, stream, temperature=0.7, dtype=torch.float32, entropy=True,
            slope=lambda _, part, own=own: own[part],
        )  # fmt: skip
        assert torch.allclose(found, torch.cat(entropies)[stream.tokens].detach(), **tolerance)
    norm = sum((g**2).sum() for g in expected).sqrt()
    apart = sum(((p.grad - g) ** 2).sum() for p, g in zip(policy.model.parameters(), expected, strict=True))
    assert apart.sqrt() < 1e-5 * norm


@pytest.mark.parametrize("name", MORE)
def test_a_copy_in_bf16_is_the_same_model(name):
    model = model_of(name)
    copied = RolloutModel(model, torch.bfloat16)
    assert copied.model is not model and copied.check() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cap_by_hand(dtype):
    """Products 0 and 3 are logits 0 and 2 tanh(3 / 2) under a cap of 2, and its slope is 1 - tanh²(3 / 2)."""
    rule, capped = LogitRule(cap=2.0), 2 * torch.tensor(1.5, dtype=torch.float64).tanh().item()
    hidden, weight = torch.ones(1, 1, dtype=dtype), torch.tensor([[0.0], [3.0]], dtype=dtype)
    found = head_pass(
        hidden, weight, torch.tensor([1]), rule=rule, slope=lambda logp, _: torch.ones_like(logp)
    )
    other = 1 / (1 + torch.tensor(capped).exp())  # the probability of token 0
    close = {"rel": 1e-7 if dtype == torch.float64 else 0.03}
    assert found.logp.item() == pytest.approx((1 - other).log().item(), **close)
    assert found.hidden_gradient.item() == pytest.approx(
        3 * (other * (1 - (capped / 2) ** 2)).item(), **close
    )
    # The mean of a head counts under a cap, and nowhere else.
    assert torch.equal(centred_head(weight, torch.bfloat16, rule), weight.to(torch.bfloat16))
    assert centred_head(weight, torch.bfloat16, LogitRule(scale=2.0)).flatten().tolist() == [-1.5, 1.5]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, (1.0, None)), ({"logits_scaling": 8.0}, (0.125, None)), ({"logit_scale": 0.25}, (0.25, None)),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, (8.0, None)),
        ({"lm_head_multiplier": 0.5, "final_logit_softcapping": 30.0}, (0.5, 30.0)),
    ],
)  # fmt: skip
def test_rules_are_read_by_the_names_that_transformers_has(changes, rule):
    config = SimpleNamespace(**{"model_type": "any", **changes})
    config.get_text_config = lambda decoder: config
    assert LogitRule.of(config) == rule
