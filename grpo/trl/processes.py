"""Processes under TRL: nothing waits for another while rows are done, and gradients meet once a step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


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


def least(number: int, device: torch.device) -> int:
    """Of all processes' numbers."""
    found = torch.tensor(number, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found.item())


def extremes_and_means(metrics: dict[str, tuple[float, float]], accelerator: Any) -> dict[str, float]:
    """Of `merged` metrics, their values over all processes."""
    if not metrics:
        return {}
    pairs = torch.tensor([*metrics.values()], dtype=torch.float64)  # (M, 2)
    if accelerator.num_processes > 1:
        pairs = accelerator.gather(pairs.to(accelerator.device)).cpu()
    everywhere = pairs.view(-1, len(metrics), 2)  # (processes, M, 2)
    values = {}
    for name, (sums, counts) in zip(metrics, everywhere.permute(1, 2, 0), strict=True):
        if name.endswith(("_min", "_max")):
            known = sums[~sums.isnan()]
            extreme = (known.min() if name.endswith("_min") else known.max()) if len(known) else sums[0]
            values[name] = extreme.item()
        else:
            values[name] = (sums.sum() / counts.sum().clamp(min=1.0)).item()
    return values
