import copy
import dataclasses
import math

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from grpo.config.groups import OptimizerSettings
from grpo.learning.optimizer import (
    check_optimizer,
    learning_rate,
    make_optimizer,
    moment_bytes,
    set_learning_rate,
    step_bytes,
)
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

FILES = ("model.safetensors", "trainer.safetensors")


def rates(num_steps: int, **settings) -> list[float]:
    return [learning_rate(step, num_steps, OptimizerSettings(**settings)) for step in range(num_steps)]


# ----------------------------------------------------------------------------------------- schedule


def test_constant():
    assert rates(3, learning_rate=2.0) == [2.0, 2.0, 2.0]


def test_warm_up_is_a_line_that_reaches_the_peak_at_its_last_step():
    expected = [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(6, learning_rate=2.0, warmup_steps=4) == pytest.approx(expected)


def test_linear_goes_from_the_peak_towards_the_floor():
    """Floor 0.2: 1 - 0.8 * 0/4, 1/4, 2/4, 3/4, times the peak."""
    expected = [2.0, 1.6, 1.2, 0.8]
    assert rates(4, learning_rate=2.0, lr_schedule="linear", min_lr_ratio=0.2) == pytest.approx(expected)


def test_cosine_after_a_warm_up():
    """Six steps, two of warm-up, floor 0: (1 + cos(k pi / 4)) / 2 for k = 0 to 3."""
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    cosine = {"lr_schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.0}
    assert rates(6, learning_rate=1.0, **cosine) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_floor_is_reached_and_kept_when_a_run_goes_on_for_longer(schedule):
    settings = OptimizerSettings(learning_rate=1.0, lr_schedule=schedule, min_lr_ratio=0.1)
    assert learning_rate(10, 10, settings) == pytest.approx(0.1)
    assert learning_rate(99, 10, settings) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_is_only_a_warm_up():
    assert rates(2, learning_rate=1.0, warmup_steps=10, lr_schedule="cosine") == pytest.approx([0.1, 0.2])


def test_a_rate_of_zero_is_allowed_and_moves_nothing():
    """The control of the learning curve. Weight decay is scaled by the rate, so it is still, too."""
    model = small_model()
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=0.0, weight_decay=0.1))
    before = [p.clone() for p in model.parameters()]
    give_gradients(model, 1)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


# -------------------------------------------------------------------------------------------- AdamW


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.LayerNorm(4)).double()


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_it_is_adamw_and_only_matrices_decay():
    """Loshchilov & Hutter 2019, algorithm 2, written out, three steps at three rates."""
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95)
    model = small_model()
    optimizer = make_optimizer(model, settings)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    for t, rate in enumerate((0.1, 0.05, 0.2), start=1):
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


def test_tied_and_frozen_parameters_are_counted_once_and_not_at_all(load):
    model = load("gpt2").model  # the head is the embedding
    model.transformer.wpe.weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerSettings())
    inside = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(inside) == len(set(inside)) == len(list(model.parameters())) - 1
    assert model.transformer.wpe.weight not in optimizer.state


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())


def test_the_state_is_there_before_the_first_step_and_does_not_grow(load):
    """Two moments in the parameters' dtype, and a number each; nothing is made anew by steps."""
    model = load("gpt2").model
    optimizer = make_optimizer(model, OptimizerSettings())
    parameters = list(model.parameters())
    before = state_bytes(optimizer)
    assert before == sum(2 * p.nbytes + 4 for p in parameters)
    places = {p: optimizer.state[p]["exp_avg"].data_ptr() for p in parameters}
    for step in (1, 2):
        give_gradients(model, step)
        optimizer.step()
        assert state_bytes(optimizer) == before
    assert {p: optimizer.state[p]["exp_avg"].data_ptr() for p in parameters} == places
    assert all(optimizer.state[p]["step"] == 2 and optimizer.state[p]["exp_avg"].any() for p in parameters)


