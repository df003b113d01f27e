"""Log-probs of given tokens: a plain log-softmax and its gradients, by chunks of tokens, fused or not."""

import math
import weakref
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import examples, places
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.memory.live import LiveBytes
from grpo.model.head import centred_head
from grpo.scoring import fused, head, logprobs
from grpo.scoring.logprobs import completion_logprobs

R, C, D, V = 3, 5, 4, 11


def example(dtype=torch.float64, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, offset = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in ((R, C, D), (V, D), (V,))
    )
    targets = torch.randint(V, (R, C), generator=generator)
    mask = torch.arange(C) < torch.tensor([[5], [0], [2]])
    return hidden, weight, offset if bias else None, targets, mask


def plain(hidden, weight, bias, targets, temperature=1.0):
    logp = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def close(ours, theirs, exactness=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=exactness, atol=exactness)


def test_one_token_by_hand():
    """Logits 0 and ln 3 have probabilities 1/4 and 3/4; at temperature 2, 1 and sqrt 3 over their sum."""
    hidden, target = torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.long)
    weight = torch.tensor([[1.0], [3.0]], dtype=torch.float64).log()
    logp, entropy = completion_logprobs(hidden, weight, target, entropy=True)
    assert logp.exp().item() == pytest.approx(0.75)
    assert entropy.item() == pytest.approx(2 * 0.6931471805599453 - 0.75 * 1.0986122886681098)
    warm, _ = completion_logprobs(hidden, weight, target, temperature=2.0)
    assert warm.exp().item() == pytest.approx(3**0.5 / (1 + 3**0.5))


