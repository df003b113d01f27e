import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.learning.loss import (
    LossSettings,
    StepCounts,
    adaptive_kl,
    finish_metrics,
    grpo_loss,
    loss_counts,
    merge_metrics,
    truncated_importance_weights,
)

LN2 = math.log(2)
tensor = partial(torch.tensor, dtype=torch.float64)
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
    assert found == pytest.approx(loss, abs=1e-15)
    # clipped tokens teach nothing; the others their ratio times minus the advantage
    expected = tensor([[0.0, -1.0, -0.5], [3.0, 0.0, 0.0]]) * tensor(share).unsqueeze(1)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)


def test_cispo_by_hand():
    found, grad, metrics = run(loss_type="cispo", clip_range_high=1.2)
    row_1 = 1.2 * math.log(0.6) + math.log(0.5) + 0.5 * math.log(0.25)
    row_2 = 1.2 * math.log(0.75) + 0.5 * math.log(0.4)
    assert found == pytest.approx((-row_1 + 2 * row_2) / 5, abs=1e-15)
    expected = tensor([[-1.2, -1.0, -0.5], [2.4, 1.0, 0.0]]) / 5
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)
    assert metrics["cispo_clip_ratio"] == 1 / 5  # only where the advantage is positive
    assert "clip_ratio/low_mean" not in metrics


def test_cispo_clips_nothing_at_its_default_cap():
    assert run(loss_type="cispo")[0] == run(loss_type="cispo", clip_range_high=1.5)[0]
    assert LossSettings(loss_type="cispo").ratio_high == 5.0


def test_sequence_ratios_by_hand():
    ratio_1, ratio_2 = 0.75 ** (1 / 3), 0.75**0.5  # geometric means, both inside the clip
    found, grad, metrics = run(loss_type="grpo", importance_level="sequence")
    assert found == pytest.approx((-ratio_1 + 2 * ratio_2) / 2, abs=1e-15)
    expected = tensor([[-ratio_1 / 3] * 3, [2 * ratio_2 / 2] * 2 + [0.0]]) / 2
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)
    assert run(importance_level="sequence")[0] == pytest.approx((-3 * ratio_1 + 4 * ratio_2) / 5, abs=1e-15)
    assert metrics["ratio/mean"] == pytest.approx((ratio_1 + ratio_2) / 2)
    assert metrics["ratio/min"] == pytest.approx(ratio_2)


def test_upper_clip_and_dual_clip_by_hand():
    assert run(clip_range_high=0.4)[0] == pytest.approx((-1.4 - 1.5 + 4.6) / 5, abs=1e-15)
    found, grad, metrics = run(dual_clip=1.25)
    assert found == pytest.approx((-2.7 + 2.5 + 1.6) / 5, abs=1e-15)  # 3 became 2 * 1.25
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
    assert found == pytest.approx((1.9 + 0.1 * total) / 5, abs=1e-15)
    assert metrics["kl"] == pytest.approx(total / 5, abs=1e-15)


def test_without_coefficient_kl_is_measured_and_nothing_else():
    plain, plain_grad, _ = run()
    found, grad, metrics = run(ref=REF, kl_correction=False)
    assert found == plain and torch.equal(grad, plain_grad)
    assert metrics["kl"] == pytest.approx(LN2 / 5)
    assert "kl" not in run()[2]


@pytest.mark.parametrize(("estimator", "correction"), [("k3", True), ("k2", True)])
def test_corrected_kl_has_the_gradient_of_the_reverse_kl(estimator, correction):
    """Enumerated: over what the OLD policy samples, its mean is the gradient of KL(policy, reference)."""
    logits = tensor([0.3, -1.0, 0.8, 0.1], requires_grad=True)
    old = tensor([0.0, 0.5, -0.2, 1.0]).log_softmax(0)
    ref = tensor([1.0, 0.0, 0.0, -1.0]).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits)[0]

    tokens = logits.log_softmax(0).unsqueeze(1)  # (4, 1): every token once
    mask = torch.ones(4, 1, dtype=torch.bool)
    sampled = LossSettings(kl_coef=1.0, kl_estimator=estimator, kl_correction=correction)
    zeros = torch.zeros(4, dtype=torch.float64)
    found = torch.zeros_like(exact)
    for token in range(4):
        one = slice(token, token + 1)
        loss, _ = grpo_loss(
            tokens[one], old[one, None], ref[one, None], zeros[one], mask[one],
            counts=StepCounts(rows=1, tokens=1, max_length=1), settings=sampled,
        )  # fmt: skip
        found += old[token].exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-14)


def test_metrics_by_hand():
    assert run()[2] == pytest.approx(
        {
            "ratio/mean": 1.0,
            "ratio/min": 0.5,
            "ratio/max": 1.5,
            "clip_ratio/low_mean": 1 / 5,  # row 2, token 2
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 5,  # row 1, token 1
            "clip_ratio/high_max": 1 / 3,
            "clip_ratio/region_mean": 2 / 5,
        }
    )


