"""Tensors of a training state beside the model's: the optimizer's moments by parameter, and random state."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.distributed.shard import is_sharded, part_like, whole
from grpo.errors import UserError
from grpo.learning.masters import LOW_BITS, master_of


class Snapshot(NamedTuple):
    """The large parts of a training state, on the CPU."""

    weights: dict[str, Tensor] | None
    """None: as they are in the model."""
    tensors: dict[str, Tensor]
    """Moments and random state."""


def take_snapshot(model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> Snapshot:
    """Copies weights and moments. Collective for a sharded model; a process that writes nothing need not
    `keep` them."""
    weights: dict[str, Tensor] | None = None
    if any(LOW_BITS in state for state in optimizer.state.values()):
        masters = dict[Tensor, Tensor]()  # tied weights are one
        for parameter in model.parameters():
            masters[parameter] = master_of(parameter, optimizer).cpu()
        weights = {
            name: masters.get(weight, weight.detach())
            for name, weight in model.state_dict(keep_vars=True).items()
        }
    if is_sharded(model):
        weights, gathered = {}, {}
        for name, weight in model.state_dict(keep_vars=True).items():
            if weight not in gathered:  # tied weights are one
                all_of_it = whole(weight.detach())
                gathered[weight] = all_of_it.cpu() if keep else all_of_it.new_empty(0)
            weights[name] = gathered[weight]
    tensors = {"random_state": torch.get_rng_state()}
    for parameter, name, entry in _moments(model, optimizer):
        tensor = whole(torch.as_tensor(optimizer.state[parameter][entry]).detach())
        if keep:
            tensors[f"{name}|{entry}"] = tensor.cpu().contiguous()
    return Snapshot(weights, tensors)


def restore_optimizer(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Copy moments and random state back in place. ValueError if those in this folder are another's."""
    with torch.no_grad():
        for parameter, name, entry in _moments(model, optimizer):
            state, stored = optimizer.state[parameter], tensors.get(f"{name}|{entry}")
            if stored is None:
                raise UserError(
                    f"the checkpoint in {str(folder)!r} has no {entry} of {name}: go on with the "
                    "--optimizer-kind and the model that it was saved with."
                )
            if isinstance(state[entry], Tensor):
                state[entry].copy_(part_like(stored, state[entry]))
            else:
                state[entry] = stored.item()
    torch.set_rng_state(tensors["random_state"])


def _moments(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.nn.Parameter, str, str]]:
    """A parameter, its name, and the name of an entry of its state."""
    for name, parameter in model.named_parameters():
        for entry in optimizer.state.get(parameter, {}):
            # Not code books of 8-bit moments, the same for all, nor what comes back from the saved masters.
            if not entry.startswith("qmap") and entry != LOW_BITS:
                yield parameter, name, entry
