"""Log-probs of given tokens: a plain log-softmax and its gradients, by chunks of tokens, compiled or not."""

import math
import weakref
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.memory.live import LiveBytes
from grpo.model.head import adds_in, centred_head
from grpo.scoring import head, kernels
from grpo.scoring.head import LMHeadOutput, chunked_lm_head

K, D, V = 15, 4, 11


def example(dtype=torch.float64, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, offset = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in ((K, D), (V, D), (V,))
    )
    targets = torch.randint(V, (K,), generator=generator)
    return hidden, weight, offset if bias else None, targets


def plain(hidden, weight, bias, targets, temperature=1.0):
    logp = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def close(ours, theirs, exactness=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=exactness, atol=exactness)


def slope_of(loss):
    """The derivative of a sum over tokens by each log-prob, as `chunked_lm_head` wants it."""

    def slope(logp: Tensor, _: slice) -> Tensor:
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            return torch.autograd.grad(loss(leaf), leaf)[0]

    return slope


def uneven(logp: Tensor) -> Tensor:
    return (logp.exp() - logp.square()).sum()


def gradients_of(leaves, targets, *, slope=None, **options) -> tuple[LMHeadOutput, list]:
    """The pass, and the gradients of hidden, weight and, if there is one, bias."""
    hidden, weight, bias = leaves
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    found = chunked_lm_head(hidden, weight, targets, bias=bias, slope=slope or slope_of(uneven), **options)
    return found, [found.hidden_gradient, *(leaf.grad for leaf in (weight, bias) if leaf is not None)]


def test_one_token_by_hand():
    """Logits 0 and ln 3 have probabilities 1/4 and 3/4; at temperature 2, 1 and sqrt 3 over their sum."""
    hidden, target = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.long)
    weight = torch.tensor([[1.0], [3.0]], dtype=torch.float64).log()
    cold = chunked_lm_head(hidden, weight, target, entropy=True)
    assert cold.logp.exp().item() == pytest.approx(0.75) and cold.hidden_gradient is None
    assert cold.entropy.item() == pytest.approx(2 * 0.6931471805599453 - 0.75 * 1.0986122886681098)
    warm = chunked_lm_head(hidden, weight, target, temperature=2.0)
    assert warm.logp.exp().item() == pytest.approx(3**0.5 / (1 + 3**0.5)) and warm.entropy.item() == 0
    weight.requires_grad_()  # a slope of 1: by the logits -1/4 and 1/4
    assert chunked_lm_head(hidden, weight, target, slope=slope_of(Tensor.sum)).hidden_gradient.item() == (
        pytest.approx(0.25 * 1.0986122886681098)
    )
    assert weight.grad.flatten().tolist() == pytest.approx([-0.25, 0.25])


