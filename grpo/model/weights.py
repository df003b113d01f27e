"""What is made of the trained weights: the sampler's copy of them, and the reference of the KL.

Trained are fp32 masters, or adapters on a frozen base. The sampler reads them as they are, or in the compute
dtype. The reference stays what the policy was at first, or follows it now and then (`--reference-sync`, as
TRL's `sync_ref_model` with a mixture of 1).
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo.distributed.shard import shard_model, whole
from grpo.model.adapters import adapter_parameters, adapters_off, has_adapters
from grpo.model.head import centred_head


def frozen_copy(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """The same weights in the same dtype, so that a KL to them starts at zero."""
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    return frozen.to(device) if device is not None else frozen


class RolloutModel:
    """The policy as the sampler runs it: itself, or a copy in the compute dtype, kept in step.

    In lower precision its head is its own and centred, as the scorer's is (`centred_head`). Where adapters'
    base is in that precision already, all but the head is the policy's itself.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model, self._copies = model, list[tuple[Tensor, Tensor, bool]]()
        if dtype.itemsize < 4 and has_adapters(model) and _base_is_in(dtype, model):
            shared = model.base_model, model.config, *model.get_output_embeddings().parameters()
            self.model = copy.deepcopy(model, {id(part): part for part in shared})
        elif model.dtype != dtype:
            self.model = frozen_copy(model)
        else:
            return
        trained = dict(model.named_parameters(remove_duplicate=False))
        head = self.model.get_output_embeddings()
        for name, parameter in list(head.named_parameters()):  # neither the embedding nor the policy's
            setattr(head, name, nn.Parameter(parameter.data, requires_grad=False))
        for name, parameter in self.model.named_parameters():  # not the buffers: rotary frequencies stay fp32
            if parameter is not trained[name]:
                parameter.data = torch.empty_like(parameter.data, dtype=dtype)
                is_head = parameter is head.weight or parameter is head.bias
                self._copies.append((parameter, trained[name], is_head))
        self.refresh()
        self._copies = [copied for copied in self._copies if copied[1].requires_grad]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights over in place, after the optimizer has moved them."""
        for parameter, trained, is_head in self._copies:
            parameter.copy_(centred_head(trained, parameter.dtype) if is_head else trained)


def _base_is_in(dtype: torch.dtype, model: PreTrainedModel) -> bool:
    """Whether frozen weights are in `dtype` already; TRL loads a base in fp32, and casts as it goes."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return all(weight.dtype == dtype for weight in frozen if weight.ndim > 1 and weight.is_floating_point())


def make_reference(policy: PreTrainedModel, device: torch.device) -> "Reference":
    """The reference of a policy that has not moved yet. device: where a copy lives."""
    return Reference(policy if has_adapters(policy) else frozen_copy(policy, device))


class Reference:
    """A frozen copy of the policy; with adapters the policy itself, without them or with those of a sync.

    What it has become a checkpoint must hold.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """model: the policy, if that has adapters, or a copy that is nobody else's."""
        self._model = model if has_adapters(model) else model.requires_grad_(False)
        self._synced: dict[str, Tensor] = {}
        """Its weights, or its adapters; empty as long as it is as it was at first."""

    def model(self) -> AbstractContextManager[PreTrainedModel]:
        """Inside, the model that scores: the policy may not be used as such meanwhile."""
        if not has_adapters(self._model):
            return nullcontext(self._model)
        return adapters_off(self._model, instead=self._synced)

    def shard(self, compute_dtype: torch.dtype, device: torch.device) -> None:
        """Over all processes: from here on what scores is a collective, and what is saved, too."""
        shard_model(self._model, compute_dtype, device)

    def sync(self, policy: PreTrainedModel) -> None:
        """Become what the policy is now."""
        self.restore(adapter_parameters(policy) or dict(policy.named_parameters()))

    def tensors(self) -> dict[str, Tensor]:
        """What to save and to `restore`, on the CPU; nothing as long as it is as it was at first."""
        return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in self._synced.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what was saved; nothing saved changes nothing."""
        if not tensors:
            return
        if has_adapters(self._model):
            device = self._model.device
            self._synced = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
            return
        self._synced = dict(self._model.named_parameters())
        for name, parameter in self._synced.items():
            parameter.copy_(tensors[name])
