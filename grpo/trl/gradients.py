"""Gradients of a pass that may have to be done again, and of processes that did theirs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn

from grpo.distributed.processes import sum_in_buckets


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
    has = [int(parameter.grad is not None) for parameter in parameters]
    anywhere = torch.tensor(has, device=parameters[0].device)
    dist.all_reduce(anywhere)
    gradients = []
    for parameter, somebody_has in zip(parameters, anywhere.tolist(), strict=True):
        if somebody_has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    sum_in_buckets(gradients, wait=lambda work: work.wait())
    for gradient in gradients:
        gradient /= dist.get_world_size()
