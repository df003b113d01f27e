"""The sampler's copy of the trained weights, and the reference of the KL.

Trained are fp32 masters (see `grpo.learning.masters`), or adapters on a frozen base. The sampler reads them
as they are, or in the compute dtype. The reference stays what the policy was at first, or follows it now and
then (`--reference-sync`, as TRL's `sync_ref_model` with a mixture of 1).
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from loguru import logger
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.distributed.shard import shard_model, whole
from grpo.model.adapters import adapter_parameters, adapters_off, has_adapters
from grpo.model.first_layers import is_plain
from grpo.model.head import LogitRule, centred_head, factor_dtype, multiply
from grpo.model.load import context_length
from grpo.model.numerics import MIN_LOGP, computing_in, without_tf32

COPY_ERROR = 0.2
"""The share of log-probs' spread that a copy in bf16 may be off by, some ten times what rounding does."""


def frozen_copy(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """The same weights in the same dtype, so that a KL to them starts at zero.

    The configuration is the model's own, by which it is known what was found out about the model.
    """
    frozen = copy.deepcopy(model, {id(model.config): model.config}).eval().requires_grad_(False)
    return frozen.to(device) if device is not None else frozen


class RolloutModel:
    """The policy as the sampler runs it: the policy itself, or a model with its products in a lower dtype.

    That model shares everything with the policy but the weights of products, see `product_weights`, which it
    holds in the compute dtype, and its head, which is centred as the scorer's is (`centred_head`), or more
    exact for `fp32_logits` (`factor_dtype`). Under
    `sampling_in` it computes what the policy does under autocast, which is how the policy is scored.
    Quantized layers are never copied or cast: their numbers mean nothing without their scales. Where the
    base of adapters is in the compute dtype already, all but the head is the policy's own.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, *, fp32_logits: bool = False) -> None:
        self.model, self._policy, self._dtype = model, model, dtype
        self._copies = list[tuple[Tensor, Tensor, bool]]()
        self._trained = _trained_parameters(model)
        has_lower_base = dtype.itemsize < 4 and has_adapters(model) and _base_is_in(dtype, model)
        if model.dtype == dtype and not has_lower_base:
            return
        shared = [model.config, *model.parameters(), *_quantized_parts(model)]
        if has_lower_base:
            shared.append(model.base_model)
        self.model = copy.deepcopy(model, {id(part): part for part in shared})
        head = self.model.get_output_embeddings()
        copied_parts = {id(part) for part in (head if has_lower_base else self.model).modules()}
        products = [
            place
            for place in product_weights(self.model, dtype, of_experts=True)
            if id(place[0]) in copied_parts
        ]
        dtype_of_head = factor_dtype(dtype, model.device, fp32_logits=fp32_logits)
        if _is_plain_linear(head):
            products += [
                (head, name)
                for name, it in head.named_parameters()
                if it.dtype != dtype_of_head or it.itemsize < 4
            ]
        copied: dict[int, Tensor] = {}
        for module, name in products:
            policys = getattr(module, name)
            if id(policys) not in copied:
                its_dtype = dtype_of_head if module is head else dtype
                copied[id(policys)] = nn.Parameter(
                    torch.empty_like(policys, dtype=its_dtype), requires_grad=False
                )
                self._copies.append((copied[id(policys)], policys, module is head))
            setattr(module, name, copied[id(policys)])
        self._copy(self._copies)
        _samples_in[self.model] = _Sampling(dtype, fp32_logits)

    def refresh(self) -> None:
        """Copy the weights that are trained in place, after the optimizer has moved them."""
        self._copy(copied for copied in self._copies if copied[1].requires_grad)

    @torch.no_grad()
    def _copy(self, copies: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        rule = LogitRule.of(self.model.config)
        for parameter, policys, is_head in copies:
            is_rounded = is_head and parameter.dtype.itemsize < 4
            parameter.copy_(centred_head(policys, parameter.dtype, rule) if is_rounded else policys)

    def is_outdated(self) -> bool:
        """Whether the policy has been given other weights, or trains others than when this was made.

        Other adapters may have been put in or switched on, or layers unfrozen: then make another.
        """
        return self._trained != _trained_parameters(self._policy)

    @without_tf32()
    @torch.no_grad()
    def check(self) -> str | None:
        """Returns an error if a copy's log-probs are another model's; None if they are the policy's.

        The policy runs its own forward pass over made-up tokens, under autocast as it is scored and trained,
        and the copy its backbone and head, as the sampler does. bf16 rounds log-probs by about a hundredth of
        their spread; those of other weights differ by all of it.
        """
        model, policy = self.model, self._policy
        if model is policy:
            return None
        texts = _made_up_texts(model)
        with computing_in(self._dtype, model.device, keeps_casts=False):
            expected = policy(**texts, use_cache=False).logits
        with sampling_in(model):
            hidden = model.base_model(**texts, use_cache=False).last_hidden_state
            logits = LogitRule.of(model.config)(multiply_head(model, hidden))
        wanted, sampled = (each.float().log_softmax(-1).clamp(min=MIN_LOGP) for each in (expected, logits))
        spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
        error = ((sampled - wanted).norm() / spread).item()
        if error < COPY_ERROR:
            return None
        return f"log-probs of its copy in {self._dtype} differ from its own by {error:.2g} of their spread"


class _Sampling(NamedTuple):
    """How a sampler's model computes that is not the policy itself."""

    dtype: torch.dtype
    """The dtype of matrix products."""
    fp32_logits: bool
    """Whether the head's are not rounded to it."""


_samples_in: WeakKeyDictionary[nn.Module, _Sampling] = WeakKeyDictionary()


def sampling_in(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Inside, a sampler's model computes its products as the policy's are computed where it is scored.

    No cast weights are kept: recorded steps would go on with them when the policy has moved.
    """
    sampling = _samples_in.get(model)
    return (
        nullcontext() if sampling is None else computing_in(sampling.dtype, model.device, keeps_casts=False)
    )


def multiply_head(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Returns the head's products (…, V) with the states (…, D) of a sampler's model, under `sampling_in`."""
    head, sampling = model.get_output_embeddings(), _samples_in.get(model)
    if sampling is None or not sampling.fp32_logits or not _is_plain_linear(head):
        products: Tensor = head(states)
        return products
    exact = torch.promote_types(head.weight.dtype, torch.float32)
    products = states.new_empty(*states.shape[:-1], len(head.weight), dtype=exact)
    with torch.autocast(states.device.type, enabled=False):
        factors = states.flatten(0, -2).to(head.weight.dtype)
        multiply(factors, head.weight, head.bias, products.flatten(0, -2))
    return products


def product_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, of_experts: bool = False
) -> list[tuple[nn.Module, str]]:
    """Returns where weights stand that autocast casts to `dtype` wherever they are used, but for the head's.

    Those are of linear layers and convolutions. Embeddings, norms and anything that a layer computes with in
    another way stay as they are. of_experts: the stacked weights of experts, too, whose products autocast may
    leave in the dtype that they come in.
    """
    head = model.get_output_embeddings()
    return [
        (module, name)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if is_plain(weight) and weight.itemsize > dtype.itemsize and module is not head
        if isinstance(module, nn.Linear | Conv1D | nn.Conv1d) or (of_experts and weight.ndim >= 3)
    ]


def _made_up_texts(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns two texts of random tokens, as the model's forward pass takes them."""
    length = min(16, context_length(model.config))
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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


def make_reference(
    policy: PreTrainedModel, device: torch.device, dtype: torch.dtype = torch.float32
) -> "Reference":
    """Makes the reference of a policy that has not moved yet.

    device: where a copy lives. dtype: what its products are computed in.
    """
    if has_adapters(policy):
        return Reference(policy)
    frozen = frozen_copy(policy, device)
    lower_products(frozen, dtype)
    return Reference(frozen)


@torch.no_grad()
def lower_products(model: PreTrainedModel, dtype: torch.dtype) -> dict[Tensor, Tensor]:
    """Has a model hold the weights of its products in the 16 bits that they are multiplied in.

    Autocast would cast them at every use, so logits stay the same to the bit. Where they do not, the model is
    left as it was, which a line says. Returns, by parameter, the weights as they were.
    """
    if dtype.itemsize >= 4 or model.dtype.itemsize < 4:
        return {}

    def logits() -> Tensor:
        with computing_in(dtype, model.device, keeps_casts=False):
            output: Tensor = model(**_made_up_texts(model), use_cache=False).logits
        return output

    expected = logits()
    before = cast_products(model, dtype)
    if torch.equal(logits(), expected):
        return before
    for parameter, weight in before.items():
        parameter.data = weight
    logger.info("the model stays in {}: in {} its log-probs would be others", model.dtype, dtype)
    return {}


def cast_products(model: PreTrainedModel, dtype: torch.dtype) -> dict[Tensor, Tensor]:
    """Casts the weights of a model's products in place. Returns, by parameter, the weights as they were."""
    before = {}
    for module, name in product_weights(model, dtype):
        parameter = getattr(module, name)
        if parameter not in before:
            before[parameter] = parameter.data
            parameter.data = parameter.data.to(dtype)
    return before


def reference_bytes(policy: PreTrainedModel, dtype: torch.dtype) -> int:
    """Returns the bytes of a policy's frozen copy whose products are computed in `dtype`."""
    products = [getattr(module, name) for module, name in product_weights(policy, dtype)]
    saved = sum(weight.numel() * (weight.itemsize - dtype.itemsize) for weight in products)
    return sum(parameter.nbytes for parameter in policy.parameters()) - saved


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
        """Shards the reference over all processes: from here on scoring and saving are collectives."""
        shard_model(self._model, compute_dtype, device)

    def sync(self, policy: PreTrainedModel) -> None:
        """Makes the reference what the policy is now."""
        self.restore(adapter_parameters(policy) or dict(policy.named_parameters()))

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Returns tensors to save and to `restore`, on the CPU; none as long as it is as it was at first.

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
        """Makes the reference what was saved; nothing saved changes nothing."""
        if not tensors:
            return
        if has_adapters(self._model):
            device = self._model.device
            self._synced = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
            return
        self._synced = dict(self._model.named_parameters())
        for name, parameter in self._synced.items():
            parameter.copy_(tensors[name])
