"""Training in fp16: the gradient is fp32's, and what a scale makes too large is left out and goes on."""

import dataclasses
import json

import pytest
import torch
from families import made, shaped
from whole_runs import assert_same_outcome, metrics_of, outcome, train

from grpo.learning import loss_scale
from grpo.learning.loss_scale import LossScale
from grpo.learning.step import Diverged
from grpo.model.target import compute_dtype
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.stream import Texts

FP16, FP32 = torch.float16, torch.float32
FIRST = 22
"""The exponent of a scale that is too large for the model of the tests."""


def test_it_halves_doubles_and_is_saved(monkeypatch):
    monkeypatch.setattr(loss_scale, "GOOD_STEPS", 3)
    scale = LossScale(4.0)
    assert scale.halve() and scale.value == 2.0
    for _ in range(2):
        scale.note_good_step()
    other = LossScale()
    other.restore(json.loads(json.dumps(scale.state())))
    other.note_good_step()  # the third in a row
    assert other.value == 4.0 and scale.value == 2.0
    scale.halve()
    for _ in range(2):
        scale.note_good_step()
    assert scale.value == 1.0 and not scale.halve() and scale.value == 1.0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_step_s_gradient_in_fp16_is_fp32_s(name):
    """To 2e-2 of its norm, for derivatives of a mean over many tokens, which fp16 has no numbers for."""
    model = made(shaped(name)).float()
    stream = Texts([[1, 2, 3], [4, 5]], [0, 0, 1], [[6, 7, 8, 9], [10, 11], [12, 13, 14]]).stream()
    slope = 1e-7 * torch.randn(9, generator=torch.Generator().manual_seed(0))

    def gradient(dtype: torch.dtype, scale: float) -> torch.Tensor:
        token_logprobs(model, stream, temperature=1.0, dtype=dtype, slope=lambda _, part: scale * slope[part])
        LossScale(scale).unscale(model.parameters())
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        return found

    exact = gradient(FP32, 1.0)
    assert (gradient(FP16, 2.0**16) - exact).norm() < 2e-2 * exact.norm()
    assert (gradient(FP16, 1.0) - exact).norm() > 0.1 * exact.norm()


def test_an_overflow_is_left_out_halves_the_scale_and_the_run_goes_on(config, logged):
    """It resumes bit for bit from between the overflows."""
    config = dataclasses.replace(config, precision="fp16", steps=6, checkpoint_interval=1, keep_checkpoints=9)

    def too_large(trainer) -> None:
        if trainer.finished == 0:
            trainer.run.loss_scale.value = 2.0**FIRST

    straight = train(dataclasses.replace(config, name="straight"), too_large)
    steps = [record for record in metrics_of(straight) if "loss_scale" in record]
    skipped = [record["skipped"] for record in steps]
    count = int(sum(skipped))
    assert 0 < count < 6 and skipped == [1.0] * count + [0.0] * (6 - count)
    assert [record["loss_scale"] for record in steps] == [2.0 ** (FIRST - min(n, count)) for n in range(6)]
    assert any("too large for fp16; the loss scale is" in line for line in logged)
    cut = train(dataclasses.replace(config, name="cut"), too_large, stop_after=1)
    resumed = train(dataclasses.replace(config, name="cut", resume=cut))
    assert_same_outcome(outcome(straight), outcome(resumed))


def test_what_no_scale_helps_is_a_failure(config):
    """A model whose weights are not finite, at a scale of 1."""

    def broken(trainer) -> None:
        trainer.run.loss_scale.value = 1.0
        trainer.run.policy.model.transformer.ln_f.weight.data.fill_(torch.inf)

    with pytest.raises(Diverged, match="were not finite"):
        train(dataclasses.replace(config, precision="fp16", steps=4, kl_coef=0.0), broken)


def test_auto_is_fp16_on_cards_that_have_no_bf16(monkeypatch):
    for has_bf16, dtype in ((True, torch.bfloat16), (False, FP16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        assert compute_dtype("auto", torch.device("cuda")) == dtype
    assert compute_dtype("fp16", torch.device("cpu")) == FP16