def test_padding_has_no_ratio_and_an_empty_row_no_share():
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    logp = tensor([[1.5, 1, 1], [1, 2, 1], [1, 1, 1]]).log()
    zeros = torch.zeros_like(logp)
    _, _, metrics = run(logp=logp, old=zeros, mask=mask, advantages=tensor([1.0, 1.0, 1.0]))
    assert metrics["ratio/min"] == pytest.approx(1.5)  # padding's would be 1
    _, _, metrics = run(logp=-logp, old=zeros, mask=mask, advantages=tensor([-1.0, -1.0, -1.0]))
    assert metrics["ratio/max"] == pytest.approx(1 / 1.5)
    assert metrics["clip_ratio/low_min"] == 1.0  # the empty row's would be 0


def test_without_old_logp_the_ratio_is_one_and_still_teaches():
    found, grad, metrics = run(old=None)
    assert found == pytest.approx((-3 + 4) / 5)
    expected = tensor([[-1.0] * 3, [2.0, 2.0, 0.0]]) / 5
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1


def test_importance_weights_multiply_the_policy_term_only():
    weights = tensor([[2.0, 1.0, 1.0], [1.0, 0.5, math.nan]])
    found, _, _ = run(ref=REF, kl_coef=0.1, kl_correction=False, weights=weights)
    assert found == pytest.approx((2 * -1.2 - 1 - 0.5 + 3 + 0.5 * 1.6 + 0.1 * LN2) / 5, abs=1e-15)
    per_row = tensor([[2.0], [0.5]])
    assert run(weights=per_row)[0] == pytest.approx((2 * -2.7 + 0.5 * 4.6) / 5, abs=1e-15)


def test_truncated_importance_weights():
    sampler = torch.tensor([[0.4, 0.1, math.nan]]).log()
    weights = truncated_importance_weights(
        torch.tensor([[0.2, 0.5, 1.0]]).log(), sampler, torch.tensor([[True, True, False]]), cap=2.0
    )
    assert weights.tolist() == [pytest.approx([0.5, 2.0, 1.0])]


EVERY_LOSS = [
    {
        "loss_type": loss_type,
        "importance_level": level,
        "kl_estimator": kl,
        "kl_coef": 0.1,
        "kl_correction": on,
    }
    for loss_type in ("grpo", "dapo", "dr_grpo", "cispo")
    for level in ("token", "sequence")
    for kl, on in (("k3", True), ("k3", False), ("k2", True))
]


@pytest.mark.parametrize("changes", EVERY_LOSS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_is_never_read(changes, junk):
    def spoiled(values):
        return torch.where(MASK.bool(), values, junk)

    clean = run(ref=REF, weights=torch.ones_like(OLD), **changes)
    dirty = run(
        logp=spoiled(PROBS.log()),
        old=spoiled(OLD),
        ref=spoiled(REF),
        weights=spoiled(torch.ones_like(OLD)),
        **changes,
    )
    assert dirty[0] == clean[0] and dirty[2] == clean[2]
    assert torch.equal(dirty[1], clean[1])
    assert dirty[1][1, 2] == 0


@pytest.mark.parametrize("changes", EVERY_LOSS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_row_without_tokens_adds_nothing_but_counts_as_a_row(changes):
    def longer(values, fill):
        return torch.cat([values, torch.full_like(values[:1], fill)])

    counts = dataclasses.replace(COUNTS, rows=3)
    with_empty, grad, metrics = run(
        logp=longer(PROBS.log(), math.nan), old=longer(OLD, 0.0), ref=longer(REF, 0.0), mask=longer(MASK, 0),
        advantages=tensor([1.0, -2.0, 3.0]), counts=counts, **changes,
    )  # fmt: skip
    assert with_empty == pytest.approx(run(ref=REF, counts=counts, **changes)[0], abs=1e-15)
    assert (grad[2] == 0).all()
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("new", "old"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_a_row_without_advantage_teaches_nothing_whatever_its_logs(loss_type, level, new, old):
    logp, old_logp = PROBS.log().clone(), OLD.clone()
    logp[0, 1], old_logp[0, 1] = new, old
    found, grad, _ = run(
        logp=logp, old=old_logp, advantages=tensor([0.0, -2.0]), loss_type=loss_type, importance_level=level
    )
    alone, grad_alone, _ = run(advantages=tensor([0.0, -2.0]), loss_type=loss_type, importance_level=level)
    assert found == alone
    assert (grad[0] == 0).all() and torch.equal(grad, grad_alone)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_that_is_not_finite_is_seen(estimator):
    logp = PROBS.log()
    logp[0, 0] = -math.inf
    found, _, metrics = run(logp=logp, ref=REF, kl_coef=0.1, kl_estimator=estimator, kl_correction=False)
    assert not math.isfinite(found) and not math.isfinite(metrics["kl"])


def test_half_precision_is_computed_in_fp32():
    args = (OLD.bfloat16(), None, ADVANTAGES.bfloat16(), MASK)
    loss, metrics = grpo_loss(
        PROBS.log().bfloat16(), *args, counts=COUNTS, settings=LossSettings(kl_coef=0.0)
    )
    assert loss.dtype == metrics["ratio"].dtype == torch.float32


@st.composite
def steps(draw):
    """A random step, in float64, with rows of any length and random cuts into micro-batches."""
    rows, tokens = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows)))
    mask = torch.arange(tokens) < lengths.unsqueeze(1)
    logp, old, ref = -torch.rand(3, rows, tokens, dtype=torch.float64, generator=generator) * 2
    advantages = torch.randn(rows, dtype=torch.float64, generator=generator)
    advantages[torch.rand(rows, generator=generator) < 0.2] = 0
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    order = torch.randperm(rows, generator=generator)
    chosen = LossSettings(
        loss_type=(loss_type := draw(st.sampled_from(["grpo", "dapo", "dr_grpo", "cispo"]))),
        importance_level=draw(st.sampled_from(["token", "sequence"])),
        kl_coef=draw(st.sampled_from([0.0, 0.04])),
        kl_estimator=draw(st.sampled_from(["k2", "k3"])),
        kl_correction=draw(st.booleans()),
        dual_clip=None if loss_type == "cispo" else draw(st.sampled_from([None, 1.5])),
    )
    return (logp, old, ref, advantages, mask), cuts, order, chosen


