"""AdamW, in 32 bits and in 8, and the learning rate of each step."""

import copy
import math

import pytest
import torch
from torch import nn

from grpo.config.groups import OptimizerSettings
from grpo.learning.optimizer import learning_rate, make_optimizer, moment_bytes, set_learning_rate

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({}, 2, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, 6, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),  # a line that reaches the peak at its end
        # From the peak towards the floor: 1 - 0.8 * 0/4, 1/4, 2/4, 3/4; kept when a run goes on for longer.
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, 4, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        # Two of warm-up, floor 1/2: 1/2 + (1 + cos(k pi / 4)) / 4 for k = 0 to 4.
        (
            {"lr_schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.5},
            6,
            [0.5, 1.0, 1.0, 0.5 + (1 + HALF) / 4, 0.75, 0.5 + (1 - HALF) / 4, 0.5, 0.5],
        ),
        ({"lr_schedule": "cosine", "warmup_steps": 10}, 2, [0.1, 0.2]),  # longer than the run
    ],
    ids=["constant", "warm-up", "linear", "cosine", "only a warm-up"],
)
def test_rates_by_hand(settings, steps, expected):
    chosen = OptimizerSettings(learning_rate=2.0, **settings)
    found = [learning_rate(step, steps, chosen) for step in range(len(expected))]
    assert found == pytest.approx([2.0 * rate for rate in expected])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.LayerNorm(4)).double()


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_it_is_adamw_and_only_matrices_decay():
    """Loshchilov & Hutter 2019, algorithm 2, written out, at four rates; one of 0 moves nothing."""
    settings = OptimizerSettings(learning_rate=0.0, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95)
    model = small_model()
    optimizer = make_optimizer(model, settings)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    for t, rate in enumerate((0.1, 0.05, 0.2, 0.0), start=1):
        give_gradients(model, t)
        set_learning_rate(optimizer, rate)
        for name, p in model.named_parameters():
            m[name] = 0.8 * m[name] + 0.2 * p.grad
            v[name] = 0.95 * v[name] + 0.05 * p.grad**2
            decay = 0.3 if p.ndim >= 2 else 0.0
            step = (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            weights[name] = weights[name] - rate * decay * weights[name] - rate * step
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p, weights[name], rtol=1e-12, atol=1e-12), name


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())


def test_the_state_is_there_before_the_first_step_and_no_step_needs_more(load):
    """Two moments in the parameters' dtype, and a number each, once where tied and none where frozen.

    No step allocates a tensor of a parameter's size: none can run out of memory half-way through them.
    """
    model = load("gpt2").model  # the head is the embedding
    model.transformer.wpe.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerSettings(weight_decay=0.1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    inside = [p for group in optimizer.param_groups for p in group["params"]]
    assert set(inside) == set(parameters) == set(optimizer.state) and len(inside) == len(parameters)
    before = state_bytes(optimizer)
    assert before == sum(2 * p.nbytes + 4 for p in parameters)
    places = {p: optimizer.state[p]["exp_avg"].data_ptr() for p in parameters}
    for step in (1, 2):
        give_gradients(model, step)
        with torch.profiler.profile(profile_memory=True) as profile:
            optimizer.step()
        largest = max((abs(event.self_cpu_memory_usage) for event in profile.events()), default=0)
        assert largest < min(p.nbytes for p in parameters if p.ndim >= 2)
        assert state_bytes(optimizer) == before
    assert {p: optimizer.state[p]["exp_avg"].data_ptr() for p in parameters} == places
    assert all(optimizer.state[p]["step"] == 2 and optimizer.state[p]["exp_avg"].any() for p in parameters)


EIGHT = OptimizerSettings(optimizer_kind="adamw8bit", learning_rate=1e-2)


def test_8_bit_moments_are_there_before_the_first_step_and_steps_are_nearly_those_of_fp32():
    """On a CPU a step holds the largest tensor in fp32."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    start = nn.Linear(100, 100)
    ends = []
    for settings in (OptimizerSettings(learning_rate=1e-2), EIGHT):
        model = copy.deepcopy(start)
        optimizer = make_optimizer(model, settings)
        entries = [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = {value.data_ptr(): value for value in entries if isinstance(value, torch.Tensor)}
        for step in range(1, 6):
            give_gradients(model, step)
            optimizer.step()
        ends.append(model.weight.detach())
    assert sum(tensor.nbytes for tensor in tensors.values()) == moment_bytes([10_000, 100], EIGHT, 4)
    moments = optimizer.state[model.weight]["state1"]
    assert moments.dtype == torch.uint8 and moments.data_ptr() in tensors
    moved = (ends[0] - start.weight).norm()
    assert 0 < (ends[1] - ends[0]).norm() < 0.05 * moved