@examples(40)
@given(st.integers(0, 1000), st.integers(1, K + 2), st.sampled_from([0.5, 1.0, 1.7]), st.booleans())
def test_equals_log_softmax_for_any_chunk_and_so_do_its_gradients(seed, chunk, temperature, bias):
    *leaves, targets = example(seed=seed, bias=bias)
    coefficients = torch.randn(K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def loss(logp, coefficients):
        return (coefficients * (logp + logp.square())).sum()

    logp, entropy = plain(*leaves, targets, temperature)
    known = [leaf for leaf in leaves if leaf is not None]
    theirs = torch.autograd.grad(loss(logp, coefficients), known)

    def slope(logp, part):
        return slope_of(partial(loss, coefficients=coefficients[part]))(logp, part)

    found, ours = gradients_of(
        leaves, targets, slope=slope, temperature=temperature, chunk_tokens=chunk, entropy=True
    )
    close([found.logp, found.entropy], [logp.detach(), entropy.detach()])
    close(ours, list(theirs), 1e-11)


def test_gradients_only_where_asked():
    for wanted in torch.eye(2).bool().tolist():
        *leaves, targets = example()
        for leaf, on in zip(leaves[1:], wanted, strict=True):
            leaf.requires_grad_(on)
        _, gradients = gradients_of(leaves, targets, chunk_tokens=4)
        assert [gradient is not None for gradient in gradients[1:]] == wanted
    chunked_lm_head(*leaves[:2], targets, bias=leaves[2])
    assert leaves[1].grad is None is leaves[0].grad  # hidden's is the caller's to give on


def learned(dtype=torch.float64, temperature=0.7, *, autocast=False) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of a sum of them."""
    *leaves, targets = example(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, gradients = gradients_of(
            leaves, targets, chunk_tokens=4, entropy=True, temperature=temperature
        )
    return [found.logp, found.entropy, *gradients]


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


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_logits_of_all_tokens_never_exist(autocast, learns):
    hidden, weight = torch.randn(32, 3), torch.randn(50, 3, requires_grad=True)
    targets = torch.ones(32).long()
    slope = slope_of(uneven) if learns else None
    with _Meter() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chunked_lm_head(hidden, weight, targets, chunk_tokens=10, entropy=True, slope=slope)
    assert seen.rows == 32
    dtype = torch.bfloat16 if autocast else torch.float32
    assert seen.chunk_bytes <= 10 * 50 * head.logit_bytes(dtype, "cpu")
    assert seen.largest == 4 * 10 * 50  # all logits would be 4 * 1600


def test_no_tokens_is_fine():
    hidden, weight = torch.zeros(0, D), torch.ones(V, D, requires_grad=True)
    found, gradients = gradients_of([hidden, weight, None], torch.zeros(0).long(), entropy=True)
    assert found.logp.shape == found.entropy.shape == (0,)
    assert gradients[0].shape == hidden.shape and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_or_autocast_multiplies_in_it_and_gives_fp32_log_probs(autocast):
    """Gradients have the dtype of what they are of; those of weights are added up in fp32."""
    *leaves, targets = example(torch.float32 if autocast else torch.bfloat16, bias=autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        centred = [(x.float() - x.float().mean(0)).to(x.dtype) for x in leaves[1:] if x is not None]
        expected = F.linear(leaves[0], *centred)
        assert expected.dtype == torch.bfloat16
        expected = expected.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        theirs = torch.autograd.grad(uneven(expected), [leaf for leaf in leaves if leaf is not None])
        found, ours = gradients_of(leaves, targets, chunk_tokens=1, entropy=True)
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    torch.testing.assert_close(found.logp, expected.detach(), rtol=0, atol=1e-6)
    close(ours, list(theirs), 0.03)
    if autocast:
        exact = chunked_lm_head(*leaves[:2], targets, bias=leaves[2]).logp
        assert (found.logp - exact).abs().max() > 1e-4  # or bf16 was not used at all


def test_float64_stays_float64_under_autocast():
    *leaves, targets = example()
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_lm_head(*leaves[:2], targets, bias=leaves[2])
    close(found.logp, plain(*leaves, targets)[0].detach())


def test_in_bf16_logits_far_from_zero_are_as_exact_as_those_around_it():
    """GPT-2's lie near -100: what is common to them is taken from the head before it is rounded."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 64), torch.randn(9000, 64) / 3  # more than one part of the head
    hidden[..., 0], targets = 10.0, torch.randint(0, 9000, (50,))
    worst = []
    for offset in (0.0, 10.0):
        weight[:, 0] -= offset
        exact = chunked_lm_head(hidden.double(), weight.double(), targets).logp
        with torch.autocast("cpu", torch.bfloat16):
            logp = chunked_lm_head(hidden, weight, targets).logp
        worst.append((logp - exact).abs().max().item())
    assert (hidden @ weight.T).mean() < -90
    assert 1e-4 < worst[1] < 1.2 * worst[0] < 0.2


def test_many_small_weight_gradients_do_not_drown_in_bf16():
    """400 equal tokens, one a chunk: a bf16 sum stops growing at 256 times one of them."""
    weight, targets = torch.zeros(2, 1, requires_grad=True), torch.ones(400).long()
    with torch.autocast("cpu", torch.bfloat16):
        chunked_lm_head(torch.ones(400, 1), weight, targets, chunk_tokens=1, slope=slope_of(Tensor.sum))
    assert weight.grad.flatten().tolist() == [-200, 200]


def test_large_logits_and_tokens_that_cannot_occur():
    hidden, weight = torch.full((1, 1), 1e4), torch.tensor([[1.0], [1.0], [-1.0]])
    bias, target = torch.tensor([0.0, 0.0, -torch.inf]), torch.zeros(1).long()
    found, gradients = gradients_of([hidden, weight, bias], target, entropy=True)
    assert found.logp.item() == pytest.approx(-0.6931472) and found.entropy.item() == pytest.approx(0.6931472)
    assert gradients[0].isfinite().all()


def test_a_token_that_is_all_but_certain_keeps_its_small_gradient_in_bf16():
    """1 - p is 0.0009; a softmax that was rounded first would make 0 or 0.004 of it."""
    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[7.0], [0.0]]).bfloat16()
    slope = slope_of(Tensor.sum)
    found = chunked_lm_head(hidden, weight.requires_grad_(), torch.zeros(1).long(), slope=slope)
    exact = -torch.expm1(found.logp).item()
    assert weight.grad[0].item() == pytest.approx(exact, rel=0.01) and 0.0008 < exact < 0.001


