"""Weights in bf16 whose fp32 masters are in the optimizer alone: the same training, in less memory."""

import copy
import dataclasses

import pytest
import torch
from families import made, shaped
from safetensors.torch import load_file
from whole_runs import assert_same_outcome, outcome, train

from grpo.config.groups import OptimizerSettings
from grpo.learning import masters
from grpo.learning.masters import LOW_BITS, master_of, split_masters
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import GuardedOptimizer
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.stream import Texts
from grpo.trainer import Trainer

BF16, FP32 = torch.bfloat16, torch.float32


def halves(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    upper, low_bits = torch.empty_like(numbers, dtype=BF16), torch.empty_like(numbers, dtype=torch.int16)
    masters._split(numbers.clone(), upper, low_bits)
    return upper, low_bits


def joined(upper: torch.Tensor, low_bits: torch.Tensor) -> torch.Tensor:
    master = torch.empty_like(upper, dtype=FP32)
    masters._join(upper, low_bits, master)
    return master


def test_two_halves_are_the_number():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).int()
    numbers = bits.view(FP32)
    numbers = torch.cat([numbers[numbers.abs() < 3e38], torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.0, -3e38])])
    upper, low_bits = halves(numbers)
    assert torch.equal(upper.view(torch.int16), numbers.bfloat16().view(torch.int16))
    again = joined(upper, low_bits)
    in_the_middle = (numbers.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(again[~in_the_middle].view(torch.int32), numbers[~in_the_middle].view(torch.int32))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_in_the_middle_loses_at_most_its_last_bit(sign):
    numbers = sign * torch.tensor([0x3F80_8000, 0x3F81_8000], dtype=torch.int32).view(FP32)
    upper, low_bits = halves(numbers)
    again = joined(upper, low_bits)
    assert torch.equal(upper, numbers.bfloat16())
    assert (again - numbers).abs().max() <= 2**-23
    for first, second in zip(halves(again), (upper, low_bits), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_twenty_updates_are_those_of_fp32_masters(name, kind):
    """To the rounding of fp32: products are the same, and the optimizer moves the same numbers."""
    if kind == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    settings = OptimizerSettings(learning_rate=1e-4, optimizer_kind=kind)
    model = made(shaped(name)).float()
    begun = copy.deepcopy(model)

    def trained(model: torch.nn.Module, low_bits: dict) -> list[torch.Tensor]:
        optimizer = make_optimizer(model, settings, low_bits)
        optimizer_guard = GuardedOptimizer(model, optimizer, 1.0)
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(16, (3, 4), generator=generator).tolist()
            slope = torch.randn(12, generator=generator)

            def accumulate(rows=rows, slope=slope) -> dict[str, float]:
                for part in (0, 1):  # as many parts, whose gradients are added
                    stream = Texts([[1, 2, 3]], [0, 0, 0], rows if part else rows[::-1]).stream()
                    token_logprobs(
                        model, stream, temperature=1.0, dtype=BF16, slope=lambda _, each: slope[each]
                    )
                return {"loss": 0.0}

            assert not optimizer_guard.step(accumulate)["skipped"]
        return [master_of(parameter, optimizer) for parameter in model.parameters()]

    expected = trained(copy.deepcopy(model), {})
    low_bits = split_masters(model, BF16)
    found = trained(model, low_bits)
    assert len(low_bits) > 4 and all(weight.dtype == BF16 for weight in low_bits)
    moved = torch.cat([(a - b).flatten() for a, b in zip(expected, begun.parameters(), strict=True)])
    error = torch.cat([(a - b).flatten() for a, b in zip(expected, found, strict=True)])
    assert moved.norm() > 0.01
    assert error.norm() < 1e-5 * moved.norm()


def test_steps_that_bf16_cannot_hold_are_kept():
    model = made(shaped("gpt2")).float()
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=1e-7), split_masters(model, BF16))
    weight = model.transformer.h[0].mlp.c_fc.weight
    rounded, before = weight.detach().clone(), master_of(weight, optimizer)
    for _ in range(5):
        weight.grad = torch.ones_like(weight, dtype=FP32)
        masters.step_with_masters(optimizer)
    assert (weight != rounded).float().mean() < 0.01
    moved = before - master_of(weight, optimizer)
    assert moved.mean().item() == pytest.approx(5e-7, rel=0.01)


def test_a_model_whose_logits_would_change_stays_in_fp32(logged):
    model = made(shaped("gpt2")).float()
    layer = model.transformer.h[0].mlp.c_fc
    layer.forward = lambda states: (states.float() @ layer.weight.float()) + layer.bias.float()
    with torch.no_grad():
        layer.weight.mul_(3.0)
    exact = torch.autocast("cpu", enabled=False)
    plain = layer.forward

    def forward(states):
        with exact:
            return plain(states)

    layer.forward = forward
    assert split_masters(model, BF16) == {}
    assert all(weight.dtype == FP32 for weight in model.parameters())
    assert any("the model stays in torch.float32" in line for line in logged)


def test_other_dtypes_have_no_halves():
    model = made(shaped("gpt2")).float()
    assert split_masters(model, FP32) == split_masters(model, torch.float16) == {}


def test_a_run_saves_fp32_and_resumes_bit_for_bit(config):
    config = dataclasses.replace(config, precision="bf16", steps=3, checkpoint_interval=1, keep_checkpoints=9)
    saved = {}

    def note(trainer) -> None:
        optimizer = trainer.run.optimizer
        assert any(LOW_BITS in state for state in optimizer.state.values())
        for name, weight in trainer.run.policy.model.named_parameters():
            saved[name] = master_of(weight, optimizer).clone()

    straight = train(dataclasses.replace(config, name="straight"), note)
    cut = train(dataclasses.replace(config, name="cut"), stop_after=1)
    train(dataclasses.replace(config, name="cut", resume=cut, steps=3), note)
    assert_same_outcome(outcome(straight), outcome(cut))
    stored = load_file(cut / "model" / "model.safetensors")
    assert all(tensor.dtype == FP32 for tensor in stored.values())
    lost = [name for name, tensor in stored.items() if torch.equal(tensor, tensor.bfloat16().float())]
    assert all("ln" in name or "bias" in name for name in lost)


def test_a_model_that_is_given_comes_back_in_fp32(config, load):
    policy = load("gpt2")
    trainer = Trainer(
        dataclasses.replace(config, precision="bf16"), model=policy.model, tokenizer=policy.tokenizer
    )
    trainer.train()
    stored = load_file(trainer.run.checkpoints.model / "model.safetensors")
    model = policy.model
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.dtype == FP32
