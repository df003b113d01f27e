"""Completions over prompts of one length attend without a mask, to the same end."""

import pytest
import torch
from conftest import ARCHITECTURES
from test_gradient_checkpointing import made_up

from grpo.model import lower_right
from grpo.model.target import choose_attention
from grpo.scoring.micro_batches import MicroBatch, micro_batch_logprobs
from grpo.scoring.model_checks import check_scorer

EQUAL, UNEQUAL = [(7, 3), (7, 1), (7, 2)], [(7, 3), (6, 1), (7, 2)]


def learned(
    policy, batch: MicroBatch, attention: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of some sum of them by all parameters."""
    policy.model.set_attn_implementation(attention)
    policy.model.zero_grad()
    logp, _ = micro_batch_logprobs(policy.model, batch, temperature=1.0, dtype=dtype)
    (logp * torch.arange(1, 1 + logp.numel()).view_as(logp)).sum().backward()
    return logp, torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])


@pytest.fixture
def masks(monkeypatch) -> list[torch.Tensor | None]:
    """Those that attention is given, one after the other."""
    lower_right.register()
    seen = []
    attend = lower_right.attend

    def note(module, query, key, value, attention_mask, **options):
        if query.shape[2] < key.shape[2]:
            seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(lower_right, "attend", note)
    lower_right.register()
    yield seen
    monkeypatch.undo()
    lower_right.register()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("groups", [EQUAL, UNEQUAL])
def test_log_probs_and_gradients_are_the_same(load, masks, architecture, groups):
    policy, batch = load(architecture, "fp64"), made_up(groups, 9)
    expected = learned(policy, batch, "sdpa", torch.float64)
    assert masks == []
    found = learned(policy, batch, lower_right.NAME, torch.float64)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert len(masks) == 2 and all((mask is None) == (groups == EQUAL) for mask in masks)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_are_in_bf16_where_others_are(load, masks, architecture):
    policy, batch = load(architecture), made_up(EQUAL, 9)
    expected, _ = learned(policy, batch, "sdpa", torch.bfloat16)
    found, _ = learned(policy, batch, lower_right.NAME, torch.bfloat16)
    assert masks == [None, None] and (found - expected).abs().max() < 0.05
    check_scorer(policy.model, 24)
    assert {mask is None for mask in masks[2:]} == {True, False}  # both are tried


def test_it_is_what_cuda_takes(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    assert choose_attention(torch.device("cuda"), torch.bfloat16) == lower_right.NAME
    assert choose_attention(torch.device("cpu"), torch.float32) == "sdpa"
