"""AdamW with its state made beforehand, and the learning rate as a function of the step."""

import importlib.util
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from grpo.config.groups import OptimizerSettings
from grpo.errors import UserError
from grpo.learning.masters import LOW_BITS, master_dtype

WHERE_8BIT = ("cuda", "cpu")
"""Devices that bitsandbytes was tried on."""
_LEAST_8BIT, _BLOCK, _CODE_BYTES = 4096, 256, 1024
"""bitsandbytes': smaller tensors keep fp32 moments; numbers that share a scale; of a code book."""


def learning_rate(done: float, num_steps: int, settings: OptimizerSettings) -> float:
    """The rate of the step after `done` of `num_steps`; a run that its minutes end has done parts of steps.

    See `grpo.logs.progress`.
    """
    if done < settings.warmup_steps:
        return settings.learning_rate * min(done + 1, settings.warmup_steps) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return settings.learning_rate
    progress = (done - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    progress = min(progress, 1.0)
    linear, cosine = 1 - progress, (1 + math.cos(math.pi * progress)) / 2
    share = linear if settings.lr_schedule == "linear" else cosine
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * share)


def check_optimizer(settings: OptimizerSettings, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError where this kind cannot be had: not installed, not on this device, not in this dtype."""
    kind, fault = settings.optimizer_kind, ""
    if kind == "adamw":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        fault = "which needs the package bitsandbytes: pip install bitsandbytes, or"
    elif device.type not in WHERE_8BIT:
        fault = f"which runs on {' and '.join(WHERE_8BIT)}, not on {device.type}:"
    elif dtype == torch.float64:
        fault = "but precision is fp64, which it has not:"
    if fault:
        raise UserError(f"optimizer_kind is {kind}, {fault} give adamw.")


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, low_bits: Mapping[Tensor, Tensor] = MappingProxyType({})
) -> torch.optim.Optimizer:
    """AdamW of what is trained; its moments exist from the start: memory does not grow at the second step.

    low_bits: of masters whose upper half alone is in the model, see `split_masters`.
    """
    optimizer = _make_adamw(model, settings)
    for parameter, bits in low_bits.items():
        optimizer.state[parameter][LOW_BITS] = bits
    return optimizer


def _make_adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = settings.adam_beta1, settings.adam_beta2
    if settings.optimizer_kind == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        in_8_bits: Any = AdamW8bit(groups, lr=settings.learning_rate, betas=betas)
        for i, group in enumerate(in_8_bits.param_groups):
            for j, parameter in enumerate(group["params"]):
                in_8_bits.init_state(group, parameter, i, j)
        return in_8_bits  # type: ignore[no-any-return]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=master_dtype(parameter)),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=master_dtype(parameter)),
        }
    return optimizer


def moment_bytes(sizes: Iterable[int], settings: OptimizerSettings, itemsize: int) -> int:
    """Returns the bytes of the moments of trained tensors, of so many numbers each, of `itemsize` bytes."""
    sizes = list(sizes)
    if settings.optimizer_kind == "adamw":
        return 2 * itemsize * sum(sizes)
    large = [size for size in sizes if size >= _LEAST_8BIT]
    scales = sum(-(-size // _BLOCK) for size in large)
    exact = sum(sizes) - sum(large)
    return 2 * (4 * exact + sum(large) + 4 * scales + (_CODE_BYTES if large else 0))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
