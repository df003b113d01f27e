"""Gradients of embeddings, added to the weights' own gradient where they belong.

Autograd makes a tensor of the whole vocabulary for each use of the embeddings, nearly all of it zeros, and
adds them up: for prompts, for completions, and for the head where it is the same weight. GPT-2 124 M has
147 MB of it each time. Here a use adds its few rows to `.grad`, where the head's gradient is already.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo.distributed.shard import is_sharded
from grpo.model import cpu


@contextmanager
def gradients_in_place(model: Any) -> Iterator[None]:
    """Token embeddings looked up in here get their gradient so, when there are fewer tokens than words.

    Only by `backward()`: `torch.autograd.grad` does not see it. A model is left as it is when it is sharded,
    when it looks up otherwise than `torch.nn.Embedding`, or has no gradient to get.
    """
    embedding = model.get_input_embeddings()
    plain = (
        type(embedding) is nn.Embedding and embedding.max_norm is None and cpu.is_on("embedding_gradients")
    )
    if not (plain and embedding.weight.requires_grad and torch.is_grad_enabled()) or is_sharded(model):
        yield
        return
    own = vars(embedding).get("forward")
    embedding.forward = partial(_look_up, embedding, embedding.forward)
    try:
        yield
    finally:
        del embedding.forward  # the class's shows again
        if own is not None:
            embedding.forward = own


def _look_up(embedding: nn.Embedding, usual: Any, ids: Tensor) -> Tensor:
    if ids.numel() >= embedding.num_embeddings or embedding.sparse or embedding.scale_grad_by_freq:
        found: Tensor = usual(ids)
    else:  # through `needs_gradient` the graph goes on to here, but not to the weight
        needs_gradient = torch.zeros(0, requires_grad=True)
        found = _LookUp.apply(needs_gradient, ids, embedding)
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, ids: Tensor, embedding: nn.Embedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.embedding = embedding
        return F.embedding(ids, embedding.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,), weight, padding = ctx.saved_tensors, ctx.embedding.weight, ctx.embedding.padding_idx
        if padding is not None:
            grad = grad.masked_fill((ids == padding).unsqueeze(-1), 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(weight.dtype))
        return None, None, None
