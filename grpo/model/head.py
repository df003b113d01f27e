"""The vocabulary head in lower precision, a part of it at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

CAST_ROWS = 4096
"""Of a matrix, such as the vocabulary's, that are cast at once: a whole copy in fp32 would be large."""


def parts(count: int, size: int, tensor: Tensor) -> Iterator[slice]:
    """Places of `count` things of a tensor, `size` at a time.

    Of a tensor without storage, as in a trace of memory, the first alone: the others hold no more.
    """
    is_traced = tensor.untyped_storage().device.type == "meta"
    for start in range(0, min(count, size) if is_traced else count, size):
        yield slice(start, start + size)


def centred_head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A head (V, D), or its bias (V,), in `dtype`, less its mean over the vocabulary.

    The mean adds the same to all logits of a token, which no probability sees, but rounding does:
    GPT-2's lie near -100, where bf16 knows halves only.
    """
    finite = weight[weight.isfinite()] if weight.dim() == 1 else weight  # a token that cannot occur has -inf
    mean = finite.mean(0, dtype=torch.float32)
    centred = torch.empty_like(weight, dtype=dtype)
    for rows in parts(len(weight), CAST_ROWS, weight):
        centred[rows].copy_(weight[rows] - mean)
    return centred
