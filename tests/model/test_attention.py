"""Attention in training: values and gradients are plain attention's, by whichever way a device takes."""

import dataclasses
import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import examples, learned_logprobs, let_norms_be_exact
from hypothesis import given
from hypothesis import strategies as st
from test_checkpointing import made, made_up
from whole_runs import train

from grpo.memory.live import LiveBytes
from grpo.model import attention, stream_attention
from grpo.model import varlen as kernels
from grpo.model.target import choose_attention
from grpo.model.ways import reading_of
from grpo.scoring import logprobs, stream
from grpo.scoring.model_checks import check_scorer
from grpo.scoring.stream import make_stream

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def learned(model, batch, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """Log-probs, and the gradients of some sum of them by all parameters."""
    shape = batch.num_rows, batch.layout.longest_row
    weights = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
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
    """The interface that transformers asks of an attention layer."""

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


def side_by_side(model, batch, monkeypatch, dtype=F64) -> list[torch.Tensor]:
    """`learned`, each row padded behind a prompt of its own, as transformers runs it."""
    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "reading_of", lambda model: "padded rows")
        return [each.clone() for each in learned(model, batch, dtype)]


def over_stream(model, batch, dtype=F64) -> list[torch.Tensor]:
    model.zero_grad()
    assert reading_of(model) == "streams"
    return [each.clone() for each in learned(model, batch, dtype)]


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen"])
def test_over_a_stream_log_probs_and_gradients_are_those_of_padded_rows(load, monkeypatch, architecture):
    """To 1e-12, however texts are cut into rectangles."""
    model = load(architecture, "fp64").model

    @examples(8)
    @given(GROUPS, st.integers(1, 12), st.integers(0, 99), st.sampled_from([0, 2**14]))
    def holds(groups, width, seed, worth):
        with monkeypatch.context() as patch:
            patch.setattr(stream, "RECTANGLE_SCORES", worth)
            batch = made_up(groups, width, seed)
        expected = side_by_side(model, batch, monkeypatch)
        torch.testing.assert_close(over_stream(model, batch), expected, rtol=1e-11, atol=1e-12)

    holds()


def test_in_bf16_it_is_as_close_to_the_truth_as_padded_rows(load, monkeypatch):
    batch = made_up([(7, 3), (6, 1), (9, 2)], 9)
    truth = side_by_side(load("llama", "fp64").model, batch, monkeypatch)
    model = load("llama", "bf16").model
    padded, found = side_by_side(model, batch, monkeypatch, BF16), over_stream(model, batch, BF16)
    for one, other, true in zip(found, padded, truth, strict=True):
        assert (one - true).norm() <= 1.3 * (other - true).norm() + 1e-3 * true.norm()


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {
    "mistral": {},
    "gemma3_text": {"head_dim": 8, "layer_types": KINDS},
    "qwen2": {"use_sliding_window": True, "layer_types": KINDS},
}


def with_window(kind: str, length: int = 5, **changes):
    options = {"num_key_value_heads": 2, "sliding_window": length, **changes}
    model = made(kind, **WINDOWS[kind], **options).double()
    let_norms_be_exact(model)
    return model


@pytest.mark.parametrize("kind", WINDOWS)
def test_layers_with_a_window_see_no_more_than_it(monkeypatch, kind):
    """Within prompts, and in completions that see part of theirs, or none."""
    model, batch = with_window(kind), made_up([(7, 3), (6, 1), (12, 2)], 9)
    expected = side_by_side(model, batch, monkeypatch)
    torch.testing.assert_close(over_stream(model, batch), expected, rtol=1e-9, atol=1e-9)
    model.config.sliding_window = None if kind == "mistral" else 1000
    beyond, *_ = over_stream(model, batch)
    assert (beyond - expected[0]).abs().max() > 0.01
    check_scorer(with_window(kind, 8), 64)


def test_a_window_of_thousands_is_crossed_by_the_check_of_the_scorer(monkeypatch, logged):
    """If layers over a stream did not mind it, rows would go side by side, and a line would say so."""
    model = with_window("mistral", 1000, max_position_embeddings=2000)
    check_scorer(model, 2000)
    assert model.config.sliding_window == 1000 and reading_of(model) == "streams"
    mask = stream_attention.Rectangle.mask
    monkeypatch.setattr(
        stream_attention.Rectangle, "mask", lambda self, window, dtype: mask(self, None, dtype)
    )
    check_scorer(model, 2000)
    assert reading_of(model) == "padded rows"
    (said,) = [line for line in logged if "padded rows, which is slower" in line]
    assert "slower than over streams: its log-probs come out" in said


def test_layers_that_tell_attention_nothing_go_side_by_side(monkeypatch, logged):
    model = made("gpt2")
    for layer in model.transformer.h:
        attend = layer.attn.forward
        layer.attn.forward = lambda *args, attend=attend, stream=None, **options: attend(*args, **options)
    check_scorer(model, 64)
    assert reading_of(model) == "padded rows"
    assert any("its layers do not tell attention" in line for line in logged)
    learned(model, made_up([(7, 3)], 9), F32)


def test_for_the_backward_pass_attention_keeps_what_it_was_given_once():
    """Not the copies of rows, in which a prompt of 64 tokens would be there for each of 8 rows."""
    query, key, value = (torch.randn(1, H, 64 + 8 * 4, D).requires_grad_() for _ in range(3))
    batch = make_stream([[1] * 64], [0] * 8, [[1] * 5] * 8)
    with LiveBytes() as live:
        mixed, _ = attention.attend_over_stream(Layer(H), query, key, value, None, stream=batch.attention)
        kept = live.live_bytes
    tokens = 64 + 8 * 4
    masks, order = 4 * 8 * 4 * (64 + 4), 8 * tokens
    # What attention gave, as rectangles and in order, the sums of its exponentials, and the inputs in order.
    assert kept <= 5 * 4 * H * tokens * D + 4 * H * tokens + masks + order + 8 * 4 * 8 * (64 + 4)
    with torch.no_grad():
        again, _ = attention.attend_over_stream(Layer(H), query, key, value, None, stream=batch.attention)
    assert torch.equal(mixed, again)


