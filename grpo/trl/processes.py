"""Processes under TRL: nothing waits for another while rows are done, and gradients meet once a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo.distributed.many import buckets


class Alone:
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


@contextmanager
def aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients begin anew; those that were there before are added afterwards."""
    before = [parameter.grad for parameter in parameters]
    drop(parameters)
    try:
        yield
    except BaseException:
        drop(parameters)
        raise
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def drop(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Over the processes, as DDP would; one that a process has not counts as zeros."""
    has = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device)
    anywhere = has.int()
    dist.all_reduce(anywhere)
    gradients = []
    for parameter, somebody_has in zip(parameters, anywhere.tolist(), strict=True):
        if somebody_has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    for bucket in buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def least(number: int, device: torch.device) -> int:
    """Of all processes' numbers."""
    found = torch.tensor(number, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found.item())


def extremes_and_means(metrics: dict[str, tuple[float, float]], accelerator: Any) -> dict[str, float]:
    """Of `merged` metrics, their values over all processes."""
    if not metrics:
        return {}
    pairs = torch.tensor([*metrics.values()], dtype=torch.float64, device=accelerator.device)  # (M, 2)
    everywhere = accelerator.gather(pairs).view(-1, *pairs.shape)  # (processes, M, 2)
    values = {}
    for name, (sums, counts) in zip(metrics, everywhere.permute(1, 2, 0), strict=True):
        if name.endswith(("_min", "_max")):
            known = sums[~sums.isnan()]
            extreme = (known.min() if name.endswith("_min") else known.max()) if len(known) else sums[0]
            values[name] = extreme.item()
        else:
            values[name] = (sums.sum() / counts.sum().clamp(min=1.0)).item()
    return values