@settings(max_examples=200, deadline=None)
@given(steps())
def test_a_split_changes_neither_loss_nor_gradient_nor_metrics(step):
    """Invariance I1: micro-batches of any sizes and order, empty ones too, add up to the step."""
    (logp, *others), cuts, order, chosen = step
    counts = loss_counts(others[-1], max_length=8)

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
    split = accumulate(order.tensor_split(cuts))
    assert split[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-12, atol=1e-12)
    assert split[2] == pytest.approx(whole[2], rel=1e-12, abs=1e-12, nan_ok=True)


def test_counts_are_of_the_whole_step():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert loss_counts(mask, max_length=144) == StepCounts(rows=3, tokens=3, max_length=144)


def test_a_step_without_any_token_is_zero_and_says_nothing():
    found, grad, metrics = run(mask=torch.zeros_like(MASK), counts=StepCounts(rows=2, tokens=0, max_length=4))
    assert found == 0 and (grad == 0).all()
    assert all(map(math.isnan, metrics.values()))
    assert finish_metrics(merge_metrics({}, {})) == {}  # a process that had no rows at all


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_type": "ppo"}, "grpo, dapo, dr_grpo, cispo"),
        ({"importance_level": "row"}, "token, sequence"),
        ({"kl_estimator": "k1"}, "k3, k2"),
        ({"clip_range": 0.0}, "between 0 and 1"),
        ({"clip_range": math.nan}, "between 0 and 1"),
        ({"clip_range_high": -0.1}, "above 0"),
        ({"loss_type": "cispo", "clip_range_high": 0.28}, "cap on the ratio itself"),
        ({"loss_type": "cispo", "dual_clip": 3.0}, "no meaning for cispo"),
        ({"dual_clip": 1.1}, "above the upper clip, 1.2"),
        ({"kl_coef": -1.0}, "0 or more"),
        ({"kl_coef": math.inf}, "0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_explained(changes, says):
    with pytest.raises(ValueError, match=says):
        LossSettings(**changes)


def test_inputs_that_do_not_fit_are_explained():
    with pytest.raises(ValueError, match="ref_logp is None"):
        run(kl_coef=0.1)
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        run(advantages=ADVANTAGES.unsqueeze(1))
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        run(old=OLD[:, :1])


def test_adaptive_kl_by_hand():
    assert adaptive_kl(0.02, 0.11, 0.1) == pytest.approx(0.02 * 1.01)  # 10 % too high
    assert adaptive_kl(0.02, 0.09, 0.1) == pytest.approx(0.02 * 0.99)
    assert adaptive_kl(0.02, 9.0, 0.1) == pytest.approx(0.02 * 1.02)  # clipped to 20 %
    assert adaptive_kl(0.02, 0.0, 0.1) == pytest.approx(0.02 * 0.98)
    with pytest.raises(ValueError, match="above 0"):
        adaptive_kl(0.02, 0.1, 0.0)
    with pytest.raises(ValueError, match="skipped"):
        adaptive_kl(0.02, math.nan, 0.1)
