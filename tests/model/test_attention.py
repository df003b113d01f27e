"""Attention in training: values and gradients are plain attention's, by whichever way a device takes."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from conftest import learned_logprobs
from test_checkpointing import made, made_up
from transformers.masking_utils import sdpa_mask
from whole_runs import train

from grpo.memory.live import LiveBytes
from grpo.model import attention
from grpo.model.target import choose_attention
from grpo.scoring.model_checks import check_scorer

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def learned(model, batch, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """Log-probs, and the gradients of some sum of them by all parameters."""
    ids = batch.completion_ids
    weights = torch.arange(1.0, 1 + ids.numel()).view_as(ids)
    logp = learned_logprobs(model, batch, weights, temperature=1.0, dtype=dtype)
    return [logp, *(parameter.grad for parameter in model.parameters())]


R, H, Q, K, D = 5, 6, 7, 11, 8


def plain(query, key, value, mask, scale=D**-0.5):
    return (query @ key.mT * scale + mask).softmax(-1) @ value


def example(dtype, heads=H):
    torch.manual_seed(0)
    query = torch.randn(R, Q, H, D).transpose(1, 2).to(dtype).requires_grad_()
    key, value = (torch.randn(R, heads, K, D).to(dtype).requires_grad_() for _ in range(2))
    seen = torch.ones(R, 1, Q, K).tril(K - Q).bool()
    seen[1, 0, :, :3] = False  # a row with a shorter prompt
    return query, key, value, seen


@pytest.mark.usefixtures("made_up_plans")
def test_a_step_is_trained_in_bf16_on_any_processor(config):
    """The first command, as where that is chosen: checks of the model, an evaluation, a step."""
    config, trainers = dataclasses.replace(config, precision="bf16", steps=1, eval_interval=1), []
    folder = train(config, trainers.append)
    assert trainers[0].run.policy.target.dtype == BF16 and (folder / "checkpoints/step-000001").exists()


class Layer(torch.nn.Module):
    """What transformers asks of an attention layer."""

    is_causal, training = True, False

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_key_value_groups = H // heads


@pytest.mark.parametrize("heads", [H, 2])
def test_on_a_cpu_bf16_is_attended_to_in_fp32_and_kept_in_bf16(heads):
    """Values and gradients are no farther from the truth than those of attention in bf16 throughout."""
    *lower, seen = example(BF16, heads)
    exact = [each.detach().double().requires_grad_() for each in lower]
    unseen = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    grad = torch.randn(R, H, Q, D).bfloat16()

    def with_gradients(attend, inputs):
        mixed = attend(*inputs)
        return mixed, *torch.autograd.grad(mixed, inputs, grad.to(mixed.dtype))

    def shared(query, key, value):
        repeated = (each.repeat_interleave(H // heads, 1) for each in (key, value))
        return plain(query, *repeated, unseen.to(query.dtype))

    def ours(query, key, value):
        with LiveBytes() as live:
            mixed = attention.attend_in_fp32(Layer(heads), query, key, value, seen)[0].transpose(1, 2)
            kept.append(live.live_bytes)
        return mixed

    kept: list[int] = []
    found, truth = with_gradients(ours, lower), with_gradients(shared, exact)
    for one, other, true in zip(found, with_gradients(shared, lower), truth, strict=True):
        assert one.dtype == BF16
        assert (one.double() - true).norm() <= 1.2 * (other.double() - true).norm()
    sums = 4 * R * H * Q  # of exponentials, in fp32
    assert kept[0] <= 2 * (3 * R * H * Q * D + 2 * R * H * K * D) + sums + seen.numel() * 4


def test_autocast_decides_the_dtype_and_what_is_exact_stays_so():
    *inputs, seen = example(F32)
    with torch.autocast("cpu", BF16):
        mixed, _ = attention.attend_in_fp32(Layer(H), *inputs, seen)
        assert mixed.dtype == BF16
    assert all(grad.dtype == F32 for grad in torch.autograd.grad(mixed.sum(), inputs))
    exact, _ = attention.attend_in_fp32(Layer(H), *inputs, seen)  # as in checks of a model
    unseen = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(exact.transpose(1, 2), plain(*inputs, unseen))


EQUAL, UNEQUAL = [(7, 3), (7, 1), (7, 2)], [(7, 3), (6, 1), (7, 2)]


def by(model, batch, kind: str, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """`learned` with this attention."""
    model.set_attn_implementation(kind)
    model.zero_grad()
    return [each.clone() for each in learned(model, batch, dtype)]


@pytest.fixture
def registered(monkeypatch) -> Callable[[str, Callable], None]:
    """What puts a function in another's place, known to transformers too, until the test is over."""

    def put(name: str, function: Callable) -> None:
        monkeypatch.setattr(attention, name, function)
        attention.register()

    yield put
    monkeypatch.undo()
    attention.register()