def test_a_second_pass_adds_to_the_first_ones_gradient_in_its_place():
    torch.manual_seed(0)
    hidden, targets = torch.randn(15, 8, dtype=torch.float64), torch.randint(50, (15,))
    weight = torch.nn.Parameter(torch.randn(50, 8, dtype=torch.float64))

    def peak_bytes() -> int:
        with LiveBytes() as live:
            chunked_lm_head(hidden, weight, targets, chunk_tokens=4, slope=slope_of(uneven))
            return live.peak_bytes

    first = peak_bytes()
    once, place = weight.grad.clone(), weight.grad.data_ptr()
    assert peak_bytes() <= first - weight.nbytes  # without a gradient of its own
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-12, atol=1e-14)
    assert weight.grad.data_ptr() == place and once.norm() > 1


@pytest.fixture
def untried(monkeypatch) -> None:
    """As if this were a device on which it is tried, with a compiler that leaves functions as they are."""
    monkeypatch.setattr(kernels, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(kernels, "_works", {})
    monkeypatch.setattr(kernels, "_compiled", lambda function: function)


def test_a_token_that_cannot_occur_adds_no_entropy():
    products = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.bfloat16)
    (score,) = kernels.scores_of(products, torch.tensor([1]), 1.0, True)
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
        (lambda *args: torch.zeros(8, 4, dtype=torch.float64), "compiled ones give something else"),
    ],
)
def test_without_a_compiler_that_is_right_operations_run_one_by_one(monkeypatch, logged, makes, said):
    monkeypatch.setattr(kernels, "_compiled", lambda function: makes)
    found = learned()
    assert kernels._works == {("cpu", torch.float64): False}
    monkeypatch.setattr(kernels, "COMPILED_ON", ())
    assert all(map(torch.equal, found, learned()))
    (line,) = logged
    assert line.startswith("WARNING the head's kernels are not fused, slower: ") and said in line


def test_compiled_no_kernel_is_made_twice(monkeypatch):
    """Not for fewer tokens, nor for one: after eight of a function torch goes without."""
    counter = CompileCounter()
    monkeypatch.setattr(kernels, "_compiled", cache(partial(torch.compile, dynamic=True, backend=counter)))
    for tokens in (8, 300, 1, 40, 2):
        products = torch.randn(tokens, 128).bfloat16()[:, :100]  # of rows that are padded
        targets = torch.randint(100, (tokens,))
        with torch.no_grad():  # as in every pass
            expected = kernels.scores_of(products, targets, 0.7, True)
            found = kernels.compiled(kernels.scores_of, tokens)(products, targets, 0.7, True)
            fill = kernels.compiled(kernels.fill_softmax, tokens)
            fill(products.clone(), found[:, 2:], torch.ones(tokens, 1), 0.7)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 2


