"""The head's work as one kernel: what it computes, and what happens where no compiler is."""

import pytest
import torch
from conftest import places
from test_logprobs import C, R, example

from grpo.model.cpu import slices
from grpo.scoring import fused
from grpo.scoring.logprobs import TokenLoss, completion_logprobs


def weighted_sum(logp: torch.Tensor) -> torch.Tensor:
    return (logp * torch.arange(R * C).view(R, C)).sum()


def learned(temperature: float = 0.7, loss: TokenLoss | None = None) -> list[torch.Tensor]:
    """Log-probs, entropies, and the gradients of some weighted sum. loss: that sum, if known beforehand."""
    hidden, weight, bias, targets, mask = example()
    logp, entropy = completion_logprobs(
        hidden, weight, targets, places(mask), bias=bias, temperature=temperature, chunk_tokens=3,
        entropy=True, loss=loss,
    )  # fmt: skip
    weighted_sum(logp).backward()
    return [logp, entropy, hidden.grad, weight.grad, bias.grad]


@pytest.fixture
def untried(monkeypatch) -> None:
    """As if this were a device on which it is tried, with a compiler that leaves functions as they are."""
    monkeypatch.setattr(fused, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(fused, "_works", {})
    monkeypatch.setattr(fused, "_compiled", lambda function: function)


@pytest.mark.parametrize("loss", [None, weighted_sum])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_what_the_operations_give(temperature, loss, request):
    expected = learned(temperature)
    request.getfixturevalue("untried")
    for one, other in zip(learned(temperature, loss), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert fused.what_is_fused() == ("cpu torch.float64",)


def test_a_token_that_cannot_occur_adds_no_entropy(untried):
    products = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.bfloat16)
    score = fused.scores(products, torch.tensor([1]), 1.0, True)
    logp = torch.tensor([0.0, 1.0]).log_softmax(0)
    entropy = -(logp.exp() * logp).sum()
    assert score.dtype == torch.float32
    assert torch.allclose(score[0], torch.stack([logp[1], entropy, torch.tensor(1.0), -logp[1]]))


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (lambda function: lambda *args: 1 / 0, "slower: ZeroDivisionError: division by zero"),
        (lambda function: lambda *args: torch.zeros(8, 4), "compiled ones give something else"),
    ],
)
def test_without_a_compiler_that_is_right_operations_run_one_by_one(monkeypatch, logged, compiled, said):
    monkeypatch.setattr(fused, "_compiled", compiled)
    found = learned()
    monkeypatch.setattr(fused, "COMPILED_ON", ())
    for one, other in zip(found, learned(), strict=True):
        assert torch.equal(one, other)
    (line,) = logged
    assert line.startswith("WARNING the head's kernels are not fused, slower: ") and said in line


def test_a_trace_knows_that_no_slices_are_held(untried):
    """For a device on which it was tried in this process; of others the slices are counted."""
    weight, hidden = torch.zeros(2000, 4), torch.zeros(2, 8, 4)
    with slices.traced_for(torch.device("cuda"), parts_too=True):
        assert not fused.is_fused(weight.device, torch.float32)
    fused._works["cuda", torch.float32] = True
    assert fused.was_fused("cuda", torch.float32) and not fused.was_fused("cuda", torch.bfloat16)
    with slices.traced_for(torch.device("cuda"), parts_too=True):
        assert fused.is_fused(weight.device, torch.float32)
        logp, _ = completion_logprobs(hidden, weight, torch.zeros(2, 8, dtype=torch.long))
        assert logp.shape == (2, 8)
