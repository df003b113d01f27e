"""Gradient checkpointing: what the backward pass computes again instead of having kept it.

Hugging Face's own drops a cache that is passed to a layer, because layers write to it and would do so
again when they are recomputed. The caches of `forward` may be written to any number of times.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing, CheckpointingSetting
from grpo.distributed.shard import decoder_layers

_aten: Any = torch.ops.aten
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
]
"""What selective checkpointing keeps: results of linear layers and of fused attention.

They take nearly all the time. The rest, a third of what a layer keeps, is cheap to compute again: norms,
activation functions, and what attention that is not fused holds of each pair of tokens (Korthikanti et al.,
2022).
"""


def choose_checkpointing(setting: CheckpointingSetting) -> Checkpointing:
    """`auto` is none: rows that go through in parts save more memory, and cost less time.

    It is full in a run where not one row would learn otherwise (`plan.build.plan_memory`).
    """
    return "none" if setting == "auto" else setting


@contextmanager
def recomputed_layers(model: PreTrainedModel, checkpointing: Checkpointing) -> Iterator[None]:
    """Layers that run in here keep what `checkpointing` says: same values, same gradients.

    none: everything. selective: their input and PRODUCTS; everything, if the model does not say what its
    layers are. full: their input only; ValueError for a model without such layers.
    """
    layers = [] if checkpointing == "none" else list(decoder_layers(model.base_model))
    if checkpointing == "full" and not layers:
        raise ValueError(
            f"gradient_checkpointing is full, but {type(model).__name__} does not say which of its layers "
            "can be recomputed: give none (fewer train_rows need less memory, too)."
        )
    # Dropout is off, so no state of a random generator needs to be kept.
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if checkpointing == "selective":
        recompute = partial(recompute, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS))
    instances_own = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(recompute, layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, instances_own, strict=True):
            del layer.forward  # the class's shows again
            if own is not None:
                layer.forward = own