# ------------------------------------------------------------------------------- on an accelerator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_padded_vocabulary_changes_nothing(monkeypatch, request, dtype, is_compiled):
    """Padded to what a card's kernels take it gives the same log-probs and gradients."""
    if is_compiled:
        request.getfixturevalue("untried")
    exactness = 1e-12 if dtype == torch.float64 else 2e-2
    torch.manual_seed(0)
    leaves = [values.to(dtype) for values in (torch.randn(18, 16), torch.randn(101, 16), torch.randn(101))]
    targets, results = torch.randint(101, (18,)), []
    for padding in (27, 0):
        monkeypatch.setattr(head, "vocabulary_padding", lambda *of, padding=padding: padding)
        for leaf in leaves[1:]:
            leaf.requires_grad_()
        found, gradients = gradients_of(leaves, targets, chunk_tokens=4, entropy=True, temperature=0.7)
        results.append([found.logp, found.entropy, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=exactness, atol=exactness)
    assert kernels._works.get(("cpu", dtype), False) == is_compiled


def test_a_head_is_padded_and_its_chunks_are_large_on_accelerators_alone():
    assert head.vocabulary_padding(50257, torch.bfloat16, "cuda") == 47
    assert head.vocabulary_padding(50304, torch.bfloat16, "cuda") == 0
    for dtype, kind in (torch.float32, "cuda"), (torch.float64, "cuda"), (torch.bfloat16, "cpu"):
        assert head.vocabulary_padding(50257, dtype, kind) == 0  # a copy for its own sake
    assert head.tokens_at_once(50257, torch.bfloat16, "cuda") == 2**28 // (50257 * (2 + 4 + 4)) == 534
    assert head.tokens_at_once(50257, torch.float32, "cuda") == 2**28 // (50257 * (4 + 8)) == 445
    assert head.tokens_at_once(50257, torch.float32, "cpu") == 2**27 // (50257 * (4 + 8)) == 222
    assert head.tokens_at_once(256, torch.float32, "cpu") == 1024
    assert head.tokens_at_once(10**9, torch.float32, "cuda") == 1
    assert head.tokens_at_once(256, torch.float32, "cuda") == 16384


def right(total, left, right, *, out_dtype, out) -> Tensor:
    return out.addmm_(left.to(out_dtype), right.to(out_dtype))


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
    assert adds_in.__wrapped__(torch.float32, torch.bfloat16, cuda) == works
    assert [line for line in logged if "slower: " in line] == logged and len(logged) == (not works)
    assert not adds_in(torch.float32, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("adds", [False, True], ids=["plain", "as CUDA adds"])
def test_with_fp32_logits_a_head_in_16_bits_rounds_none_of_its_products(monkeypatch, adds):
    """Factors are rounded if their products of 16 bits can be added in fp32; elsewhere they are not."""
    monkeypatch.setattr("grpo.model.head.adds_in", lambda *of: adds)
    addmm = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *of, **to: right(*of, **to) if "out_dtype" in to else addmm(*of, **to)
    )
    *leaves, targets = example(torch.float32)
    hidden, weight, bias = leaves
    rounded = [centred_head(leaf.detach(), torch.bfloat16) for leaf in (weight, bias)]
    factors = [hidden.detach().bfloat16(), *rounded] if adds else [leaf.detach() for leaf in leaves]
    expected, _ = plain(*(factor.float() for factor in factors), targets)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = gradients_of(leaves, targets, chunk_tokens=4, fp32_logits=True)
        coarse, _ = gradients_of(leaves, targets, chunk_tokens=4)
    assert (found.logp - expected).abs().max() < 1e-5 < (coarse.logp - expected).abs().max()
    logp, _ = plain(*leaves, targets)
    theirs = torch.autograd.grad(uneven(logp), leaves)
    exactness = 0.05 if adds else 1e-4
    for ours, exact in zip(gradients, theirs, strict=True):
        assert (ours - exact).norm() < exactness * exact.norm()


def test_a_trace_knows_that_kernels_are_compiled(untried):
    """For a device on which it was tried in this process; of others what they would save is counted."""
    weight, hidden, targets = torch.zeros(2000, 4), torch.zeros(16, 4), torch.zeros(16).long()
    cuda = torch.device("cuda")
    for worked in (False, True):
        assert chunked_lm_head(hidden, weight, targets, device=cuda, slope=slope_of(uneven)).logp.shape == (
            16,
        )
        assert kernels.are_compiled("cuda", torch.float32) == worked
        kernels._works["cuda", torch.float32] = True
    assert head.tokens_at_once(50257, torch.float32, "cuda") == 1335
    assert not kernels.are_compiled("cuda", torch.bfloat16)
