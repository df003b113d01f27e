"""The loss, its gradient and its metrics, worked out by hand, and whatever is masked or split."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from padded_loss import counts_of, grpo_loss

from grpo.config.groups import LossSettings
from grpo.learning.loss import StepCounts, adaptive_kl, truncated_importance_weights
from grpo.learning.metrics import finish_metrics, merge_metrics

LN2 = math.log(2)
LOSSES, LEVELS = ("grpo", "dapo", "dr_grpo", "cispo"), ("token", "sequence")
tensor = partial(torch.tensor, dtype=torch.float64)
about = partial(pytest.approx, rel=1e-14, abs=1e-15)
exactly = partial(torch.testing.assert_close, rtol=0, atol=1e-15)
COUNTS = StepCounts(rows=2, tokens=5, max_length=4)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = tensor([1.0, -2.0])
# ratios 1.5, 1, 0.5 and 1.5, 0.5; reference over policy 0.5, 1, 2 and 1, 0.5
PROBS = tensor([[0.6, 0.5, 0.25], [0.75, 0.4, 1.0]])
OLD = tensor([[0.4, 0.5, 0.5], [0.5, 0.8, 1.0]]).log()
REF = tensor([[0.3, 0.5, 0.5], [0.75, 0.2, 1.0]]).log()


def run(
    logp=None, old=OLD, ref=None, advantages=ADVANTAGES, mask=MASK, counts=COUNTS, weights=None, **changes
):
    """Loss, gradient with respect to logp, and finished metrics."""
    logp = (PROBS.log() if logp is None else logp).clone().requires_grad_()
    chosen = LossSettings(**({"kl_coef": 0.0} | changes))
    loss, metrics = grpo_loss(
        logp, old, ref, advantages, mask, counts=counts, settings=chosen, importance_weights=weights
    )
    assert not any(value.requires_grad for value in metrics.values())
    loss.backward()
    return loss.item(), logp.grad, finish_metrics(metrics)


# Policy terms: row 1 is -min(1.5, 1.2), -1, -min(0.5, 0.8) = -1.2, -1, -0.5;
# row 2 is -min(-3, -2.4), -min(-1, -1.6) = 3, 1.6.
@pytest.mark.parametrize(
    ("loss_type", "loss", "share"),
    [
        ("dapo", (-2.7 + 4.6) / 5, [1 / 5, 1 / 5]),
        ("grpo", (-2.7 / 3 + 4.6 / 2) / 2, [1 / 6, 1 / 4]),
        ("dr_grpo", (-2.7 + 4.6) / 8, [1 / 8, 1 / 8]),
    ],
)
def test_clipped_losses_by_hand(loss_type, loss, share):
    found, grad, _ = run(loss_type=loss_type)
    assert found == about(loss)
    # clipped tokens teach nothing; the others their ratio times minus the advantage
    exactly(grad, tensor([[0.0, -1.0, -0.5], [3.0, 0.0, 0.0]]) * tensor(share).unsqueeze(1))


def test_cispo_by_hand():
    found, grad, metrics = run(loss_type="cispo", clip_range_high=1.2)
    row_1 = 1.2 * math.log(0.6) + math.log(0.5) + 0.5 * math.log(0.25)
    row_2 = 1.2 * math.log(0.75) + 0.5 * math.log(0.4)
    assert found == about((-row_1 + 2 * row_2) / 5)
    exactly(grad, tensor([[-1.2, -1.0, -0.5], [2.4, 1.0, 0.0]]) / 5)
    assert metrics["cispo_clip_ratio"] == 1 / 5  # only where the advantage is positive
    assert "clip_ratio/low_mean" not in metrics
    assert run(loss_type="cispo")[0] == run(loss_type="cispo", clip_range_high=1.5)[0]  # the default cap is 5
    assert LossSettings(loss_type="cispo").ratio_high == 5.0


def test_sequence_ratios_by_hand():
    ratio_1, ratio_2 = 0.75 ** (1 / 3), 0.75**0.5  # geometric means, both inside the clip
    found, grad, metrics = run(loss_type="grpo", importance_level="sequence")
    assert found == about((-ratio_1 + 2 * ratio_2) / 2)
    exactly(grad, tensor([[-ratio_1 / 3] * 3, [2 * ratio_2 / 2] * 2 + [0.0]]) / 2)
    assert run(importance_level="sequence")[0] == about((-3 * ratio_1 + 4 * ratio_2) / 5)
    assert metrics["ratio/mean"] == about((ratio_1 + ratio_2) / 2)
    assert metrics["ratio/min"] == about(ratio_2)


def test_upper_clip_and_dual_clip_by_hand():
    assert run(clip_range_high=0.4)[0] == about((-1.4 - 1.5 + 4.6) / 5)
    found, grad, metrics = run(dual_clip=1.25)
    assert found == about((-2.7 + 2.5 + 1.6) / 5)  # 3 became 2 * 1.25
    assert grad[1].tolist() == [0, 0, 0]
    assert metrics["clip_ratio/dual_mean"] == 1 / 5


# k3: 0.5 + ln 2 - 1, 0, 2 - ln 2 - 1 and 0, 0.5 + ln 2 - 1; ratios 1.5, 1, 0.5, 1.5, 0.5
@pytest.mark.parametrize(
    ("estimator", "correction", "total"),
    [
        ("k3", False, LN2),
        ("k3", True, (1.5 + 0.5) * (LN2 - 0.5) + 0.5 * (1 - LN2)),
        ("k2", False, 3 * LN2**2 / 2),
        ("k2", True, (1.5 + 0.5 + 0.5) * LN2**2 / 2),
    ],
)
def test_kl_by_hand(estimator, correction, total):
    found, _, metrics = run(ref=REF, kl_coef=0.1, kl_estimator=estimator, kl_correction=correction)
    assert found == about((1.9 + 0.1 * total) / 5)
    assert metrics["kl"] == about(total / 5)
    plain, found = run(), run(ref=REF, kl_estimator=estimator, kl_correction=correction)
    assert found[0] == plain[0] and torch.equal(found[1], plain[1])  # without a coefficient it is measured
    assert found[2]["kl"] == metrics["kl"] and "kl" not in plain[2]
    logp = PROBS.log()
    logp[0, 0] = -math.inf
    found, _, metrics = run(logp=logp, ref=REF, kl_coef=0.1, kl_estimator=estimator, kl_correction=False)
    assert not math.isfinite(found) and not math.isfinite(metrics["kl"])  # seen, not hidden


@pytest.mark.parametrize("estimator", ["k3", "k2"])
def test_corrected_kl_has_the_gradient_of_the_reverse_kl(estimator):
    """Enumerated: over what the OLD policy samples, its mean is the gradient of KL(policy, reference)."""
    logits = tensor([0.3, -1.0, 0.8, 0.1], requires_grad=True)
    old = tensor([0.0, 0.5, -0.2, 1.0]).log_softmax(0)
    ref = tensor([1.0, 0.0, 0.0, -1.0]).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]
    sampled = LossSettings(kl_coef=1.0, kl_estimator=estimator, kl_correction=True)
    one, found = StepCounts(rows=1, tokens=1, max_length=1), torch.zeros_like(exact)
    for token in range(4):
        logs = (each[token].view(1, 1) for each in (logp, old, ref))
        loss, _ = grpo_loss(*logs, tensor([0.0]), torch.ones(1, 1).bool(), counts=one, settings=sampled)
        found += old[token].exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-14)


def test_metrics_by_hand():
    """Clipped are the second row's second token, below, and the first row's first, above."""
    assert run()[2] == about(
        {
            "ratio/mean": 1.0,
            "ratio/min": 0.5,
            "ratio/max": 1.5,
            "clip_ratio/low_mean": 1 / 5,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 5,
            "clip_ratio/high_max": 1 / 3,
            "clip_ratio/region_mean": 2 / 5,
        }
    )
    found, grad, metrics = run(old=None)  # on policy the ratio is one, and still teaches
    assert found == about((-3 + 4) / 5) and metrics["ratio/min"] == metrics["ratio/max"] == 1
    exactly(grad, tensor([[-1.0] * 3, [2.0, 2.0, 0.0]]) / 5)


def test_padding_has_no_ratio_and_an_empty_row_no_share():
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    logp = tensor([[1.5, 1, 1], [1, 2, 1], [1, 1, 1]]).log()
    zeros = torch.zeros_like(logp)
    _, _, metrics = run(logp=logp, old=zeros, mask=mask, advantages=tensor([1.0, 1.0, 1.0]))
    assert metrics["ratio/min"] == about(1.5)  # padding's would be 1
    _, _, metrics = run(logp=-logp, old=zeros, mask=mask, advantages=tensor([-1.0, -1.0, -1.0]))
    assert metrics["ratio/max"] == about(1 / 1.5)
    assert metrics["clip_ratio/low_min"] == 1.0  # the empty row's would be 0


def test_importance_weights_are_truncated_and_multiply_the_policy_term_only():
    weights = tensor([[2.0, 1.0, 1.0], [1.0, 0.5, math.nan]])
    found, _, _ = run(ref=REF, kl_coef=0.1, kl_correction=False, weights=weights)
    assert found == about((2 * -1.2 - 1 - 0.5 + 3 + 0.5 * 1.6 + 0.1 * LN2) / 5)
    per_row = tensor([[2.0], [0.5]])
    assert run(weights=per_row)[0] == about((2 * -2.7 + 0.5 * 4.6) / 5)
    logp, sampler = tensor([[0.2, 0.5]]).log(), tensor([[0.4, 0.1]]).log()
    weights = truncated_importance_weights(logp, sampler, cap=2.0)
    assert weights.tolist() == [about([0.5, 2.0])]


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kl", "corrected"), [("k3", True), ("k3", False), ("k2", True)])
def test_what_is_masked_is_never_read_and_an_empty_row_only_counts_as_a_row(loss_type, level, kl, corrected):
    """A third row without a token; it and the padding hold any junk, each kind in each place in turn."""
    changes = {"loss_type": loss_type, "importance_level": level, "kl_coef": 0.1}
    changes |= {"kl_estimator": kl, "kl_correction": corrected}
    counts = dataclasses.replace(COUNTS, rows=3)
    mask = torch.cat([MASK, torch.zeros_like(MASK[:1])])

    def with_junk(values, junk):
        return torch.cat([values, values[:1]]).masked_scatter(mask == 0, tensor(junk))

    def three_rows(junk):
        given = {"old": OLD, "ref": REF, "weights": torch.ones_like(OLD)}
        return run(
            with_junk(PROBS.log(), junk),
            mask=mask,
            advantages=tensor([1.0, -2.0, 3.0]),
            counts=counts,
            **{name: with_junk(values, junk) for name, values in given.items()},
            **changes,
        )

    loss, grad, metrics = three_rows([0.0] * 4)
    alone, grad_alone, _ = run(ref=REF, counts=counts, **changes)
    assert loss == about(alone) and all(map(math.isfinite, metrics.values()))
    exactly(grad[:2], grad_alone)
    assert (grad[mask == 0] == 0).all()
    junk = [math.nan, math.inf, -math.inf, 1e30]
    for turn in range(4):
        dirty = three_rows(junk[turn:] + junk[:turn])
        assert dirty[0] == loss and dirty[2] == metrics and torch.equal(dirty[1], grad)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_without_advantage_teaches_nothing_whatever_its_logs(loss_type, level):
    changes = {"advantages": tensor([0.0, -2.0]), "loss_type": loss_type, "importance_level": level}
    alone, grad_alone, _ = run(**changes)
    assert (grad_alone[0] == 0).all()
    for new, old in ((-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)):
        logp, old_logp = PROBS.log().clone(), OLD.clone()
        logp[0, 1], old_logp[0, 1] = new, old
        found, grad, _ = run(logp=logp, old=old_logp, **changes)
        assert found == alone and torch.equal(grad, grad_alone)


@examples(200)
@given(
    st.builds(
        LossSettings,
        loss_type=st.sampled_from(LOSSES),
        importance_level=st.sampled_from(LEVELS),
        kl_coef=st.sampled_from([0.0, 0.04]),
        kl_estimator=st.sampled_from(["k2", "k3"]),
        kl_correction=st.booleans(),
    ),
    st.sampled_from([None, 1.5]),
    st.integers(1, 7),
    st.integers(1, 6),
    st.booleans(),
    st.lists(st.integers(0, 7), max_size=4),
    st.integers(0, 2**32),
)
def test_i1_a_split_changes_neither_loss_nor_metrics(chosen, dual_clip, rows, tokens, by_field, cuts, seed):
    """Invariance I1: micro-batches of any sizes and order, empty ones too, add up to the step."""
    generator = torch.Generator().manual_seed(seed)
    if chosen.loss_type != "cispo":
        chosen = dataclasses.replace(chosen, dual_clip=dual_clip)
    mask = torch.arange(tokens) < torch.randint(0, tokens + 1, (rows, 1), generator=generator)
    logp, old, ref = -torch.rand(3, rows, tokens, dtype=torch.float64, generator=generator) * 2
    by_field &= chosen.importance_level == "token"  # advantages of each token
    shape = (rows, tokens) if by_field else (rows,)
    advantages = torch.randn(shape, dtype=torch.float64, generator=generator)
    advantages[torch.rand(rows, generator=generator) < 0.2] = 0
    counts, others = counts_of(mask, max_length=8), (old, ref, advantages, mask)

    def accumulate(parts):
        leaf = logp.clone().requires_grad_()
        total, metrics = 0.0, {}
        for part in parts:
            loss, new = grpo_loss(leaf[part], *(x[part] for x in others), counts=counts, settings=chosen)
            loss.backward()
            total += loss.item()
            metrics = merge_metrics(metrics, new)
        return total, leaf.grad, finish_metrics(metrics)

    whole = accumulate([torch.arange(len(logp))])
    order = torch.randperm(rows, generator=generator)
    split = accumulate(order.tensor_split(sorted(cuts)))
    assert split[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-12, atol=1e-12)
    assert split[2] == pytest.approx(whole[2], rel=1e-12, abs=1e-12, nan_ok=True)


def test_counts_are_of_the_whole_step_and_one_without_any_token_is_zero_and_says_nothing():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert counts_of(mask, max_length=144) == StepCounts(rows=3, tokens=3, max_length=144)
    found, grad, metrics = run(mask=torch.zeros_like(MASK), counts=StepCounts(rows=2, tokens=0, max_length=4))
    assert found == 0 and (grad == 0).all()
    assert all(map(math.isnan, metrics.values()))
    assert finish_metrics(merge_metrics({}, {})) == {}  # a process that had no rows at all
    half = (each.bfloat16() for each in (PROBS.log(), OLD, REF, ADVANTAGES))  # computed in fp32
    loss, metrics = grpo_loss(*half, MASK, counts=COUNTS, settings=LossSettings())
    assert loss.dtype == metrics["ratio/mean"].dtype == torch.float32


@pytest.mark.parametrize(("kl", "factor"), [(0.11, 1.01), (0.09, 0.99), (9.0, 1.02), (0.0, 0.98)])
def test_adaptive_kl_by_hand(kl, factor):
    """A tenth of how far it is from 0.1, which is clipped to 20 %."""
    assert adaptive_kl(0.02, kl, 0.1) == about(0.02 * factor)
