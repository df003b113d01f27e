"""Our loss, its gradient and its metrics against TRL's own `GRPOTrainer._compute_loss`.

A real trainer with a tiny model in float64; where log-probs are given, only the model's forward is replaced.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from padded_loss import counts_of, grpo_loss
from trl_cases import LENGTH, Case, Stock, make

from grpo.config.groups import LossSettings
from grpo.learning.loss import truncated_importance_weights
from grpo.learning.metrics import finish_metrics
from grpo.scoring.head import chunked_lm_head

R, C = 6, LENGTH


@pytest.fixture(scope="module")
def trainer():
    made = make(Stock, Case())
    made.current_gradient_accumulation_steps = 1  # `train` sets it
    yield made
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trl_loss(trainer, settings, inputs):
    """`_compute_loss` as a GRPOConfig of these settings would have it, and what it logs."""
    trainer.loss_type = settings.loss_type
    trainer.importance_sampling_level = settings.importance_level
    trainer.beta = settings.kl_coef
    trainer.epsilon_low = trainer.epsilon_high = settings.clip_range
    if settings.clip_range_high is not None:
        trainer.epsilon_high = settings.clip_range_high
    trainer.args.delta = settings.dual_clip
    trainer.args.use_bias_correction_kl = settings.kl_correction
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: value for name, (value,) in trainer._metrics["train"].items()}


def step_of(completion_ids, mask, advantages, old, ref):
    """A step as TRL is given it, with prompts of two tokens."""
    two = torch.ones(R, 2, dtype=torch.long)
    return {
        "prompt_ids": two,
        "prompt_mask": two,
        "completion_ids": completion_ids,
        "advantages": advantages,
        "completion_mask": mask.long(),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }


def ragged_step():
    """Rows of 4, all, 1, no (truncated and masked out), 5 and 3 tokens, far off policy; in float64."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(C) < torch.tensor([[4], [C], [1], [0], [5], [3]])
    logp, drift, distance = torch.randn(3, R, C, dtype=torch.float64, generator=generator)
    logp = -logp.abs()
    old = logp + 0.4 * drift
    old[4] -= 0.5  # so that sequence ratios leave the clip too, on both sides
    old[5] += 0.5
    advantages = torch.tensor([1.2, -0.7, 0.5, 2.0, 0.9, -1.3], dtype=torch.float64)
    return logp, old, logp + 0.5 * distance, advantages, mask


def compare(monkeypatch, trainer, settings, *, on_policy=False, sampler=None):
    """Assert that loss, gradient and metrics are equal; return the metrics."""
    logp, old, ref, advantages, mask = ragged_step()
    ones = torch.ones(R, C, dtype=torch.long)
    inputs = step_of(ones, mask, advantages, None if on_policy else old, ref)
    weights = None
    if sampler is not None:
        weights = truncated_importance_weights(old, sampler, cap=1.3)
        # as TRL has it where it scores a rollout ("token_truncate")
        inputs["importance_sampling_ratio"] = torch.exp((old - sampler) * mask).clamp(max=1.3)

    theirs = logp.clone().requires_grad_()
    answer = theirs, torch.ones_like(logp), None  # of the model's forward: these, and an entropy of 1
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: answer)
    their_loss, their_metrics = trl_loss(trainer, settings, inputs)
    their_loss.backward()

    ours = logp.clone().requires_grad_()
    loss, sums = grpo_loss(
        ours,
        inputs["old_per_token_logps"],
        ref if settings.kl_coef else None,
        advantages,
        mask,
        counts=counts_of(mask, LENGTH),
        settings=settings,
        importance_weights=weights,
    )
    loss.backward()

    assert theirs.grad.abs().max() > 1e-3
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-10, abs=1e-10)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    metrics = finish_metrics(sums)
    assert their_metrics.pop("entropy") == 1  # logged by the loop, not by the loss
    assert {name: metrics[name] for name in their_metrics} == pytest.approx(their_metrics, rel=1e-6)
    return metrics


