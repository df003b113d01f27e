"""What is made of the trained weights: the sampler's copy of them, and the reference of the KL.

Trained are fp32 masters, or adapters on a frozen base. The sampler reads them as they are, or in the compute
dtype. The reference stays what the policy was at first, or follows it now and then (`--reference-sync`, as
TRL's `sync_ref_model` with a mixture of 1).
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo.distributed.shard import shard_model, whole
from grpo.model.adapters import adapter_parameters, adapters_off, has_adapters
from grpo.model.first_layers import is_plain
from grpo.model.head import centred_head
from grpo.model.load import context_length
from grpo.model.stand_ins import NEVER, exact_products

COPY_ERROR = 0.2
"""Of the spread of log-probs: what a copy in bf16 may be off by, some ten times what rounding does."""


def frozen_copy(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """The same weights in the same dtype, so that a KL to them starts at zero."""
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    return frozen.to(device) if device is not None else frozen


class RolloutModel:
    """The policy as the sampler runs it: the policy itself, or a copy in the compute dtype, kept in step.

    A plain linear head of a copy in lower precision is centred, as the scorer's is (`centred_head`).
    Quantized layers are never copied or cast: their numbers mean nothing without their scales. Where the
    base of adapters is in the compute dtype already, all but the head is the policy's own.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model, self._policy, self._dtype = model, model, dtype
        self._copies = list[tuple[Tensor, Tensor, bool]]()
        self._trained = _trained_parameters(model)
        head = model.get_output_embeddings()
        if dtype.itemsize < 4 and has_adapters(model) and _base_is_in(dtype, model):
            own_head = head.parameters() if _is_plain_linear(head) else _quantized_parts(head)
            shared = [model.base_model, model.config, *own_head]
        elif model.dtype != dtype:
            shared = [model.config, *_quantized_parts(model)]
        else:
            return
        self.model = copy.deepcopy(model, {id(part): part for part in shared})
        head = self.model.get_output_embeddings()
        if _is_plain_linear(head):
            for name, parameter in list(head.named_parameters()):  # neither the embedding's nor the policy's
                setattr(head, name, nn.Parameter(parameter.data, requires_grad=False))
        policys = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self.model.named_parameters():  # not the buffers: rotary frequencies stay fp32
            if parameter is not policys[name]:
                parameter.requires_grad_(False)
                parameter.data = torch.empty_like(parameter.data, dtype=dtype)
                is_head = _is_plain_linear(head) and (parameter is head.weight or parameter is head.bias)
                self._copies.append((parameter, policys[name], is_head))
        self._copy(self._copies)

    def refresh(self) -> None:
        """Copy the weights that are trained in place, after the optimizer has moved them."""
        self._copy(copied for copied in self._copies if copied[1].requires_grad)

    @torch.no_grad()
    def _copy(self, copies: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        for parameter, policys, is_head in copies:
            parameter.copy_(centred_head(policys, parameter.dtype) if is_head else policys)

    def is_outdated(self) -> bool:
        """Whether the policy has been given other weights, or trains others than when this was made.

        Other adapters may have been put in or switched on, or layers unfrozen: then make another.
        """
        return self._trained != _trained_parameters(self._policy)

    @exact_products()
    @torch.no_grad()
    def check(self) -> str | None:
        """What is wrong if a copy's log-probs are another model's; None if they are the policy's.

        The policy runs its own forward pass over made-up tokens, under autocast as it is scored and trained,
        and the copy its backbone and head, as the sampler does. bf16 rounds log-probs by about a hundredth of
        their spread; those of other weights differ by all of it.
        """
        model, policy = self.model, self._policy
        if model is policy:
            return None
        length, vocabulary = (
            min(16, context_length(model.config)),
            model.config.get_text_config(decoder=True).vocab_size,
        )
        ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
        texts = {"input_ids": (ids := ids.to(model.device)), "attention_mask": torch.ones_like(ids)}
        is_lower = self._dtype.itemsize < 4
        autocast = partial(torch.autocast, model.device.type, enabled=is_lower, cache_enabled=False)
        with autocast(self._dtype if is_lower else None):
            expected = policy(**texts, use_cache=False).logits
        hidden = model.base_model(**texts, use_cache=False).last_hidden_state
        wanted, sampled = (
            logits.float().log_softmax(-1).clamp(min=NEVER)
            for logits in (expected, model.get_output_embeddings()(hidden))
        )
        spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
        error = ((sampled - wanted).norm() / spread).item()
        if error < COPY_ERROR:
            return None
        return f"log-probs of its copy in {self._dtype} differ from its own by {error:.2g} of their spread"


def _trained_parameters(model: nn.Module) -> list[tuple[int, bool]]:
    """Which parameters a model has, and whether each is trained."""
    return [(id(parameter), parameter.requires_grad) for parameter in model.parameters()]


def _is_plain_linear(head: nn.Module) -> bool:
    """Whether a head is its weight and bias alone: not so with adapters around it, or quantized."""
    return type(head) is nn.Linear and all(map(is_plain, head.parameters()))


def _quantized_parts(model: nn.Module) -> Iterator[nn.Module | Tensor]:
    """Layers of a model whose weights are quantized, whole with their scales, and those weights."""
    for module in model.modules():
        quantized = [weight for weight in module.parameters(recurse=False) if not is_plain(weight)]
        yield from quantized
        if quantized and not any(module.children()):
            yield module


def _base_is_in(dtype: torch.dtype, model: PreTrainedModel) -> bool:
    """Whether frozen weights are in `dtype` already; TRL loads a base in fp32, and casts as it goes."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return all(weight.dtype == dtype for weight in frozen if weight.ndim > 1 and is_plain(weight))


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

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """What to save and to `restore`, on the CPU; nothing as long as it is as it was at first.

        keep: whether this process writes it; of a sharded model all take part in gathering each tensor.
        """
        gathered = {}
        for name, tensor in self._synced.items():
            all_of_it = whole(tensor.detach())
            if keep:
                gathered[name] = all_of_it.cpu().contiguous()
        return gathered

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
