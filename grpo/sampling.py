"""From logits to tokens, as pure functions: uniforms, truncation, inverse CDF.

Every (run seed, step, row, position) owns one uniform number, and a token is the inverse CDF at
that number. What a row samples therefore does not depend on which rows are beside it (invariance
I2).
"""

import hashlib

import torch
from torch import Tensor


def step_uniforms(rows: int, positions: int, *, seed: int, step: int, draw: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), (rows, positions) in float32, always drawn on the CPU.

    draw: 0 for a step's first sampling, n for the n-th time its groups are refilled.
    """
    digest = hashlib.sha256(f"{seed} {step} {draw}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return torch.rand(rows, positions, generator=generator)


def truncate(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Set what top-k and top-p exclude to -inf. logits (R, V). Equal logits: the lower id stays."""
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = _keep_first(logits, least, torch.full_like(least, top_k, dtype=torch.long))
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values  # (R, V)
        probabilities = ordered.float().softmax(-1)
        inside = probabilities.cumsum(-1) - probabilities < top_p
        count = inside.sum(-1, keepdim=True).clamp(min=1)
        logits = _keep_first(logits, ordered.gather(-1, count - 1), count)
    return logits


def _keep_first(logits: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """The `count` (R, 1) largest, of which `least` (R, 1) is the last; of its equals those of lower id."""
    above, equal = logits > least, logits == least
    room = count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -torch.inf)


def sample_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF, and its log-prob before truncation.

    logits (R, V) of any float type, uniforms (R,). Returns ids (R,) and log-probs (R,) in float32
    (float64 for float64 logits), of the temperature-scaled distribution; where temperature is 0,
    the most likely token (the lower id of equals) and its log-prob at temperature 1.
    """
    exact = logits if logits.dtype == torch.float64 else logits.float()
    if temperature not in (0, 1):
        exact = exact / temperature
    largest = exact.amax(-1, keepdim=True)
    weights = _exponentials(exact, largest)  # (R, V)
    total = weights.sum(-1, keepdim=True)
    if temperature == 0:
        tokens = exact.argmax(-1, keepdim=True)
    else:
        kept = truncate(exact, top_k=top_k, top_p=top_p)
        if kept is not exact:
            weights = _exponentials(kept, largest)
        tokens = _inverse_cdf(weights, uniforms.unsqueeze(-1))
    # NaN logits give some token of the vocabulary: its log-prob is NaN, and will be seen.
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    logp = exact.gather(-1, tokens) - largest - total.log()
    return tokens.squeeze(-1), logp.squeeze(-1)


_BLOCK = 256
"""Tokens whose probabilities are added up first where the vocabulary is large."""


def _exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    """exp(logits - largest), (R, V); a large vocabulary is padded with zeros to whole blocks."""
    rows, vocabulary = logits.shape
    padding = -vocabulary % _BLOCK if vocabulary > 16 * _BLOCK else 0
    weights = logits.new_empty(rows, vocabulary + padding)
    weights[:, vocabulary:] = 0
    inside = weights[:, :vocabulary]
    torch.sub(logits, largest, out=inside)
    inside.exp_()
    return weights


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which weights (R, V), added up in the order of ids, pass a share (R, 1) of their total.

    A running sum over a large vocabulary is slow: there it is over sums of blocks, then in one block.
    """
    if weights.shape[-1] <= 16 * _BLOCK:
        tokens, _ = _first_above(weights, uniforms * weights.sum(-1, keepdim=True))
        return tokens
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1)  # (R, V / 256)
    block, rest = _first_above(sums, uniforms * sums.sum(-1, keepdim=True))
    within, _ = _first_above(blocks[torch.arange(len(block), device=block.device), block.squeeze(-1)], rest)
    return block * _BLOCK + within


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of weights (R, K) first exceeds target (R, 1), and what is left of it there.

    Never a place without weight: the target is kept below the sum of all, from which rounding may lift it.
    """
    cdf = weights.cumsum(-1)
    end = cdf[:, -1:]
    target = target.minimum(end.nextafter(torch.zeros_like(end)))
    place = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    before = cdf.gather(-1, place) - weights.gather(-1, place)
    return place, (target - before).clamp(min=0)
