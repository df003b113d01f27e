"""Models that scale logits, or cap them or scores: what is sampled, scored and learned is their own."""

from types import SimpleNamespace

import pytest
import torch
from families import OTHERS, another

from grpo.model.head import LogitRule, centred_head
from grpo.model.weights import RolloutModel
from grpo.scoring.head import chunked_lm_head


@pytest.mark.parametrize("name", OTHERS)
def test_a_copy_in_bf16_is_the_same_model(name):
    model = another(name)
    copied = RolloutModel(model, torch.bfloat16)
    assert copied.model is not model and copied.check() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cap_by_hand(dtype):
    """Products 0 and 3 are logits 0 and 2 tanh(3 / 2) under a cap of 2, and its slope is 1 - tanh²(3 / 2)."""
    rule, capped = LogitRule(cap=2.0), 2 * torch.tensor(1.5, dtype=torch.float64).tanh().item()
    hidden, weight = torch.ones(1, 1, dtype=dtype), torch.tensor([[0.0], [3.0]], dtype=dtype)
    found = chunked_lm_head(
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
        ({}, (1.0, None)),
        ({"logits_scaling": 8.0}, (0.125, None)),
        ({"logit_scale": 0.25}, (0.25, None)),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, (8.0, None)),
        ({"lm_head_multiplier": 0.5, "final_logit_softcapping": 30.0}, (0.5, 30.0)),
    ],
)
def test_rules_are_read_by_the_names_that_transformers_has(changes, rule):
    config = SimpleNamespace(**{"model_type": "any", **changes})
    config.get_text_config = lambda decoder: config
    assert LogitRule.of(config) == rule