def test_a_step_allocates_no_tensor_of_a_parameters_size(load):
    """So that it cannot run out of memory half-way through the parameters."""
    model = load("gpt2").model
    optimizer = make_optimizer(model, OptimizerSettings(weight_decay=0.1))
    give_gradients(model, 1)
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    largest = max((abs(event.self_cpu_memory_usage) for event in profile.events()), default=0)
    assert largest < min(p.nbytes for p in model.parameters() if p.ndim >= 2)


# ------------------------------------------------------------------------------------ in 8 bits

EIGHT = OptimizerSettings(optimizer_kind="adamw8bit", learning_rate=1e-2)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "said"),
    [
        (
            False,
            "cpu",
            torch.float32,
            "needs the package bitsandbytes: pip install bitsandbytes, or give adamw",
        ),
        (True, "mps", torch.float32, "runs on cuda and cpu, not on mps: give adamw"),
        (True, "cpu", torch.float64, "precision is fp64, which it has not: give adamw"),
    ],
)
def test_where_8_bits_cannot_be_had_it_says_so(monkeypatch, installed, device, dtype, said):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    with pytest.raises(ValueError, match=rf"optimizer_kind is adamw8bit, .*{said}"):
        check_optimizer(EIGHT, torch.device(device), dtype)
    check_optimizer(OptimizerSettings(), torch.device(device), dtype)


def test_on_a_cpu_an_8_bit_step_holds_the_largest_tensor_in_fp32():
    assert step_bytes([100, 5000, 9000], EIGHT, "cpu") == 5 * 4 * 9000
    assert step_bytes([100], EIGHT, "cpu") == step_bytes([9000], EIGHT, "cuda") == 0
    assert step_bytes([9000], OptimizerSettings(), "cpu") == 0


def test_8_bit_moments_are_there_before_the_first_step_and_as_large_as_planned():
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optimizer = make_optimizer(model, EIGHT)
    tensors = {
        value.data_ptr(): value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    }
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held == moment_bytes([10_000, 100], EIGHT, 4)
    give_gradients(model, 1)
    optimizer.step()
    state = optimizer.state[model.weight]
    assert state["state1"].dtype == torch.uint8 and state["state1"].data_ptr() in tensors


def test_8_bit_steps_are_nearly_those_of_fp32():
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    start = nn.Linear(100, 100)
    ends = []
    for settings in (OptimizerSettings(learning_rate=1e-2), EIGHT):
        model = copy.deepcopy(start)
        optimizer = make_optimizer(model, settings)
        for step in range(1, 6):
            give_gradients(model, step)
            optimizer.step()
        ends.append(model.weight.detach())
    moved = (ends[0] - start.weight).norm()
    assert 0 < (ends[1] - ends[0]).norm() < 0.05 * moved


@pytest.mark.usefixtures("made_up_plans")
def test_a_resumed_run_has_its_8_bit_moments(config):
    pytest.importorskip("bitsandbytes")
    config = dataclasses.replace(config, optimizer=EIGHT, eval_interval=0)

    def weights(**changes) -> dict[str, torch.Tensor]:
        with open_run(dataclasses.replace(config, **changes)) as run:
            Trainer(run, Console(quiet=True)).train(StopRequest())
        return {file: load_file(run.checkpoints.all()[-1] / file) for file in FILES}

    straight = weights()
    weights(name="cut", steps=2)
    resumed = weights(resume=config.runs_dir / "cut")
    for file in FILES:
        assert all(torch.equal(resumed[file][name], tensor) for name, tensor in straight[file].items())
    assert any(tensor.dtype == torch.uint8 for tensor in straight["trainer.safetensors"].values())


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate", -1e-5), ("learning_rate", math.nan), ("learning_rate", math.inf),
        ("weight_decay", -0.1), ("max_grad_norm", -1.0), ("max_grad_norm", math.nan), ("warmup_steps", -1),
        ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("adam_beta2", math.nan), ("min_lr_ratio", 1.5),
        ("min_lr_ratio", math.nan),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_names_itself_its_value_and_the_remedy(setting, value):
    with pytest.raises(ValueError) as error:
        OptimizerSettings(**{setting: value})
    assert str(error.value).startswith(f"{setting} is {value}: give ")