@examples(40)
@given(
    st.integers(0, 1000), st.integers(1, R * C + 2), st.sampled_from([0.5, 1.0, 1.7]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_equals_log_softmax_for_any_chunk(seed, chunk, temperature, bias, masked):
    """And so do its gradients, whether the loss is known beforehand or not."""
    hidden, weight, offset, targets, mask = example(seed=seed, bias=bias)
    mask = mask if masked else torch.ones_like(mask)
    options = {"temperature": temperature, "chunk_tokens": chunk, "entropy": True, "bias": offset}
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    coefficients = torch.randn(R, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def loss(logp):
        return (coefficients * (logp + logp.square())).sum()

    logp, entropy = plain(hidden, weight, offset, targets, temperature)
    expected, expected_entropy = logp * mask, (entropy * mask).detach()
    theirs = torch.autograd.grad(loss(expected), leaves)
    for known in (None, loss):
        chosen = places(mask) if masked else None
        logp, entropy = completion_logprobs(hidden, weight, targets, chosen, loss=known, **options)
        close([logp, entropy], [expected, expected_entropy])
        assert not entropy.requires_grad
        close(torch.autograd.grad(loss(logp), leaves), theirs, 1e-11)


@pytest.mark.parametrize("loss", [None, Tensor.sum])
def test_gradients_only_where_asked(loss):
    for wanted in torch.eye(3).bool().tolist():
        *leaves, targets, _ = example()
        leaves = [each.detach().requires_grad_(on) for each, on in zip(leaves, wanted, strict=True)]
        logp, _ = completion_logprobs(*leaves[:2], targets, bias=leaves[2], chunk_tokens=4, loss=loss)
        logp.sum().backward()
        assert [each.grad is not None for each in leaves] == wanted


def uneven(logp: Tensor) -> Tensor:
    return (logp.exp() - logp.square()).sum()


def learned(dtype=torch.float64, temperature=0.7, *, known=False, autocast=False) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of a sum. known: that sum is, beforehand."""
    *leaves, targets, mask = example(dtype)
    options = {"chunk_tokens": 4, "entropy": True, "temperature": temperature}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, entropy = completion_logprobs(
            *leaves[:2], targets, places(mask), bias=leaves[2], loss=uneven if known else None, **options
        )
    return [logp, entropy, *torch.autograd.grad(uneven(logp), leaves)]


@pytest.mark.parametrize(("autocast", "temperature"), [(False, 1.0), (True, 1.0), (True, 0.7)])
def test_a_loss_that_is_known_beforehand_changes_no_bit(autocast, temperature):
    both = [learned(torch.float32, temperature, known=on, autocast=autocast) for on in (True, False)]
    assert all(map(torch.equal, *both)) and min(each.norm() for each in both[0]) > 0.1


def test_masked_tokens_are_never_read():
    hidden, weight, bias, targets, mask = example()
    options = {"bias": bias, "chunk_tokens": 3, "entropy": True}
    clean, _ = completion_logprobs(hidden, weight, targets, places(mask), **options)
    spoiled = torch.where(mask.unsqueeze(-1), hidden, torch.nan).detach().requires_grad_()
    wrong = torch.where(mask, targets, -100)
    logp, entropy = completion_logprobs(spoiled, weight, wrong, places(mask), **options)
    assert torch.equal(logp, clean) and not logp[~mask].any() and not entropy[~mask].any()
    logp.sum().backward()
    assert not spoiled.grad[~mask].any() and spoiled.grad[mask].isfinite().all()
    assert weight.grad.isfinite().all()


class _Meter(TorchDispatchMode):
    """Bytes of the largest tensor, most bytes of logits (…, 50) at once, and how many rows got logits."""

    def __init__(self):
        super().__init__()
        self.largest, self.rows, self.chunk_bytes, self.chunks = 0, 0, 0, weakref.WeakSet()

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
def test_the_logits_of_all_tokens_never_exist_and_masked_tokens_cost_nothing(autocast, loss):
    hidden, weight = torch.randn(8, 16, 3, requires_grad=True), torch.randn(50, 3, requires_grad=True)
    targets = torch.ones(8, 16).long()
    scored = places(torch.arange(16).expand(8, 16) < 4)  # 32 of 128 tokens
    options = {"chunk_tokens": 10, "entropy": True, "loss": loss}
    with _Meter() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logp, _ = completion_logprobs(hidden, weight, targets, scored, **options)
        assert seen.rows == 32
        logp.sum().backward()
    assert seen.rows == (32 if loss else 64)  # once more in the backward pass, where the loss was not known
    assert seen.chunk_bytes == 10 * 50 * head.logit_bytes(
        torch.bfloat16 if autocast else torch.float32, "cpu"
    )
    assert seen.largest == 4 * 10 * 50  # all logits would be 4 * 6400


def test_without_gradients_nothing_is_kept():
    *leaves, bias, targets, _ = example()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        frozen, _ = completion_logprobs(*(x.detach() for x in leaves), targets, bias=bias.detach())
        with torch.no_grad():
            quiet, _ = completion_logprobs(*leaves, targets, bias=bias)
        assert not saved and frozen.grad_fn is quiet.grad_fn is None
        taught, _ = completion_logprobs(*leaves, targets, bias=bias)
    assert saved and torch.equal(frozen, taught) and torch.equal(quiet, taught)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (R, C)])
def test_no_tokens_is_fine(shape):
    """Or none that is scored."""
    hidden, weight = torch.zeros(*shape, D, requires_grad=True), torch.ones(V, D, requires_grad=True)
    nowhere = places(torch.zeros(shape)) if shape == (R, C) else None
    logp, entropy = completion_logprobs(hidden, weight, torch.zeros(shape).long(), nowhere, entropy=True)
    assert logp.shape == entropy.shape == shape and not logp.any()
    logp.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_or_autocast_multiplies_in_it_and_gives_fp32_log_probs(autocast):
    """Gradients have the dtype of what they are of; those of weights are added up in fp32."""
    *leaves, targets, _ = example(torch.float32 if autocast else torch.bfloat16, bias=autocast)
    hidden, weight, bias = leaves
    leaves = [each for each in leaves if each is not None]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        head = [(each.float() - each.float().mean(0)).to(each.dtype) for each in leaves[1:]]
        expected = F.linear(hidden, *head)
        assert expected.dtype == torch.bfloat16
        expected = expected.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        logp, entropy = completion_logprobs(hidden, weight, targets, bias=bias, chunk_tokens=1, entropy=True)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad(each.sum(), leaves) for each in (logp, expected))
    close(ours, theirs, 0.02)
    if autocast:
        exact, _ = completion_logprobs(hidden, weight, targets, bias=bias)
        assert (logp - exact).abs().max() > 1e-4  # or bf16 was not used at all


def test_autocast_around_the_backward_pass_changes_nothing_and_float64_stays_float64_under_it():
    hidden, weight, bias, targets, _ = example(torch.float32)
    logp, _ = completion_logprobs(hidden, weight, targets, bias=bias)
    outside = torch.autograd.grad(logp.sum(), (hidden, weight), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(logp.sum(), (hidden, weight)), outside))
        hidden, weight, bias, targets, _ = example()
        logp, _ = completion_logprobs(hidden, weight, targets, bias=bias)
    close(logp, plain(hidden, weight, bias, targets)[0])


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
    weight, targets = torch.zeros(2, 1, requires_grad=True), torch.ones(1, 400).long()
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = completion_logprobs(torch.ones(1, 400, 1), weight, targets, chunk_tokens=1)
    logp.sum().backward()
    assert weight.grad.flatten().tolist() == [-200, 200]


def test_large_logits_and_tokens_that_cannot_occur():
    hidden, weight = torch.full((1, 1, 1), 1e4), torch.tensor([[1.0], [1.0], [-1.0]])
    bias, target = torch.tensor([0.0, 0.0, -torch.inf]), torch.zeros(1, 1).long()
    logp, entropy = completion_logprobs(hidden, weight, target, bias=bias, entropy=True)
    assert logp.item() == pytest.approx(-0.6931472) and entropy.item() == pytest.approx(0.6931472)


@pytest.mark.parametrize("known", [None, uneven])
def test_a_second_backward_pass_adds_to_the_first_ones_gradient(known):
    torch.manual_seed(0)
    hidden, targets = torch.randn(3, 5, 8, dtype=torch.float64), torch.randint(50, (3, 5))
    weight = torch.nn.Parameter(torch.randn(50, 8, dtype=torch.float64))

    def backward() -> int:
        """Most bytes that are held where gradients are made."""
        with LiveBytes() as live:
            logp, _ = completion_logprobs(hidden, weight, targets, chunk_tokens=4, loss=known)
            share = uneven(logp)
            if known is None:
                live.reset_peak()
            share.backward()
        return live.peak_bytes

    first = backward()
    once, place = weight.grad.clone(), weight.grad.data_ptr()
    assert backward() <= first - weight.nbytes  # in place: without a gradient of its own
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-12, atol=1e-14)
    assert weight.grad.data_ptr() == place and once.norm() > 1


@pytest.fixture
def untried(monkeypatch) -> None:
    """As if this were a device on which it is tried, with a compiler that leaves functions as they are."""
    monkeypatch.setattr(fused, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(fused, "_works", {})
    monkeypatch.setattr(fused, "_compiled", lambda function: function)


@pytest.mark.parametrize(("temperature", "known"), [(1.0, False), (0.7, False), (0.7, True)])
def test_fused_it_is_what_the_operations_give(temperature, known, request):
    expected = learned(temperature=temperature)
    request.getfixturevalue("untried")
    close(learned(temperature=temperature, known=known), expected)
    assert fused._works == {("cpu", torch.float64): True}


def test_fused_a_token_that_cannot_occur_adds_no_entropy(untried):
    products = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.bfloat16)
    (score,) = fused.scores(products, torch.tensor([1]), 1.0)
    first, second = torch.tensor([0.0, 1.0]).log_softmax(0).tolist()
    entropy = -(math.exp(first) * first + math.exp(second) * second)
    assert score.dtype == torch.float32 and score.tolist() == pytest.approx([second, entropy, 1, -second])
    bias = centred_head(torch.tensor([1.0, 3.0, -torch.inf]), torch.bfloat16)
    assert bias.tolist() == [-1, 1, -torch.inf]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("makes", "said"),
    [
        (lambda *args: 1 / 0, "slower: ZeroDivisionError: division by zero"),
        (lambda *args: torch.zeros(8, 4), "compiled ones give something else"),
    ],
)
def test_without_a_compiler_that_is_right_operations_run_one_by_one(monkeypatch, logged, makes, said):
    monkeypatch.setattr(fused, "_compiled", lambda function: makes)
    found = learned()
    monkeypatch.setattr(fused, "COMPILED_ON", ())
    assert all(map(torch.equal, found, learned()))
    (line,) = logged
    assert line.startswith("WARNING the head's kernels are not fused, slower: ") and said in line


def test_fused_no_kernel_is_made_twice(monkeypatch):
    """Not for fewer tokens, for one, nor with gradients on: after eight of a function torch goes without."""
    counter = CompileCounter()
    compiled = cache(partial(torch.compile, dynamic=True, backend=counter))
    monkeypatch.setattr(fused, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(fused, "_compiled", compiled)
    for tokens in (8, 300, 1, 40, 2):
        products = torch.randn(tokens, 128).bfloat16()[:, :100]  # of rows that are padded
        targets = torch.randint(100, (tokens,))
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                expected = fused._scores(products, targets, 0.7)
                found = fused.scores(products, targets, 0.7)
                fused.to_gradient(products.clone(), found[:, 2:], targets, torch.ones(tokens, 1), 0.7)
            assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 2


# ------------------------------------------------------------------------------- on an accelerator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_padded_vocabulary_changes_nothing(monkeypatch, request, dtype, is_fused):
    """Padded to what a card's kernels take it gives the same log-probs and gradients."""
    if is_fused:
        request.getfixturevalue("untried")
    exactness = 1e-12 if dtype == torch.float64 else 2e-2
    torch.manual_seed(0)
    values = torch.randn(2, 9, 16), torch.randn(101, 16), torch.randn(101)
    targets = torch.randint(101, (2, 9))

    def found(padding: int, known: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(head, "vocabulary_padding", lambda *of: padding)
        leaves = [each.double().requires_grad_() for each in values]
        hidden, weight, bias = (each.to(dtype) for each in leaves)
        logp, entropy = completion_logprobs(
            hidden, weight, targets, bias=bias, chunk_tokens=4, entropy=True, temperature=0.7,
            loss=uneven if known else None,
        )  # fmt: skip
        uneven(logp).backward()
        return [logp.detach(), entropy, *(each.grad for each in leaves)]

    for known in (False, True):
        for one, other in zip(found(27, known), found(0, known), strict=True):
            torch.testing.assert_close(one, other, rtol=exactness, atol=exactness)


def test_a_head_is_padded_and_its_chunks_are_large_on_accelerators_alone():
    assert head.vocabulary_padding(50257, torch.bfloat16, "cuda") == 47
    assert head.vocabulary_padding(50304, torch.bfloat16, "cuda") == 0
    for dtype, kind in (torch.float32, "cuda"), (torch.float64, "cuda"), (torch.bfloat16, "cpu"):
        assert head.vocabulary_padding(50257, dtype, kind) == 0  # a copy for its own sake
    assert head.tokens_at_once(50257, torch.bfloat16, "cuda") == 2**28 // (50257 * (2 + 4 + 4)) == 534
    assert head.tokens_at_once(50257, torch.float32, "cuda") == 2**28 // (50257 * (4 + 4)) == 667
    assert head.tokens_at_once(50257, torch.float32, "cpu") == 2**27 // (50257 * (4 + 4)) == 333
    assert head.tokens_at_once(256, torch.float32, "cpu") == 1024
    assert head.tokens_at_once(10**9, torch.float32, "cuda") == 1
    assert head.tokens_at_once(256, torch.float32, "cuda") == 16384


def right(total, left, right, *, out_dtype, out) -> None:
    out.addmm_(left.to(out_dtype), right.to(out_dtype))


def wrong(*args, **options) -> None:
    """It writes nothing."""


@pytest.mark.parametrize(
    ("add", "works"),
    [(right, True), (wrong, False), (mock.Mock(side_effect=RuntimeError("not here")), False)],
    ids=["right", "wrong", "refused"],
)
def test_whether_products_are_added_in_fp32_is_tried_once(monkeypatch, logged, add, works):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: ones(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "addmm", add)
    cuda = torch.device("cuda", 0)
    assert logprobs._adds_in.__wrapped__(torch.float32, torch.bfloat16, cuda) == works
    assert [line for line in logged if "slower: " in line] == logged and len(logged) == (not works)
    assert not logprobs._adds_in(torch.float32, torch.bfloat16, torch.device("cpu"))


def test_a_trace_knows_that_kernels_are_fused(untried):
    """For a device on which it was tried in this process; of others what they would save is counted."""
    weight, hidden, targets = torch.zeros(2000, 4), torch.zeros(2, 8, 4), torch.zeros(2, 8).long()
    cuda = torch.device("cuda")
    for worked in (False, True):
        assert fused.is_fused(cuda, torch.float32, traced=True) == worked
        assert completion_logprobs(hidden, weight, targets, device=cuda)[0].shape == (2, 8)
        assert fused.was_fused("cuda", torch.float32) == worked
        fused._works["cuda", torch.float32] = True
    assert head.tokens_at_once(50257, torch.float32, "cuda") == 1335
    assert not fused.was_fused("cuda", torch.bfloat16)
