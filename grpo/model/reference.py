"""The reference of the KL: a frozen copy of the policy, or, with adapters, the policy without them.

It stays what the policy was at first, or follows it now and then (`--reference-sync`, as TRL's
`sync_ref_model` with a mixture of 1). What it has become a checkpoint must hold.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.distributed.shard import shard_model, whole
from grpo.model.adapters import adapter_parameters, adapters_off, has_adapters, other_adapters
from grpo.model.load import frozen_copy


class Reference(Protocol):
    def model(self) -> AbstractContextManager[PreTrainedModel]:
        """Inside, the model that scores: the policy may not be used as such meanwhile."""

    def sync(self, policy: PreTrainedModel) -> None:
        """Become what the policy is now."""

    def tensors(self) -> dict[str, Tensor]:
        """What to save and to `restore`, on the CPU; nothing as long as it is as it was at first."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what was saved; nothing saved changes nothing."""


def make_reference(policy: PreTrainedModel, device: torch.device) -> Reference:
    """The reference of a policy that has not moved yet. device: where a copy lives."""
    return OwnAdapters(policy) if has_adapters(policy) else FrozenCopy(frozen_copy(policy, device))


class FrozenCopy:
    """Weights of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.requires_grad_(False)
        self._has_moved = False

    def model(self) -> AbstractContextManager[PreTrainedModel]:
        return nullcontext(self._model)

    def shard(self, compute_dtype: torch.dtype, device: torch.device) -> None:
        """Over all processes: from here on what scores is a collective, and what is saved, too."""
        shard_model(self._model, compute_dtype, device)

    @torch.no_grad()
    def sync(self, policy: PreTrainedModel) -> None:
        for own, theirs in zip(self._model.parameters(), policy.parameters(), strict=True):
            own.copy_(theirs)
        self._has_moved = True

    def tensors(self) -> dict[str, Tensor]:
        return _on_cpu(dict(self._model.named_parameters())) if self._has_moved else {}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters() if tensors else ():
            parameter.copy_(tensors[name])
            self._has_moved = True


class OwnAdapters:
    """The policy's weights with adapters of its own, none at first."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy
        self._adapters: dict[str, Tensor] = {}

    def model(self) -> AbstractContextManager[PreTrainedModel]:
        return other_adapters(self._policy, self._adapters) if self._adapters else adapters_off(self._policy)

    def sync(self, policy: PreTrainedModel) -> None:
        self.restore({name: own.detach() for name, own in adapter_parameters(policy).items()})

    def tensors(self) -> dict[str, Tensor]:
        return _on_cpu(self._adapters)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        device = self._policy.device
        self._adapters = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}
