import dataclasses
import math

import pytest
import torch
from rich.console import Console
from torch import nn

from grpo.config.groups import OptimizerSettings
from grpo.data.reward_functions import Scores
from grpo.learning.step import Diverged, Stepper
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")


def make(max_grad_norm: float = 0.0) -> tuple[nn.Linear, Stepper]:
    """A weight of two numbers, [1, 2], under plain gradient descent at rate 0.1."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0]])
    return model, Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm)


def giving(model: nn.Linear, gradient: tuple[float, float], **metrics: float):
    """What a pass over the micro-batches does: two backward calls, then metrics."""

    def accumulate() -> dict[str, float]:
        for _ in range(2):
            (model.weight * torch.tensor([gradient]) / 2).sum().backward()
        return {"loss": 0.5, **metrics}

    return accumulate


def test_a_step_applies_the_accumulated_gradient_and_forgets_it():
    model, stepper = make()
    metrics = stepper.step(giving(model, (3.0, 4.0), kl=0.1))
    assert torch.allclose(model.weight, torch.tensor([[0.7, 1.6]]))
    assert metrics == {"loss": 0.5, "kl": 0.1, "grad_norm": pytest.approx(5.0), "skipped": 0.0}
    assert model.weight.grad is None


def test_what_was_in_grad_before_is_no_part_of_a_step():
    model, stepper = make()
    model.weight.grad = torch.tensor([[100.0, 100.0]])
    stepper.step(giving(model, (3.0, 4.0)))
    assert torch.allclose(model.weight, torch.tensor([[0.7, 1.6]]))


def test_gradients_are_clipped_to_their_global_norm():
    """Norm 5 scaled to 1: (0.6, 0.8). The norm before clipping is what is reported."""
    model, stepper = make(max_grad_norm=1.0)
    metrics = stepper.step(giving(model, (3.0, 4.0)))
    assert torch.allclose(model.weight, torch.tensor([[0.94, 1.92]]))
    assert metrics["grad_norm"] == pytest.approx(5.0)
    stepper.step(giving(model, (0.3, 0.4)))  # below: left as it is
    assert torch.allclose(model.weight, torch.tensor([[0.91, 1.88]]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "kl", "gradient"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_step_that_is_not_finite_is_skipped_counted_and_reported(logged, value, where, max_grad_norm):
    model, stepper = make(max_grad_norm)
    gradient = (value, 4.0) if where == "gradient" else (3.0, 4.0)
    metrics = stepper.step(giving(model, gradient, **({where: value} if where != "gradient" else {})))
    assert torch.equal(model.weight, torch.tensor([[1.0, 2.0]]))
    assert model.weight.grad is None
    assert metrics["skipped"] == 1.0 and stepper.num_skipped == 1
    name = "grad_norm" if where == "gradient" else where
    assert any(f"step skipped: {name} is " in line and "1 skipped" in line for line in logged)


def test_adams_moments_do_not_move_either():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    stepper = Stepper(model, optimizer, 1.0)
    stepper.step(giving(model, (3.0, 4.0)))
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    stepper.step(giving(model, (math.nan, 4.0)))
    after = optimizer.state[model.weight]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_three_in_a_row_end_the_run_two_do_not():
    model, stepper = make()
    good, bad = giving(model, (3.0, 4.0)), giving(model, (3.0, 4.0), loss=math.nan)
    for accumulate in (bad, bad, good, bad, bad):
        metrics = stepper.step(accumulate)
        assert metrics["skipped"] == (accumulate is bad)
    with pytest.raises(Diverged, match=r"3 steps in a row .*loss is nan.*--learning-rate.*--kl-coef"):
        stepper.step(bad)
    assert stepper.num_skipped == 5
    assert torch.allclose(model.weight, torch.tensor([[0.7, 1.6]]))


def test_a_run_that_diverged_before_does_so_again_at_once():
    """The count is restored from the checkpoint: a fourth in a row is no fresh start."""
    model, stepper = make()
    stepper.skipped_in_a_row = 3
    with pytest.raises(Diverged, match="4 steps in a row"):
        stepper.step(giving(model, (3.0, 4.0), loss=math.nan))


def test_an_exception_in_the_middle_leaves_the_weights():
    model, stepper = make()

    def breaks() -> dict[str, float]:
        giving(model, (3.0, 4.0))()
        raise MemoryError

    with pytest.raises(MemoryError):
        stepper.step(breaks)
    assert torch.equal(model.weight, torch.tensor([[1.0, 2.0]]))
    stepper.step(giving(model, (3.0, 4.0)))  # and what it left in .grad does no harm
    assert torch.allclose(model.weight, torch.tensor([[0.7, 1.6]]))


# ------------------------------------------------------------------------------------- in a whole run


@pytest.mark.parametrize("num_iterations", [1, 4])
def test_a_model_whose_logits_are_nan_ends_with_diverged_and_a_checkpoint(config, logged, num_iterations):
    """Weights that are finite but absurd: sampling survives them, three steps are skipped, then the end.

    One bad rollout is one skipped step, however often it would be learned from.
    """
    config = dataclasses.replace(config, steps=9, checkpoint_interval=0, eval_interval=0)
    with open_run(dataclasses.replace(config, num_iterations=num_iterations)) as run:
        with torch.no_grad():
            run.policy.model.transformer.wte.weight.fill_(3e38)
        before = {name: p.clone() for name, p in run.policy.model.named_parameters()}
        trainer = Trainer(run, Console(quiet=True))
        with pytest.raises(Diverged):
            trainer.train(StopRequest())
        assert trainer.finished == 2 and trainer.stepper.num_skipped == 3
        assert all(torch.equal(p, before[name]) for name, p in run.policy.model.named_parameters())
        assert [path.name for path in run.checkpoints.all()] == ["step-000002"]
    assert sum("step skipped" in line for line in logged) == 3


def test_a_skipped_step_does_not_move_the_adaptive_kl_coefficient(config, monkeypatch):
    config = dataclasses.replace(config, steps=2, eval_interval=0, kl_target=1e-6)
    with open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        step = trainer.stepper.step
        monkeypatch.setattr(trainer.stepper, "step", lambda f: step(lambda: {**f(), "kl": math.nan}))
        trainer.train(StopRequest())
        assert trainer.kl_coef == config.loss.kl_coef


def test_with_the_kl_in_the_reward_metrics_are_of_the_rewards_alone(config, monkeypatch, logged):
    """All rewards equal: their deviation is none, whatever the KL; and a warning says where that leads."""
    config = dataclasses.replace(
        config, steps=3, eval_interval=0, kl_in_reward=True, optimizer=OptimizerSettings(learning_rate=0.01)
    )
    with open_run(config) as run:
        monkeypatch.setattr(Scores, "rewards", property(lambda self: torch.zeros(len(self.table))))
        with torch.no_grad():  # away from the reference
            run.policy.model.lm_head.weight.mul_(1.1)
        trainer = Trainer(run, Console(quiet=True))
        trainer.train(StopRequest())
        lines = [line for line in read_lines(run.folder / METRICS_FILE) if "reward" in line]
    assert any(line["grad_norm"] > 0 for line in lines)  # the KL's
    assert all((line["reward"], line["reward_std"]) == (0, 0) for line in lines)
    assert all(line["frac_reward_zero_std"] == 1 for line in lines)
    assert sum("--advantage-scale batch or none" in line for line in logged) == 1


def test_a_step_without_a_token_to_learn_from_is_no_error(config):
    """All completions cut, and cut ones masked: nothing is learned, nothing breaks."""
    config = dataclasses.replace(
        config, steps=1, eval_interval=0, mask_truncated=True, kl_target=0.1,
        sampling=dataclasses.replace(config.sampling, max_new_tokens=1, top_k=1),
        optimizer=OptimizerSettings(learning_rate=1.0),
    )  # fmt: skip
    with open_run(config) as run:
        with torch.no_grad():  # never the end
            run.policy.model.lm_head.weight[0] = 0
        before = [p.clone() for p in run.policy.model.parameters()]
        Trainer(run, Console(quiet=True)).train(StopRequest())
        assert all(map(torch.equal, before, run.policy.model.parameters()))
