"""The vocabulary head in lower precision."""

import torch
from torch import Tensor

from grpo.model.cpu import slices


def centred_head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A head (V, D), or its bias (V,), in `dtype`, less its mean over the vocabulary.

    The mean adds the same to all logits of a token, which no probability sees, but rounding does:
    GPT-2's lie near -100, where bf16 knows halves only.
    """
    finite = weight[weight.isfinite()] if weight.dim() == 1 else weight  # a token that cannot occur has -inf
    mean = finite.mean(0, dtype=torch.float32)
    centred = torch.empty_like(weight, dtype=dtype)
    for rows in slices.slices(len(weight), slices.CAST_ROWS):
        centred[rows].copy_(weight[rows] - mean)
    return centred
