"""One model over several processes (FSDP2): each holds its part of every weight, gradient and moment.

A layer's weights are gathered when it runs and let go after it; those outside of layers (embeddings,
last norm, head) while anything runs. So every forward and backward pass is a collective: all
processes make the same passes in the same order.

`fully_shard` is called directly and not by accelerate's plugin, which makes the head a unit of its
own that is gathered in the head's forward pass: here the head's weight is read in chunks and its
forward pass never runs.
"""

import warnings
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.errors import UserError

T = TypeVar("T")


def shard_model(model: PreTrainedModel, compute_dtype: torch.dtype, device: torch.device) -> None:
    """Shard in place, over all processes, and move this process's part to `device`, layer by layer.

    What is gathered is in `compute_dtype`; the parts, and the sums of gradients, stay in the model's own.
    Gradients are summed over the processes. ValueError for a model that does not say what its layers are.
    """
    layers = list(decoder_layers(model.base_model))
    if not layers:
        raise UserError(
            f"shard is on, but {type(model).__name__} does not say which of its layers can be "
            "sharded: leave it off, or choose another --model."
        )
    lower = compute_dtype if compute_dtype.itemsize < model.dtype.itemsize else None
    policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=model.dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # nobody writes into it
    model.run_gathered = MethodType(lambda self, work: work(), model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "run_gathered")


def decoder_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost layers that Hugging Face marks as fit for recomputation."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from decoder_layers(child)


def is_sharded(model: nn.Module) -> bool:
    """Whether its weights are gathered for each pass."""
    return isinstance(model, FSDPModule)


def run_gathered(model: PreTrainedModel, work: Callable[[], T], *, stay_gathered: bool = False) -> T:
    """`work()` as a forward pass of the model, so that what is outside of layers is gathered.

    A collective where the model is sharded; the same as `work()` where it is not. stay_gathered: each weight
    is gathered once for all passes of `work`, and let go of at its end.
    """
    if not is_sharded(model):
        return work()
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)] if stay_gathered else []
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
        result: T = model.run_gathered(work)
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
    if not torch.is_grad_enabled():
        # There is no backward pass to let go of what this one remembers. Before torch 2.13: of weights.
        getattr(model, "reset_iter_state", model.reshard)()
    return result


def any_process(model: PreTrainedModel, goes_on: bool) -> bool:
    """Whether `goes_on` holds in any process that has a part of the model: all stop together.

    A collective where the model is sharded; the same as `goes_on` where it is not.
    """
    if not is_sharded(model):
        return goes_on
    votes = torch.tensor([goes_on], dtype=torch.int32, device=model.device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process has a part: a collective. Any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, mine: Tensor) -> Tensor:
    """Returns the part of a whole tensor that `mine` is of its own; no collective."""
    if not isinstance(mine, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(mine.device, mine.dtype), mine.device_mesh, mine.placements, src_data_rank=None
    )