@pytest.fixture
def masks(registered) -> list[torch.Tensor | None]:
    """Those that attention is given, one after the other."""
    seen, attend = [], attention.attend_from_lower_right

    def note(module, query, key, value, attention_mask, **options):
        if query.shape[2] < key.shape[2]:
            seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **options)

    registered("attend_from_lower_right", note)
    return seen


@pytest.mark.parametrize(
    ("architecture", "groups"), [("gpt2", EQUAL), ("llama", EQUAL), ("qwen", EQUAL), ("llama", UNEQUAL)]
)
def test_without_a_mask_log_probs_and_gradients_are_the_same(load, masks, architecture, groups):
    model, batch = load(architecture, "fp64").model, made_up(groups, 9)
    expected = by(model, batch, "sdpa")
    assert masks == []
    torch.testing.assert_close(by(model, batch, attention.LOWER_RIGHT), expected, rtol=1e-12, atol=1e-12)
    model = load(architecture).model  # whose products are in bf16, where all others are
    expected, found = (by(model, batch, name, BF16)[0] for name in ("sdpa", attention.LOWER_RIGHT))
    assert (found - expected).abs().max() < 0.05
    assert len(masks) == 4 and all((mask is None) == (groups == EQUAL) for mask in masks)
    check_scorer(model, 24)
    assert {mask is None for mask in masks[4:]} == {True, False}  # both are tried


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"mistral": {}, "gemma3_text": {"head_dim": 8, "layer_types": KINDS}}


def with_window(kind: str, length: int = 5, **changes):
    options = {"num_key_value_heads": 2, "sliding_window": length, **changes}
    return made(kind, **WINDOWS[kind], **options).double()


@pytest.mark.parametrize("kind", WINDOWS)
def test_layers_with_a_window_see_no_more_than_it(masks, kind):
    """Prompts of one length, as a single group's always are, and completions that cross the window."""
    model, batch = with_window(kind), made_up(EQUAL, 9)
    expected, found = (by(model, batch, name) for name in ("sdpa", attention.LOWER_RIGHT))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # norms are in fp32
    model.config.sliding_window = None if kind == "mistral" else 1000
    beyond, *_ = by(model, batch, "sdpa")
    assert (beyond - expected[0]).abs().max() > 0.01
    assert [mask is None for mask in masks] == [False, kind == "gemma3_text", False]  # its second sees all
    model = with_window(kind, 8)
    model.set_attn_implementation("sdpa")
    check_scorer(model, 64)  # with a mask too


def test_the_check_of_the_scorer_crosses_the_window_however_long_it_is(registered):
    """And is not misled by a pass of the model's own that makes no mask either."""
    model = with_window("mistral", 1000, max_position_embeddings=2000)
    attention.register()
    model.set_attn_implementation(attention.LOWER_RIGHT)
    check_scorer(model, 2000)
    assert model.config.sliding_window == 1000

    def blind(*args, attention_mask=None, **options):
        return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **options)

    registered("_mask", blind)
    with pytest.raises(ValueError, match="log-probs come out"):
        check_scorer(model, 2000)


def test_it_is_what_cuda_takes(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    assert choose_attention(torch.device("cuda"), BF16) == attention.LOWER_RIGHT
    assert choose_attention(torch.device("cpu"), F32) == "sdpa"
    assert choose_attention(torch.device("cpu"), BF16) == attention.IN_FP32
