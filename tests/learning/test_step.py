"""A step happens whole or not at all, and what is not finite is none."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from whole_runs import metrics_of, train

from grpo.data.reward_functions import Scores
from grpo.learning.step import Diverged, GuardedOptimizer
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")


def make(max_grad_norm: float = 0.0) -> tuple[nn.Linear, GuardedOptimizer]:
    """A weight of two numbers, [1, 2], under plain gradient descent at rate 0.1."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0]])
    return model, GuardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm)


def giving(model: nn.Linear, gradient: tuple[float, float], **metrics: float):
    """A pass over micro-batches: two backward calls, then metrics."""

    def accumulate() -> dict[str, float]:
        for _ in range(2):
            (model.weight * torch.tensor([gradient]) / 2).sum().backward()
        return {"loss": 0.5, **metrics}

    return accumulate


def test_a_step_applies_the_accumulated_gradient_and_forgets_it():
    """Numbers that were in .grad before are no part of it."""
    model, guarded = make()
    model.weight.grad = torch.tensor([[100.0, 100.0]])
    metrics = guarded.step(giving(model, (3.0, 4.0), kl=0.1))
    assert torch.allclose(model.weight, torch.tensor([[0.7, 1.6]]))
    assert metrics == {"loss": 0.5, "kl": 0.1, "grad_norm": pytest.approx(5.0), "skipped": 0.0}
    assert model.weight.grad is None
    # Clipped to a norm of 1: (0.6, 0.8). The norm before is what is reported; below it nothing changes.
    model, guarded = make(max_grad_norm=1.0)
    assert guarded.step(giving(model, (3.0, 4.0)))["grad_norm"] == pytest.approx(5.0)
    assert torch.allclose(model.weight, torch.tensor([[0.94, 1.92]]))
    guarded.step(giving(model, (0.3, 0.4)))
    assert torch.allclose(model.weight, torch.tensor([[0.91, 1.88]]))


@pytest.mark.parametrize(
    ("where", "value", "max_grad_norm"),
    [
        ("loss", math.nan, 0.0),
        ("loss", math.inf, 1.0),
        ("kl", math.nan, 1.0),
        ("kl", -math.inf, 0.0),
        ("grad_norm", math.nan, 0.0),
        ("grad_norm", math.inf, 1.0),
    ],
)
def test_a_step_that_is_not_finite_is_skipped_counted_and_reported(logged, value, where, max_grad_norm):
    """Nor do Adam's moments move."""
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters())
    guarded = GuardedOptimizer(model, optimizer, max_grad_norm)
    guarded.step(giving(model, (3.0, 4.0)))
    weight = model.weight.detach().clone()
    moments = {name: moment.clone() for name, moment in optimizer.state[model.weight].items()}
    broken = ((value, 4.0), {}) if where == "grad_norm" else ((3.0, 4.0), {where: value})
    metrics = guarded.step(giving(model, broken[0], **broken[1]))
    assert torch.equal(model.weight, weight) and model.weight.grad is None
    assert all(torch.equal(optimizer.state[model.weight][name], moment) for name, moment in moments.items())
    assert metrics["skipped"] == 1.0 and guarded.num_skipped == 1
    assert any(f"step skipped: {where} is " in line and "1 skipped" in line for line in logged)


def test_three_in_a_row_end_the_run_two_do_not():
    model, guarded = make()
    good, bad = giving(model, (3.0, 4.0)), giving(model, (3.0, 4.0), loss=math.nan)
    for accumulate in (bad, bad, good, bad, bad):
        metrics = guarded.step(accumulate)
        assert metrics["skipped"] == (accumulate is bad)
    with pytest.raises(Diverged, match=r"3 steps in a row .*loss is nan.*--learning-rate.*--kl-coef"):
        guarded.step(bad)
    assert guarded.num_skipped == 5
    assert torch.allclose(model.weight, torch.tensor([[0.7, 1.6]]))
    with pytest.raises(Diverged, match="4 steps in a row"):  # a count from a checkpoint is no fresh start
        guarded.step(bad)


def noting(seen: list, prepare: Callable[[Trainer], object]) -> Callable[[Trainer], None]:
    """For `train`: prepares, and notes the trainer and its weights before the first step."""

    @torch.no_grad()
    def prepare_and_note(trainer: Trainer) -> None:
        prepare(trainer)
        seen.extend((trainer, [p.clone() for p in trainer.model.parameters()]))

    return prepare_and_note


def test_a_model_whose_logits_are_nan_ends_with_diverged_and_a_checkpoint(config, logged):
    """Weights that are finite but absurd: sampling survives them, three steps are skipped, then the end.

    One bad rollout is one skipped step, however often it would be learned from.
    """
    seen: list = []
    absurd = noting(seen, lambda trainer: trainer.model.transformer.wte.weight.fill_(3e38))
    with pytest.raises(Diverged):
        train(replace(config, steps=9, num_iterations=4), absurd)
    trainer, before = seen
    assert trainer.finished == 2 and trainer.guarded.num_skipped == 3
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert [path.name for path in trainer.run.checkpoints.all()] == ["step-000002"]
    assert sum("step skipped" in line for line in logged) == 3


def test_a_skipped_step_does_not_move_the_adaptive_kl_coefficient(config):
    def spoil_the_kl(trainer: Trainer) -> None:
        step = trainer.guarded.step
        trainer.guarded.step = lambda accumulate: step(lambda: {**accumulate(), "kl": math.nan})

    seen: list = []
    train(replace(config, kl_target=1e-6), noting(seen, spoil_the_kl))
    assert seen[0].guarded.num_skipped == 2 and seen[0].kl_coef == config.kl_coef


def test_with_the_kl_in_the_reward_metrics_are_of_the_rewards_alone(config, monkeypatch, logged):
    """All rewards equal: their deviation is none, whatever the KL; and a warning says where that leads."""
    leave_the_reference = noting([], lambda trainer: trainer.model.lm_head.weight.mul_(1.1))
    monkeypatch.setattr(Scores, "rewards", property(lambda self: torch.zeros(len(self.table))))
    folder = train(replace(config, steps=3, kl_in_reward=True, learning_rate=0.01), leave_the_reference)
    lines = metrics_of(folder)
    assert len(lines) == 3 and any(line["grad_norm"] > 0 for line in lines)  # the KL's
    assert all((line["reward"], line["reward_std"]) == (0, 0) for line in lines)
    assert all(line["frac_reward_zero_std"] == 1 for line in lines)
    assert sum("--advantage-scale batch or none" in line for line in logged) == 1


def test_a_step_without_a_token_to_learn_from_is_no_error(config):
    """All completions cut, and cut ones masked: nothing is learned, nothing breaks."""
    seen: list = []
    config = replace(
        config, steps=1, mask_truncated=True, kl_target=0.1, max_new_tokens=1, top_k=1, learning_rate=1.0
    )
    train(config, noting(seen, lambda trainer: trainer.model.lm_head.weight[0].zero_()))  # none ends
    trainer, before = seen
    assert trainer.finished == 1 and all(map(torch.equal, before, trainer.model.parameters()))
