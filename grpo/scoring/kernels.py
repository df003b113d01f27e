"""Elementwise operations on a head's logits, as compiled kernels where those are right.

Operation by operation a logit moves 98 bytes on a card, of which 15 are needed: its product is read twice and
written once, in 16 bits mostly. Whether the compiler is there, and right, is tried once on made-up numbers;
where not, one line says so and the operations run one by one, as they do on other devices.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from loguru import logger
from torch import Tensor

COMPILED_ON = ("cuda",)
_TRIED_TOKENS, _TOLERANCE = 8, 1e-3
"""Tokens that are tried, and what may differ: in nats, and of a gradient of size 1."""
_works: dict[tuple[str, torch.dtype], bool] = {}
"""Whether compiled kernels were found right in this process, by kind of device and dtype of products."""


def try_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Find out, once, whether compiled functions give what plain ones give, of made-up products."""
    if device.type not in COMPILED_ON or (device.type, dtype) in _works:
        return
    generator = torch.Generator().manual_seed(0)
    products = (4 * torch.randn(_TRIED_TOKENS, 1024, generator=generator)).to(device, dtype)[:, :1000]
    targets = torch.arange(_TRIED_TOKENS, device=device)
    reason, results = "", []
    try:
        for score, fill in ((scores_of, fill_softmax), (_compiled(scores_of), _compiled(fill_softmax))):
            scores, gradient = score(products, targets, 1.0, True), products.clone()
            fill(gradient, scores[:, 2:], torch.ones_like(scores[:, :1]), 1.0)
            results.append((scores, gradient.to(scores.dtype)))
        pairs = zip(*results, strict=True)
        if not all(torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE) for one, other in pairs):
            reason = "compiled ones give something else"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler says
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if reason:
        logger.warning("the head's kernels are not fused, slower: {}", reason)
    _works[device.type, dtype] = not reason


def are_compiled(device_type: str, dtype: torch.dtype) -> bool:
    """Whether logits in `dtype` go through compiled kernels there, which were tried, and worked."""
    return _works.get((device_type, dtype), False)


def compiled(function: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    """It, compiled, unless there is one token: for that the compiler would make another kernel, and after
    eight it goes without.
    """
    return _compiled(function) if tokens > 1 else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)  # the number of tokens changes


def scores_of(products: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Tensor:
    """Log-prob, entropy (or 0), largest logit and log-sum of each token, (k, 4), of products (k, V)."""
    exact = torch.promote_types(products.dtype, torch.float32)
    largest = products.amax(dim=1, keepdim=True).to(exact)
    # Shifted by the largest, as log_softmax does: GPT-2's logits lie near -100, where fp32 is coarse.
    shifted = products - largest  # (k, V) in `exact`
    if temperature != 1:
        shifted.div_(temperature)
        largest = largest / temperature
    logits = shifted.gather(1, targets.unsqueeze(1))
    probs = shifted.exp() if entropy else shifted.exp_()
    total = probs.sum(dim=1, keepdim=True)
    log_total = total.log()
    entropies = torch.zeros_like(total)
    if entropy:  # a token that cannot occur (logit -inf) adds 0, not 0 * -inf
        lowest = torch.finfo(exact).min
        entropies = log_total - probs.mul_(shifted.clamp_(min=lowest)).sum(dim=1, keepdim=True) / total
    return torch.cat([logits - log_total, entropies, largest, log_total], dim=1)


def fill_softmax(products: Tensor, normalizers: Tensor, slope: Tensor, temperature: float) -> None:
    """Products (k, V) become -slope * softmax(products / temperature).

    normalizers: the largest logits and log-sums (k, 2). slope: (k, 1).
    """
    logits = products.to(normalizers.dtype)  # the products themselves where they are as exact
    if temperature != 1:
        logits.div_(temperature)
    logits.sub_(normalizers[:, :1]).sub_(normalizers[:, 1:]).exp_().mul_(-slope)
    if logits.dtype != products.dtype:
        products.copy_(logits)