EVERY = list(product(("grpo", "dapo", "dr_grpo", "cispo"), ("token", "sequence")))
KLS = (0.0, True), (0.04, True), (0.04, False)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize(("loss_type", "level"), EVERY)
def test_loss_gradient_and_metrics(monkeypatch, trainer, loss_type, level, on_policy):
    """Each loss and level with two of the three KLs, and each KL with every loss."""
    kl_coef, correction = KLS[(EVERY.index((loss_type, level)) + on_policy) % 3]
    settings = LossSettings(
        loss_type=loss_type,
        importance_level=level,
        kl_coef=kl_coef,
        kl_correction=correction,
        clip_range_high=1.1 if loss_type == "cispo" else 0.28,
    )
    metrics = compare(monkeypatch, trainer, settings, on_policy=on_policy)
    clipped = [value for name, value in metrics.items() if name.endswith(("_mean", "cispo_clip_ratio"))]
    assert all((share > 0) != on_policy for share in clipped)  # the clips were really reached


@pytest.mark.parametrize(("loss_type", "level"), EVERY)
def test_truncated_importance_weights_one_clip_range_and_dual_clip(monkeypatch, trainer, loss_type, level):
    _, old, *_ = ragged_step()
    sampler = old + 0.5 * torch.randn(R, C, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    cap = 5.0 if loss_type == "cispo" else None  # TRL's default would be a cap of 0.2
    settings = LossSettings(loss_type=loss_type, importance_level=level, clip_range_high=cap)
    compare(monkeypatch, trainer, settings, sampler=sampler)
    if loss_type != "cispo":
        metrics = compare(monkeypatch, trainer, replace(settings, dual_clip=1.21))  # which is TRL's delta
        assert level == "sequence" or metrics["clip_ratio/dual_mean"] > 0


def test_parameter_gradients_through_the_model_and_the_chunked_head(trainer):
    """TRL's forward, a plain head and TRL's loss against our head and loss."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(8, (R, 2 + C), generator=generator)
    _, _, _, advantages, mask = ragged_step()
    attention = torch.cat([torch.ones(R, 2, dtype=torch.long), mask.long()], dim=1)
    settings = LossSettings(kl_coef=0.04)
    model = trainer.model.train()

    hidden = model.transformer(input_ids=ids, attention_mask=attention).last_hidden_state[:, 1:-1]
    hidden = hidden[mask]
    head = model.lm_head.weight, ids[:, 2:][mask]

    def padded(values):
        return values.new_zeros(R, C).index_put((mask,), values)

    found = chunked_lm_head(hidden.detach(), *head, chunk_tokens=4, entropy=True)
    logp = padded(found.logp)
    old = logp + 0.3 * torch.randn(R, C, generator=generator)
    ref = logp + 0.3 * torch.randn(R, C, generator=generator)
    inputs = step_of(ids[:, 2:], mask, advantages, old, ref) | {"prompt_ids": ids[:, :2]}

    def gradients():
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    their_loss, their_metrics = trl_loss(trainer, settings, inputs)
    model.zero_grad()
    their_loss.backward()
    theirs = gradients()
    model.zero_grad()
    leaf = logp.requires_grad_()
    loss, _ = grpo_loss(leaf, old, ref, advantages, mask, counts=counts_of(mask, LENGTH), settings=settings)
    loss.backward()
    slope = leaf.grad[mask]
    again = chunked_lm_head(hidden.detach(), *head, chunk_tokens=4, slope=lambda _, part: slope[part])
    hidden.backward(again.hidden_gradient)
    ours = gradients()
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-10)
    assert (ours - theirs).norm() < 1e-10 * theirs.norm()
    assert (found.entropy.sum() / mask.sum()).item() == pytest.approx(their_metrics["entropy"], rel=1e-10)
