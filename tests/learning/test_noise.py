"""The noise scale of a gradient, where it is known: a quadratic with a given covariance."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import nn

from grpo.config.groups import OptimizerSettings
from grpo.learning import objectives
from grpo.learning.noise import FAR_OFF, WORTH_SAYING, GradientSum, NoiseScale, part_of
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import Stepper
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.trainer import Trainer

ROWS, SIZE = 32, 400
MU = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
STD = torch.linspace(4.0, 1.0, SIZE, dtype=torch.float64)
TRUE = float((STD**2).sum() / (MU**2).sum())
"""About 6 rows; of a loss (mu + noise) x, whose gradient at any weights is mu + noise."""


def quadratic(*, parts: int = 2, scale: float = 1.0, size: int = ROWS) -> tuple[Stepper, Callable]:
    """A stepper, and what gives it the gradient of `size` rows with `scale` times the noise.

    parts: 2 tell the noise from the first half, more from all of them, as processes do.
    """
    model = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=0.1))
    stepper = Stepper(model, optimizer, 1.0, num_rows=size)
    generator = torch.Generator().manual_seed(1)

    def accumulate() -> dict[str, float]:
        noise = torch.randn(size, SIZE, generator=generator, dtype=torch.float64) * STD * scale
        metrics: dict[str, float] = {"loss": 0.0}
        total = torch.zeros(1, SIZE, dtype=torch.float64)
        for place, part in enumerate((MU + noise).split(size // parts)):
            if parts > 2:
                model.zero_grad()  # each process has its own
            (model.weight * part.sum(0) / size).sum().backward()
            total += part.sum(0) / size
            if parts > 2 or place == 0:
                for name, value in part_of(model, 1 / parts).items():
                    metrics[name] = metrics.get(name, 0.0) + value.item()
        model.weight.grad = total
        return metrics

    return stepper, accumulate


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_it_is_the_known_one_within_ten_percent(parts, scale):
    """However fast the weights move, which a linear loss does not mind."""
    stepper, accumulate = quadratic(parts=parts, scale=scale)
    found = [stepper.step(accumulate)["gradient/noise_scale"] for _ in range(600)]
    assert sum(found[100:]) / 500 == pytest.approx(scale**2 * TRUE, rel=0.1)


def test_steps_that_do_not_measure_keep_what_is_known_and_parts_are_no_metrics():
    stepper, accumulate = quadratic()
    measured = stepper.step(accumulate)
    assert not any(name.startswith("part/") for name in measured)

    def silent() -> dict[str, float]:
        return {name: value for name, value in accumulate().items() if not name.startswith("part/")}

    assert stepper.step(silent)["gradient/noise_scale"] == measured["gradient/noise_scale"]
    assert stepper.noise.measured == 1


def test_a_part_that_is_all_says_nothing():
    noise = NoiseScale(ROWS)
    noise.observe(2.0, {"part/share": 1.0, "part/share_squared": 1.0, "part/squared": 4.0})
    assert noise.measured == 0 and noise.rows is None


def of_batches(noise: torch.Tensor, mu: torch.Tensor) -> GradientSum:
    """From gradients (batches, SIZE) of `ROWS` rows each."""
    parameter = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    gradients = GradientSum([parameter], ROWS)
    for gradient in mu + noise:
        parameter.grad = gradient.clone()
        gradients.add()
    return gradients


def drawn(batches: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batches, SIZE, generator=generator, dtype=torch.float64) * STD / ROWS**0.5


def test_disjoint_batches_at_the_same_weights_give_the_same():
    found, low, high = of_batches(drawn(64), MU).rows()
    assert found == pytest.approx(TRUE, rel=0.1) and low < TRUE < high
    # One pair by hand: (3, 4) and (4, 3), 24 is their product, 25 the mean square.
    parameter = nn.Parameter(torch.zeros(2))
    pair = GradientSum([parameter], 10)
    for gradient in ((3.0, 4.0), (4.0, 3.0), (3.5, 3.5)):
        parameter.grad = torch.tensor(gradient)
        pair.add()
    assert pair.products == [24, 24.5] and pair.squared == [25, 25, 24.5]
    assert pair.signal()[0] == pytest.approx((24 + 2 * 24.5) / 3)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    held = 0
    for seed in range(100):
        _, low, high = of_batches(drawn(16, seed), 0.05 * MU).rows()
        held += low <= 400 * TRUE and (high is None or high >= 400 * TRUE)
    assert held >= 88


def test_pure_noise_has_no_scale_and_says_from_where_on():
    for seed in range(10):
        noise = drawn(16, seed)
        found, _, high = of_batches(noise - noise.mean(0), 0 * MU).rows()
        assert found is None and high is None


@pytest.mark.parametrize(("factor", "said"), [(1.01, "larger --batch-size"), (0.99, None)])
def test_advice_for_a_batch_of_less_than_a_quarter_is_given_once(factor, said):
    noise = NoiseScale(ROWS)
    noise.measured, noise._signal, noise._squared = WORTH_SAYING, 1.0, 1 + factor * FAR_OFF
    advice = noise.advice()
    assert (said in advice) if said else advice is None
    assert noise.advice() is None


def test_advice_for_a_batch_of_more_than_four_times_is_given_not_too_early():
    noise = NoiseScale(ROWS)
    noise.measured, noise._signal, noise._squared = WORTH_SAYING - 1, 1.0, 1.2
    assert noise.advice() is None
    noise.measured += 1
    assert "smaller --batch-size" in noise.advice()


def test_halves_are_every_other_group_and_change_no_gradient(config, made_up_plans, monkeypatch):
    """Of a run in several micro-batches, every step; at once there is nothing to tell."""
    seen = []
    real = objectives.part_of
    monkeypatch.setattr(objectives, "part_of", lambda *args: seen.append(real(*args)) or seen[-1])
    monkeypatch.setattr("grpo.run.setup.NOISE_INTERVAL", 1)
    config = dataclasses.replace(config, steps=2, batch_size=24, precision="fp64", eval_interval=0)

    def run(**changes) -> list[dict]:
        with open_run(dataclasses.replace(config, **changes)) as run:
            Trainer(run, Console(quiet=True)).train(StopRequest())
            return read_lines(run.folder / METRICS_FILE)

    parted = run(name="parted", train_rows=4)
    assert len(seen) == 2 and all(each["part/share"] == 0.5 for each in seen)
    assert all(each["part/squared"] > 0 for each in seen)
    whole = run(name="whole", train_rows=24)
    assert len(seen) == 2  # all at once has no halves
    assert [line["grad_norm"] for line in parted] == pytest.approx(
        [line["grad_norm"] for line in whole], rel=1e-9
    )


def test_a_run_goes_on_with_what_it_knows(config, made_up_plans):
    """Bit for bit, as everything else of a run that was stopped."""
    config = dataclasses.replace(config, steps=9, train_rows=4, eval_interval=0, checkpoint_interval=5)

    def scales(**changes) -> list[float | None]:
        with open_run(dataclasses.replace(config, **changes)) as run:
            trainer = Trainer(run, Console(quiet=True))
            trainer.train(StopRequest())
            assert trainer.stepper.noise.measured == 2  # of steps 4 and 8
            return [line.get("gradient/noise_scale") for line in read_lines(run.folder / METRICS_FILE)]

    whole = scales(name="whole")
    with open_run(dataclasses.replace(config, name="parts", steps=5)) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    assert scales(resume=config.runs_dir / "parts") == whole