def varlen(
    query, key, value, query_ends, key_ends, longest_query, longest_keys, *, scale, window_size, enable_gqa
):
    """As torch's kernel describes itself: sequence by sequence, causal from the lower right."""
    assert query_ends.dtype == key_ends.dtype == torch.int32 and enable_gqa == (
        query.shape[1] != key.shape[1]
    )
    mixed = []
    for start, end, first, last in zip(
        query_ends[:-1].tolist(),
        query_ends[1:].tolist(),
        key_ends[:-1].tolist(),
        key_ends[1:].tolist(),
        strict=True,
    ):
        assert 0 < end - start <= longest_query and end - start <= last - first <= longest_keys
        sharing = query.shape[1] // key.shape[1]
        one = query[start:end].transpose(0, 1)
        others = (each[first:last].repeat_interleave(sharing, 1).transpose(0, 1) for each in (key, value))
        place = torch.arange(end - start).unsqueeze(1) + (last - first) - (end - start)
        distance = place - torch.arange(last - first)
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        unseen = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        scale = one.shape[-1] ** -0.5 if scale is None else scale
        mixed.append(plain(one.float(), *(each.float() for each in others), unseen, scale).to(one.dtype))
    return torch.cat([each.transpose(0, 1) for each in mixed])


@pytest.fixture
def kernel(monkeypatch) -> mock.Mock:
    """In the place of torch's kernel, as if this were a device that has it."""
    there = mock.Mock(side_effect=varlen)
    monkeypatch.setattr(kernels, "KERNEL_ON", ("cpu",))
    monkeypatch.setattr(kernels, "_works", {})
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=there))
    return there


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "mistral"])
def test_a_kernel_for_sequences_gives_what_rectangles_do(monkeypatch, kernel, logged, kind):
    model = with_window(kind, 5) if kind in WINDOWS else made(kind)
    model, batch = model.float(), made_up([(7, 3), (6, 1), (12, 2)], 9)
    with torch.autocast("cpu", BF16):
        found = learned(model, batch, BF16)
    assert all(kernels._works.values()) and kernel.call_count > 3 and not logged
    used = kernel.call_count
    monkeypatch.setattr(kernels, "KERNEL_ON", ())
    model.zero_grad()
    with torch.autocast("cpu", BF16):
        expected = learned(model, batch, BF16)
    assert kernel.call_count == used
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda *qkv, **_: 1.1 * qkv[0] + 0 * (qkv[1].sum() + qkv[2].sum()), "it gives something else (by"),
        (RuntimeError("no kernel image"), "no kernel image"),
    ],
)
def test_a_kernel_that_is_wrong_or_missing_is_not_used_which_a_line_says_once(kernel, logged, wrong, told):
    kernel.side_effect = wrong
    model, batch = made("gpt2"), made_up([(7, 3)], 9)
    for _ in range(2):
        with torch.autocast("cpu", BF16):
            learned(model, batch, BF16)
    assert list(kernels._works.values()) == [False] and kernel.call_count == 1
    (line,) = logged
    assert "padded rectangles, slower: varlen_attn: " in line and told in line


def test_what_an_attention_cannot_do_is_refused():
    query = torch.zeros(1, 1, 3, D)
    batch = make_stream([[1, 2]], [0], [[1, 2]])
    with pytest.raises(ValueError, match="position_bias, which is not supported"):
        attention.attend_over_stream(
            Layer(1), query, query, query, None, stream=batch.attention, position_bias=query
        )


@pytest.mark.parametrize("dtype", [F64, BF16])
def test_scores_are_capped_and_sinks_take_their_share(dtype):
    """One head by hand: scores 0 and ln 3 are 0 and 2 tanh(ln 3 / 2) = 1 under a cap of 2; a sink has ln 2.

    The second token gives e / (1 + e + 2) to its own value, which is 1, and the rest to 0.
    """
    query = torch.tensor([[0.0], [1.0]], dtype=dtype).view(1, 1, 2, 1)
    key = torch.tensor([[0.0], [math.log(3)]], dtype=dtype).view(1, 1, 2, 1)
    value = torch.tensor([[0.0], [1.0]], dtype=dtype).view(1, 1, 2, 1)
    stream = make_stream([[1, 2]], [0], [[3]]).attention
    sinks = torch.tensor([2.0], dtype=dtype).log().requires_grad_()
    mixed, _ = attention.attend_over_stream(
        Layer(1),
        query,
        key,
        value,
        None,
        stream=stream.for_pass(None, recomputed=False),
        scaling=1.0,
        softcap=2.0,
        s_aux=sinks,
    )
    share = math.e / (1 + math.e + 2)
    close = {"rel": 1e-12 if dtype == F64 else 0.01}
    assert mixed.dtype == dtype and mixed.flatten().tolist() == pytest.approx([0.0, share], **close)
    (slope,) = torch.autograd.grad(mixed[0, 1].sum(), sinks)
    assert slope.item() == pytest.approx(-share * 2 / (1 + math.e + 2), **close)


def test_a_device_chooses_its_attention(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    assert choose_attention(torch.device("cuda"), BF16) == "sdpa"
    assert choose_attention(torch.device("cpu"), F32) == "sdpa"
    assert choose_attention(torch.device("cpu"), BF16) == attention.IN_FP32
