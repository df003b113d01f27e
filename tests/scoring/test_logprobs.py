import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import places
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.memory.live import LiveBytes
from grpo.scoring.logprobs import completion_logprobs

R, C, D, V = 3, 5, 4, 11


def example(dtype=torch.float64, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(R, C, D, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(V, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(V, (R, C), generator=generator)
    mask = torch.arange(C) < torch.tensor([[5], [0], [2]])
    return hidden, weight, offset if bias else None, targets, mask


def plain(hidden, weight, bias, targets, temperature=1.0):
    logp = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def grads(logp, coefficients, *leaves):
    return torch.autograd.grad((logp * coefficients).sum(), leaves)


def test_one_token_by_hand():
    # logits 0 and ln 3 have probabilities 1/4 and 3/4; at temperature 2, 1 and sqrt 3 over their sum
    hidden = torch.ones(1, 1, 1, dtype=torch.float64)
    weight = torch.tensor([[1.0], [3.0]], dtype=torch.float64).log()
    target = torch.ones(1, 1, dtype=torch.long)
    logp, entropy = completion_logprobs(hidden, weight, target, entropy=True)
    assert logp.exp().item() == pytest.approx(0.75)
    assert entropy.item() == pytest.approx(2 * 0.6931471805599453 - 0.75 * 1.0986122886681098)
    warm, _ = completion_logprobs(hidden, weight, target, temperature=2.0)
    assert warm.exp().item() == pytest.approx(3**0.5 / (1 + 3**0.5))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    chunk=st.integers(1, R * C + 2),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    bias=st.booleans(),
    masked=st.booleans(),
    numbers=st.sampled_from([1, 2 * V, 2**19]),
)
def test_equals_plain_log_softmax_with_gradients_for_any_chunk(
    seed, chunk, temperature, bias, masked, numbers
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.model.cpu.slices.slice_numbers", lambda device: numbers)
        check_against_log_softmax(seed, chunk, temperature, bias, masked)


def check_against_log_softmax(seed, chunk, temperature, bias, masked):
    hidden, weight, offset, targets, mask = example(seed=seed, bias=bias)
    mask = mask if masked else None
    expected, expected_entropy = plain(hidden, weight, offset, targets, temperature)
    if masked:
        expected, expected_entropy = expected * mask, expected_entropy * mask
    logp, entropy = completion_logprobs(
        hidden,
        weight,
        targets,
        places(mask),
        bias=offset,
        temperature=temperature,
        chunk_tokens=chunk,
        entropy=True,
    )
    torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    coefficients = torch.randn(R, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for ours, theirs in zip(
        grads(logp, coefficients, *leaves), grads(expected, coefficients, *leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def loss(logp):
        return (coefficients * (logp + logp.square())).sum()

    known, known_entropy = completion_logprobs(
        hidden, weight, targets, places(mask), bias=offset, temperature=temperature, chunk_tokens=chunk,
        entropy=True, loss=loss,
    )  # fmt: skip
    assert torch.equal(known, logp) and torch.equal(known_entropy, entropy)
    expected = plain(hidden, weight, offset, targets, temperature)[0] * (1 if mask is None else mask)
    for ours, theirs in zip(
        torch.autograd.grad(loss(known), leaves), torch.autograd.grad(loss(expected), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked):
    hidden, weight, bias, targets, mask = example()

    def logp(hidden, weight, bias):
        return completion_logprobs(
            hidden,
            weight,
            targets,
            places(mask) if masked else None,
            bias=bias,
            temperature=0.7,
            chunk_tokens=4,
        )[0]

    assert torch.autograd.gradcheck(logp, (hidden, weight, bias))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("loss", [None, Tensor.sum])
def test_gradients_only_where_asked(wanted, loss):
    hidden, weight, bias, targets, _ = example()
    leaves = [x.detach().requires_grad_(on) for x, on in zip((hidden, weight, bias), wanted, strict=True)]
    logp, _ = completion_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], chunk_tokens=4, loss=loss)
    logp.sum().backward()
    assert tuple(x.grad is not None for x in leaves) == wanted


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_that_is_known_beforehand_changes_no_bit(autocast, temperature):
    hidden, weight, bias, targets, mask = example(torch.float32)

    def loss(logp):
        return (logp.exp() - logp.square()).sum()

    def gradients(known):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logp, _ = completion_logprobs(
                hidden, weight, targets, places(mask), bias=bias, temperature=temperature, chunk_tokens=4,
                entropy=True, loss=known,
            )  # fmt: skip
        return torch.autograd.grad(loss(logp), (hidden, weight, bias))

    for known, unknown in zip(gradients(loss), gradients(None), strict=True):
        assert torch.equal(known, unknown) and known.norm() > 0.1


def test_masked_tokens_are_never_read():
    hidden, weight, bias, targets, mask = example()
    clean, _ = completion_logprobs(hidden, weight, targets, places(mask), bias=bias, chunk_tokens=3)
    spoiled = torch.where(mask.unsqueeze(-1), hidden, torch.nan).detach().requires_grad_()
    logp, entropy = completion_logprobs(
        spoiled,
        weight,
        torch.where(mask, targets, -100),
        places(mask),
        bias=bias,
        chunk_tokens=3,
        entropy=True,
    )
    assert torch.equal(logp, clean)
    assert (logp[~mask] == 0).all() and (entropy[~mask] == 0).all()
    logp.sum().backward()
    assert (spoiled.grad[~mask] == 0).all()
    assert spoiled.grad[mask].isfinite().all() and weight.grad.isfinite().all()


class _Meter(TorchDispatchMode):
    """Bytes of the largest tensor, most bytes of logits (…, 50) at once, and how many rows got logits."""

    def __init__(self):
        super().__init__()
        self.largest, self.rows, self.chunk_bytes = 0, 0, 0
        self.chunks = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
                if tensor.ndim == 2 and tensor.shape[1] == 50 and len(tensor) > 3:  # not weights (3, 50)
                    self.chunks.add(tensor.untyped_storage())
        self.chunk_bytes = max(self.chunk_bytes, sum(chunk.nbytes() for chunk in self.chunks))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and out.shape[-1] == 50:
            self.rows += out.shape[0]
        return out


@pytest.mark.parametrize("loss", [None, Tensor.sum])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_logits_of_all_tokens_never_exist_and_masked_tokens_cost_nothing(autocast, loss, monkeypatch):
    monkeypatch.setattr("grpo.model.cpu.slices.slice_numbers", lambda device: 5 * 50)
    hidden = torch.randn(8, 16, 3, requires_grad=True)
    weight = torch.randn(50, 3, requires_grad=True)
    targets = torch.ones(8, 16).long()
    mask = torch.arange(16).expand(8, 16) < 4  # 32 of 128 tokens
    with _Meter() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logp, _ = completion_logprobs(
                hidden, weight, targets, places(mask), chunk_tokens=10, entropy=True, loss=loss
            )
        assert seen.rows == 32
        logp.sum().backward()
    assert seen.rows == (32 if loss else 64)  # once more in the backward pass, where the loss was not known
    products, slices = (2, 2) if autocast else (4, 1)  # bytes of a number; slices that are no products
    assert seen.chunk_bytes == 10 * 50 * products + slices * 5 * 50 * 4
    assert seen.largest == max(products * 10 * 50, 4 * 8 * 16 * 3)  # all logits would be products * 6400


def test_without_gradients_nothing_is_kept():
    hidden, weight, bias, targets, _ = example()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x), lambda x: x):
        frozen, _ = completion_logprobs(hidden.detach(), weight.detach(), targets, bias=bias.detach())
        with torch.no_grad():
            quiet, _ = completion_logprobs(hidden, weight, targets, bias=bias)
        assert not saved and frozen.grad_fn is None and quiet.grad_fn is None
        taught, _ = completion_logprobs(hidden, weight, targets, bias=bias)
        assert saved
    assert torch.equal(frozen, taught) and torch.equal(quiet, taught)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_tokens_is_fine(shape):
    hidden, weight = torch.zeros(*shape, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
    logp, entropy = completion_logprobs(hidden, weight, torch.zeros(shape).long(), entropy=True)
    assert logp.shape == entropy.shape == shape
    logp.sum().backward()
    assert (weight.grad == 0).all()


def test_a_mask_without_tokens_is_fine():
    hidden, weight, _, targets, mask = example(torch.float32)
    logp, _ = completion_logprobs(hidden, weight, targets, places(torch.zeros_like(mask)))
    logp.sum().backward()
    assert (logp == 0).all() and (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_bf16_inputs_give_fp32_log_probs():
    hidden, weight, _, targets, _ = example(torch.bfloat16)
    logp, entropy = completion_logprobs(hidden, weight, targets, chunk_tokens=4, entropy=True)
    assert logp.dtype == entropy.dtype == torch.float32
    head = (weight.float() - weight.float().mean(0)).bfloat16()
    expected = F.linear(hidden, head).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-6)
    logp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_autocast_multiplies_in_its_dtype_and_sums_weight_gradients_in_fp32():
    hidden, weight, bias, targets, _ = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(hidden, weight - weight.mean(0), bias - bias.mean())
        assert expected.dtype == torch.bfloat16
        expected = expected.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        logp, _ = completion_logprobs(hidden, weight, targets, bias=bias, chunk_tokens=1)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-6)
    exact, _ = completion_logprobs(hidden, weight, targets, bias=bias)
    assert (logp - exact).abs().max() > 1e-4  # or bf16 was not used at all

    ours = grads(logp, torch.ones(R, C), hidden, weight, bias)  # outside autocast, as .backward() is
    theirs = grads(expected, torch.ones(R, C), hidden, weight, bias)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, reference, rtol=0.02, atol=0.02)


def test_in_bf16_logits_far_from_zero_are_as_exact_as_those_around_it():
    """GPT-2's lie near -100: what is common to them is taken from the head before it is rounded."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 50, 64), torch.randn(9000, 64) / 3  # more than one part of the head
    hidden[..., 0], targets = 10.0, torch.randint(0, 9000, (1, 50))
    worst = []
    for offset in (0.0, 10.0):
        weight[:, 0] -= offset
        exact, _ = completion_logprobs(hidden.double(), weight.double(), targets)
        with torch.autocast("cpu", torch.bfloat16):
            logp, _ = completion_logprobs(hidden, weight, targets)
        worst.append((logp - exact).abs().max().item())
    assert (hidden @ weight.T).mean() < -90
    assert 1e-4 < worst[1] < 1.2 * worst[0] < 0.2


def test_many_small_weight_gradients_do_not_drown_in_bf16():
    """400 equal tokens, one a chunk: a bf16 sum stops growing at 256 times one of them."""
    hidden = torch.ones(1, 400, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = completion_logprobs(hidden, weight, torch.ones(1, 400).long(), chunk_tokens=1)
    logp.sum().backward()
    assert weight.grad.flatten().tolist() == [-200, 200]


def test_autocast_around_the_backward_pass_changes_nothing():
    hidden, weight, bias, targets, _ = example(torch.float32)
    logp, _ = completion_logprobs(hidden, weight, targets, bias=bias)
    expected = grads(logp, torch.ones(R, C), hidden, weight)
    logp, _ = completion_logprobs(hidden, weight, targets, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        found = grads(logp, torch.ones(R, C), hidden, weight)
    assert all(map(torch.equal, found, expected))


def test_float64_stays_float64_under_autocast():
    hidden, weight, bias, targets, _ = example()
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = completion_logprobs(hidden, weight, targets, bias=bias)
    torch.testing.assert_close(logp, plain(hidden, weight, bias, targets)[0], rtol=1e-12, atol=1e-12)


def test_large_logits_and_tokens_that_cannot_occur():
    hidden = torch.full((1, 1, 1), 1e4)
    weight = torch.tensor([[1.0], [1.0], [-1.0]])
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    logp, entropy = completion_logprobs(hidden, weight, torch.zeros(1, 1).long(), bias=bias, entropy=True)
    assert logp.item() == pytest.approx(-0.6931472) and entropy.item() == pytest.approx(0.6931472)


def test_fake_tensors_trace_it_forward_and_backward():
    with FakeTensorMode():
        hidden = torch.empty(R, C, D, requires_grad=True)
        weight = torch.empty(V, D, requires_grad=True)
        logp, _ = completion_logprobs(hidden, weight, torch.zeros(R, C).long(), chunk_tokens=4, entropy=True)
        logp.sum().backward()
        assert weight.grad.shape == (V, D)


def test_inputs_that_do_not_fit_are_explained():
    hidden, weight, _, targets, mask = example()
    with pytest.raises(ValueError, match="do not go together"):
        completion_logprobs(hidden, weight, targets[:, 1:])
    with pytest.raises(ValueError, match="do not go together"):
        completion_logprobs(hidden, weight, targets, mask)
    with pytest.raises(ValueError, match="temperature is 0"):
        completion_logprobs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        completion_logprobs(hidden, weight, targets, chunk_tokens=0)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_second_backward_pass_adds_to_the_first_ones_gradient(is_known):
    torch.manual_seed(0)
    hidden, targets = torch.randn(3, 5, 8, dtype=torch.float64), torch.randint(50, (3, 5))
    weight = torch.nn.Parameter(torch.randn(50, 8, dtype=torch.float64))

    def loss(logp):
        return logp.square().sum()

    def backward() -> int:
        """Most bytes that are held where gradients are made."""
        with LiveBytes() as live:
            known = loss if is_known else None
            share = loss(completion_logprobs(hidden, weight, targets, chunk_tokens=4, loss=known)[0])
            if not is_known:
                live.reset_peak()
            share.backward()
        return live.peak_bytes

    first = backward()
    once, place = weight.grad.clone(), weight.grad.data_ptr()
    assert backward() <= first - weight.nbytes  # in place: without a gradient of its own
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-12, atol=1e-14)
    assert weight.grad.data_ptr() == place and once.norm() > 1
