"""Completions over prompts of one length attend without a mask, to the same end."""

import pytest
import torch
from conftest import ARCHITECTURES
from test_gradient_checkpointing import SIZES, made_up
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
)
from transformers.masking_utils import sdpa_mask

from grpo.model import lower_right
from grpo.model.load import Policy
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


WINDOWS = {
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5),
    "gemma3": Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=5),
}
WINDOWS["gemma3"].layer_types = ["sliding_attention", "full_attention", "sliding_attention"]


def with_window(kind: str, **changes) -> Policy:
    torch.manual_seed(0)
    WINDOWS[kind].update(changes)
    model = AutoModelForCausalLM.from_config(WINDOWS[kind], dtype=torch.float64)
    return Policy(model.eval(), None, None)


@pytest.mark.parametrize("kind", WINDOWS)
def test_layers_with_a_window_see_no_more_than_it(masks, kind):
    """Prompts of one length, as a single group's always are, and completions that cross the window."""
    policy, batch = with_window(kind), made_up(EQUAL, 9)
    expected = learned(policy, batch, "sdpa", torch.float64)
    found = learned(policy, batch, lower_right.NAME, torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # norms are in fp32
    policy.model.config.sliding_window = None if kind == "mistral" else 1000
    beyond, _ = learned(policy, batch, "sdpa", torch.float64)
    assert (beyond - expected[0]).abs().max() > 0.01
    assert [mask is None for mask in masks] == [False, kind == "gemma3", False]  # the second layer sees all


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_is_seen_with_a_mask_too(kind):
    model = with_window(kind, sliding_window=8).model
    model.set_attn_implementation("sdpa")
    check_scorer(model, 64)


@pytest.mark.parametrize("length", [300, 1000])
def test_the_check_of_the_scorer_crosses_the_window_however_long_it_is(monkeypatch, length):
    """And is not misled by a pass of the model's own that makes no mask either."""
    model = with_window("mistral", sliding_window=length, max_position_embeddings=2000).model
    lower_right.register()
    model.set_attn_implementation(lower_right.NAME)
    check_scorer(model, 2000)
    assert model.config.sliding_window == length

    def blind(*args, attention_mask=None, **options):
        return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **options)

    monkeypatch.setattr(lower_right, "_mask", blind)
    lower_right.register()
    try:
        with pytest.raises(ValueError, match="log-probs come out"):
            check_scorer(model, 2000)
    finally:
        monkeypatch.undo()
        lower_right.register()


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
