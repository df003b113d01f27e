"""Processes under TRL: nothing waits for another while rows are done, and gradients meet once a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo.distributed.processes import sum_in_buckets
from grpo.trl.parts import combined


class LocalAccelerator:
    """accelerate's `Accelerator` for a part of a batch: what it would gather is this process's own.

    Nor is a part the end of a step, to TRL's control of the entropy.
    """

    sync_gradients = False

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """Without DDP, which would send gradients in the middle of a pass that may have to be done again."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def smallest(number: int, device: torch.device) -> int:
    """Returns the smallest of all processes' numbers."""
    everyones = torch.tensor(number, device=device)
    dist.all_reduce(everyones, op=dist.ReduceOp.MIN)
    return int(everyones.item())


def metric_values(metrics: Mapping[str, tuple[float, float]], accelerator: Any) -> dict[str, float]:
    """Returns `merged` metrics over all processes."""
    if not metrics:
        return {}
    pairs = torch.tensor([*metrics.values()], dtype=torch.float64)  # (M, 2)
    if accelerator.num_processes > 1:
        pairs = accelerator.gather(pairs.to(accelerator.device)).cpu()
    by_process = pairs.view(-1, len(metrics), 2).tolist()
    values = {}
    for name, *of_metric in zip(metrics, *by_process, strict=True):
        value, count = combined(name, of_metric)
        values[name] = value / count if count else value
    return values


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Over the processes, as DDP would; one that a process has not counts as zeros."""
    is_there = [int(parameter.grad is not None) for parameter in parameters]
    anywhere = torch.tensor(is_there, device=parameters[0].device)
    dist.all_reduce(anywhere)
    gradients = []
    for parameter, somebody_has in zip(parameters, anywhere.tolist(), strict=True):
        if somebody_has:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_in_buckets(gradients, wait=lambda work: work.wait())
    for gradient in gradients:
        gradient /= dist.get_world_size()
