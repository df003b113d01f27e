"""Gradient checkpointing: what the backward pass computes again instead of having kept it.

Hugging Face's own is a switch of the model's; here layers are recomputed inside whatever they ran in. Left
out: keeping products alone. Half the rows at once save as much memory, and cost less time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.config.groups import Checkpointing, CheckpointingSetting
from grpo.distributed.shard import decoder_layers
from grpo.errors import UserError

_recompute: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Dropout is off, so no state of a random generator needs to be kept."""


def choose_checkpointing(setting: CheckpointingSetting) -> Checkpointing:
    """`auto` is none until a plan has chosen: rows that go through in parts save more memory in less time."""
    return "none" if setting == "auto" else setting


@contextmanager
def recomputed_layers(
    model: PreTrainedModel,
    checkpointing: Checkpointing,
    *,
    inside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[None]:
    """Layers that run in here keep everything (none) or only their input (full): same values, same gradients.

    inside: what a layer runs in, and again in the backward pass. ValueError for a model that does not say
    what its layers are, where they are to be recomputed.
    """
    layers = [] if checkpointing == "none" else list(decoder_layers(model.base_model))
    if checkpointing == "full" and not layers:
        raise UserError(
            f"gradient_checkpointing is full, but {type(model).__name__} does not say which of its layers "
            "can be recomputed: give none (fewer train_rows need less memory, too)."
        )
    patched = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        layer.forward = partial(_recompute, _run_inside(inside, _without_transformers_own(layer)))
    try:
        yield
    finally:
        for layer, before in patched:
            del layer.forward  # the class's shows again
            if before is not None:
                layer.forward = before


def _run_inside(
    inside: Callable[[], AbstractContextManager[object]], forward: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with inside():
            return forward(*args, **options)

    return run


def _without_transformers_own(layer: nn.Module) -> Callable[..., Any]:
    """A layer's forward, within what transformers puts around it where it is told to recompute it itself."""
    if getattr(layer, "gradient_checkpointing", False) and "forward" not in vars(layer):
        return MethodType(getattr(type(layer).forward, "__wrapped__", type(layer).forward), layer)
    return layer.forward


def may_recompute_itself(model: PreTrainedModel) -> bool:
    """Whether layers that transformers is told to recompute may be recomputed in its place.

    Its first versions 5 did so around each call, where nothing of ours comes in between.
    """
    layers = list(decoder_layers(model.base_model))
    return bool(layers) and all(hasattr(type(layer).forward, "__wrapped__") for layer in layers)


def recompute_activations(model: PreTrainedModel) -> None:
    """Let feed-forward layers keep what goes into their activation function, and not what comes out of it.

    That is the largest tensor of a layer, and cheap to compute again: in the backward pass torch stops at the
    product that reads it. Same values, same gradients. Only kinds in `_FORWARD` are changed.
    """
    for module in model.modules():
        if forward := _FORWARD.get(type(module).__name__):
            module.forward = MethodType(forward, module)


def _forward_gpt2(mlp: Any, hidden_states: Tensor) -> Tensor:
    inner = mlp.c_fc(hidden_states)
    return _project(lambda inner: mlp.dropout(mlp.c_proj(mlp.act(inner))), mlp.c_proj, inner)


def _forward_gated(mlp: Any, hidden_states: Tensor) -> Tensor:
    inner = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
    return _project(lambda gate, up: mlp.down_proj(mlp.act_fn(gate) * up), mlp.down_proj, *inner)


def _project(project: Callable[..., Tensor], product: nn.Module, *inner: Tensor) -> Tensor:
    """`project(*inner)`, recomputed where `product`, its last step, would keep what it reads.

    A frozen one does not, and an adapter around one computes more than that product again.
    """
    keeps = isinstance(product, nn.Linear | Conv1D) and product.weight.requires_grad
    outer: Tensor = _recompute(project, *inner) if keeps and torch.is_grad_enabled() else project(*inner)
    return outer


_FORWARD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "GPT2MLP": _forward_gpt2,
    **dict.fromkeys(("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"), _forward_gated),
}
"""By the name of a layer's class: each is in a module of its own that takes time to load."""
