"""fp32 masters of weights that a model holds in bf16: the optimizer keeps the bits that bf16 leaves out.

A pass under autocast reads the weights of products in bf16 alone. A model that is trained whole holds them
so, and shares them with the sampler. An optimizer's small steps would be lost in them: they go into fp32
masters, whose upper halves are these weights, and whose lower halves are in the optimizer's state. That takes
four bytes a number; fp32 masters with copies in bf16 for the sampler and for autocast take eight.

The idea is Split-SGD's (Kalamkar et al., Optimizing Deep Learning Recommender Systems' Training On CPU
Cluster Architectures, 2020). Here weights are rounded to nearest, as autocast rounds them, and not cut off.

Gradients of these weights are summed in fp32, as those of all others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.model.weights import cast_products, lower_products

LOW_BITS = "low_bits"
"""The name of a weight's lower half in the optimizer's state of it: int16, in the weight's shape."""


def master_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's master and of its gradient."""
    return parameter.grad_dtype or parameter.dtype


def master_bytes(parameter: Tensor) -> int:
    """Returns the bytes of a parameter as it is saved."""
    return parameter.numel() * master_dtype(parameter).itemsize


@torch.no_grad()
def split_masters(
    model: PreTrainedModel, dtype: torch.dtype, *, traced: bool = False
) -> dict[Tensor, Tensor]:
    """Holds the weights of a model's products in bf16. Returns the lower half (int16) of each of them.

    There are none where products are computed in another dtype, or where the model's logits would change: it
    stays in fp32, which a line says. traced: tensors have no storage, and logits cannot be compared.
    """
    if dtype != torch.bfloat16:
        return {}
    masters = (cast_products if traced else lower_products)(model, dtype)
    low_bits: dict[Tensor, Tensor] = {}
    while masters:
        parameter, master = masters.popitem()
        low_bits[parameter] = torch.empty_like(master, dtype=torch.int16)
        _split(master, parameter, low_bits[parameter])
        parameter.grad_dtype = torch.float32
    return low_bits


@torch.no_grad()
def join_masters(optimizer: torch.optim.Optimizer) -> None:
    """Gives a model its fp32 masters back. The optimizer goes on with these."""
    for parameter in _split_parameters(optimizer):
        parameter.data = master_of(parameter, optimizer)
        del optimizer.state[parameter][LOW_BITS]


@torch.no_grad()
def master_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns what the optimizer moves: a parameter itself, or a new tensor with its fp32 master."""
    low_bits = optimizer.state.get(parameter, {}).get(LOW_BITS)
    if low_bits is None:
        return parameter.detach()
    master = torch.empty_like(low_bits, dtype=torch.float32)
    _join(parameter, low_bits, master)
    return master


@torch.no_grad()
def step_with_masters(optimizer: torch.optim.Optimizer) -> None:
    """Takes an optimizer's step, for which weights in bf16 become their fp32 masters.

    Not all at once: as many as the largest of them takes memory for, which is less than what learning needed
    for its gradient. Gradients are used up.
    """
    split = [parameter for parameter in _split_parameters(optimizer) if parameter.grad is not None]
    most = max((parameter.numel() for parameter in split), default=0)
    memory = torch.empty(most, dtype=torch.float32, device=split[0].device if split else None)
    gradients = {parameter: parameter.grad for parameter in split}
    for parameter in split:
        parameter.grad = None
    optimizer.step()  # of all that are their own masters
    optimizer.zero_grad(set_to_none=True)
    for part in _filled(split, most):
        with _as_masters(part, optimizer, memory):
            for parameter in part:
                parameter.grad = gradients.pop(parameter)
            optimizer.step()
            for parameter in part:
                parameter.grad = None


@contextmanager
def _as_masters(part: list[Tensor], optimizer: torch.optim.Optimizer, memory: Tensor) -> Iterator[None]:
    """Inside, parameters are their fp32 masters, which are put together in this memory."""
    halves, place = [], 0
    for parameter in part:
        low_bits = optimizer.state[parameter][LOW_BITS]
        master = memory[place : place + parameter.numel()].as_strided(parameter.shape, parameter.stride())
        _join(parameter, low_bits, master)
        halves.append((parameter, parameter.data, low_bits))
        parameter.data, place = master, place + parameter.numel()
    try:
        yield
    finally:
        for parameter, upper, low_bits in halves:
            master, parameter.data = parameter.data, upper
            _split(master, upper, low_bits)


def _split_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if LOW_BITS in optimizer.state.get(parameter, {})]


def _filled(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Parameters in their order, in parts of at most so many numbers."""
    part, filled = list[Tensor](), 0
    for parameter in parameters:
        if filled + parameter.numel() > most:
            yield part
            part, filled = [], 0
        part.append(parameter)
        filled += parameter.numel()
    if part:
        yield part


def _split(master: Tensor, upper: Tensor, low_bits: Tensor) -> None:
    """Writes both halves of an fp32 master, which is used up: `upper` in bf16, rounded to nearest.

    The lower half is what is to be added to the upper's bits, as integers. The one number in 65,536 that lies
    in the middle between two of bf16, and is rounded down, has no room for it, and loses its last bit.
    """
    upper.copy_(master)
    bits = master.view(torch.int32)
    bits.add_(upper.view(torch.int16), alpha=-(2**16))
    low_bits.copy_(bits.clamp_(max=2**15 - 1))


def _join(upper: Tensor, low_bits: Tensor, master: Tensor) -> None:
    """Writes the fp32 master of both halves."""
    bits = master.view(torch.int32)
    bits.copy_(low_bits)
    bits.add_(upper.detach().view(torch.int16), alpha=2**16)
