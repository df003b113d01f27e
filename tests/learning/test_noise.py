"""The noise scale of a gradient, where it is known: a quadratic with a given covariance."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from whole_runs import metrics_of, train

from grpo.learning import objectives
from grpo.learning.noise import FAR_OFF, WORTH_SAYING, NoiseScale, part_of

ROWS, SIZE = 32, 400
MU = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
STD = torch.linspace(4.0, 1.0, SIZE, dtype=torch.float64)
TRUE = float((STD**2).sum() / (MU**2).sum())
"""About 6 rows; of a loss (mu + noise) x, whose gradient at any weights is mu + noise."""


def measured(parts: int, scale: float, steps: int) -> list[float | None]:
    """What is known after each step, of rows with `scale` times the noise.

    parts: 2 tell the noise from the first half, more from all of them, as processes do.
    """
    model, noise = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64), NoiseScale(ROWS)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        rows = MU + torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64) * STD * scale
        told: Counter[str] = Counter()
        for part in rows.split(ROWS // parts)[: 1 if parts == 2 else parts]:
            model.weight.grad = part.sum(0, keepdim=True) / ROWS
            told.update({name: value.item() for name, value in part_of(model, 1 / parts).items()})
        noise.observe(rows.mean(0).norm().item(), told)
        found.append(noise.rows)
    return found


@pytest.mark.parametrize(("parts", "scale"), [(2, 1.0), (4, 2.0)])
def test_it_is_the_known_one_within_ten_percent(parts, scale):
    known = measured(parts, scale, steps=400)[100:]
    assert sum(known) / 300 == pytest.approx(scale**2 * TRUE, rel=0.1)
    noise = NoiseScale(ROWS)  # a part that is all says nothing
    noise.observe(2.0, {"part/share": 1.0, "part/share_squared": 1.0, "part/squared": 4.0})
    assert noise.measured == 0 and noise.rows is None


@pytest.mark.parametrize(
    ("batches", "said"),
    [(1.01 * FAR_OFF, "larger --batch-size"), (0.99 * FAR_OFF, None), (0.2, "smaller --batch-size")],
)
def test_advice_for_a_batch_far_from_the_scale_is_given_once_and_not_too_early(batches, said):
    """The scale is so many batches: in each measurement |mu|² is 1, and half a step has twice the noise."""
    noise, squared = NoiseScale(ROWS), 1 + batches
    for _ in range(WORTH_SAYING):
        assert noise.advice() is None
        half = {"part/share": 0.5, "part/share_squared": 0.25, "part/squared": squared / 2 - 0.25}
        noise.observe(squared**0.5, half)
    assert noise.rows == pytest.approx(batches * ROWS)
    advice = noise.advice()
    assert (said in advice) if said else advice is None
    assert noise.advice() is None


def test_halves_are_every_other_group_and_change_no_gradient(config, made_up_plans, monkeypatch):
    """Of a run in several micro-batches, every step; at once there is nothing to tell."""
    seen = []
    real = objectives.part_of
    monkeypatch.setattr(objectives, "part_of", lambda *args: seen.append(real(*args)) or seen[-1])
    monkeypatch.setattr("grpo.run.setup.NOISE_INTERVAL", 1)
    norms = []
    for rows in (4, 24):  # all at once has no halves
        changed = replace(config, batch_size=24, precision="fp64", name=f"{rows}", train_rows=rows)
        norms.append([line["grad_norm"] for line in metrics_of(train(changed))])
        assert len(seen) == 2 and all(each["part/share"] == 0.5 for each in seen)
    assert all(each["part/squared"] > 0 for each in seen)
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
