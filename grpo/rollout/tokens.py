"""From logits to tokens, as pure functions: uniforms, truncation, inverse CDF.

Every (run seed, step, row, position) owns one uniform number, and a token is the inverse CDF at
that number. What a row samples therefore does not depend on which rows are beside it (invariance
I2).
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor


def step_uniforms(rows: int, positions: int, *, seed: int, step: int, draw: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), (rows, positions) in float32, always drawn on the CPU.

    draw: 0 for a step's first sampling, n for the n-th time its groups are refilled.
    """
    digest = hashlib.sha256(f"{seed} {step} {draw}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return torch.rand(rows, positions, generator=generator)


def truncate(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set what top-k, top-p and min-p exclude, in this order, to -inf. logits (R, V).

    Of equal logits at the border of top-k or top-p the lower id stays.
    """
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = _keep_first(logits, least, torch.full_like(least, top_k, dtype=torch.long))
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values  # (R, V)
        probabilities = ordered.float().softmax(-1)
        allowed = probabilities.cumsum(-1) - probabilities < top_p
        count = allowed.sum(-1, keepdim=True).clamp(min=1)
        logits = _keep_first(logits, ordered.gather(-1, count - 1), count)
    if min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return logits


def _keep_first(logits: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """The `count` (R, 1) largest, of which `least` (R, 1) is the last; of its equals those of lower id."""
    above, equal = logits > least, logits == least
    room = count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -torch.inf)


def sample_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, **truncation: Any
) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF, and its log-prob before truncation.

    logits (R, V) of any float type, uniforms (R,). Returns ids (R,) and log-probs (R,) in float32
    (float64 for float64 logits), of the temperature-scaled distribution; where temperature is 0,
    the most likely token (the lower id of equals) and its log-prob at temperature 1. truncation: as
    `truncate` takes it.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if temperature not in (0, 1):
        logits = logits.to(dtype) / temperature
    probabilities = logits.softmax(-1, dtype=dtype)  # (R, V)
    if temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        truncated = truncate(logits, **truncation)
        allowed = probabilities if truncated is logits else truncated.softmax(-1, dtype=dtype)
        tokens = _inverse_cdf(allowed, uniforms.unsqueeze(-1))
    # NaN logits give some token of the vocabulary: its log-prob is NaN, and will be seen.
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), probabilities.gather(-1, tokens).squeeze(-1).log()


_BLOCK = 256
"""Tokens whose probabilities are added up first where the vocabulary is large."""


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which probabilities (R, V), added up in the order of ids, pass a uniform number (R, 1).

    A running sum over a large vocabulary is slow: there it is over sums of blocks, then in one block.
    """
    vocabulary = probabilities.shape[-1]
    if vocabulary <= 16 * _BLOCK:
        return _first_above(probabilities, uniforms)[0]
    whole = vocabulary // _BLOCK * _BLOCK
    blocks = probabilities[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    sums = torch.cat([blocks, probabilities[:, whole:].sum(-1, keepdim=True)], -1)  # (R, blocks)
    block, left = _first_above(sums, uniforms)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=block.device)  # (R, 256), the last beyond the end
    of_block = probabilities.gather(-1, ids.clamp(max=vocabulary - 1)) * (ids < vocabulary)
    within, _ = _first_above(of_block, left)
    return block * _BLOCK + within


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the place where the running sum of weights (R, K) first exceeds target (R, 1), and the rest of
    it there.

    Never a place without weight: the target is kept below the sum of all, from which rounding may lift it.
    """
    cdf = weights.cumsum(-1)
    end = cdf[:, -1:]
    target = target.minimum(end.nextafter(torch.zeros_like(end)))
    place = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    before = cdf.gather(-1, place) - weights.gather(-1, place)
    return place, (target - before).clamp(min=0)
