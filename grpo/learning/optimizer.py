"""AdamW with its state made beforehand, and the learning rate as a function of the step."""

import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from grpo.config.groups import OptimizerSettings

WHERE_8BIT = ("cuda", "cpu")
"""Devices that bitsandbytes was tried on."""
_LEAST_8BIT, _BLOCK, _CODE_BYTES = 4096, 256, 1024
"""bitsandbytes': smaller tensors keep fp32 moments; numbers that share a scale; each of two code books."""


def learning_rate(done: float, num_steps: int, settings: OptimizerSettings) -> float:
    """The rate of the step after `done` of `num_steps`; a run that its minutes end has done parts of steps.

    See `grpo.run.progress`.
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
    kind = settings.optimizer_kind
    if kind == "adamw":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"optimizer_kind is {kind}, which needs the package bitsandbytes: pip install bitsandbytes, or "
            "give adamw."
        )
    if device.type not in WHERE_8BIT:
        raise ValueError(
            f"optimizer_kind is {kind}, which runs on {' and '.join(WHERE_8BIT)}, not on {device.type}: "
            "give adamw."
        )
    if dtype == torch.float64:
        raise ValueError(f"optimizer_kind is {kind}, but precision is fp64, which it has not: give adamw.")


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW of what is trained; its moments exist from the start: memory does not grow at the second step."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    make = _make_adamw8bit if settings.optimizer_kind == "adamw8bit" else _make_adamw
    return make(groups, settings)


def _make_adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    betas = settings.adam_beta1, settings.adam_beta2
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
    return optimizer


def _make_adamw8bit(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    betas = settings.adam_beta1, settings.adam_beta2
    optimizer: Any = AdamW8bit(groups, lr=settings.learning_rate, betas=betas)
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, i, j)
    return optimizer


def moment_bytes(sizes: Iterable[int], settings: OptimizerSettings, itemsize: int) -> int:
    """What the moments of trained tensors hold, of so many numbers each, of `itemsize` bytes."""
    if settings.optimizer_kind == "adamw":
        return sum(2 * itemsize * size for size in sizes)
    small, large = _by_size(sizes)
    scales = sum(-(-size // _BLOCK) for size in large)
    codes = 2 * _CODE_BYTES if large else 0
    return 2 * 4 * sum(small) + 2 * (sum(large) + 4 * scales) + codes


def _by_size(sizes: Iterable[int]) -> tuple[list[int], list[int]]:
    """Those that keep moments in fp32, and those that have them in 8 bits."""
    every = list(sizes)
    return [n for n in every if n < _LEAST_8BIT], [n for n in every if n >= _LEAST_8BIT]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
