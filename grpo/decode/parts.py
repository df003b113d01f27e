"""Attention over one part of what there is to attend to, and its union with another part's.

Softmax over the whole is the parts' softmaxes, each weighted by its share of the normalizer, as in
FlashAttention's tiles (Dao et al., 2022).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


class Part(NamedTuple):
    mixed: Tensor  # values, weighted by softmax over this part alone
    log_total: Tensor  # log of the sum of its exponentials, in float32 or better

    @property
    def by_row(self) -> "Part":
        """From groups (b, H, g, …) to rows (b·g, H, …)."""
        return Part(*(each.transpose(1, 2).flatten(0, 1) for each in self))


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scale: float) -> Part:
    """query (B, H, Q, d) over keys and values (B, H, K, d); bias (B, 1, 1, K) is added to the scores.

    Returns mixed values (B, H, Q, d) and totals (B, H, Q). On a CPU by torch's fused kernel.
    """
    if query.device.type == "cpu":
        bias = bias.expand(-1, -1, query.shape[2], -1)
        fused = _aten._scaled_dot_product_flash_attention_for_cpu
        return Part(*fused(query, keys, values, attn_mask=bias, scale=scale))
    return attend_plainly(query, keys, values, bias, scale=scale)


def attend_plainly(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scale: float) -> Part:
    """`attend` by products and a softmax, on any device."""
    scores = query @ keys.mT * scale + bias  # (B, H, Q, K)
    exact = torch.promote_types(scores.dtype, torch.float32)
    return Part(scores.softmax(-1) @ values, scores.to(exact).logsumexp(-1))


def joined(one: Part, other: Part) -> Tensor:
    """Values mixed over both, (R, H, d)."""
    share = (other.log_total - one.log_total).sigmoid().to(one.mixed.dtype)  # (R, H)
    return torch.lerp(one.mixed, other.mixed, share.unsqueeze(-1))
