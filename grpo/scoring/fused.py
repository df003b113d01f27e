"""The head's work number by number as one kernel each way, compiled on CUDA.

Operation by operation a logit moves 98 bytes there, of which 15 are needed: its product is read twice and
written once, in 16 bits mostly. Whether the compiler is there, and right, is tried once on made-up numbers;
where not, one line says so and the operations run one by one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from loguru import logger
from torch import Tensor

COMPILED_ON = ("cuda",)
_FEW, _TOLERANCE = 8, 1e-3
"""Tokens that are tried, and what may differ: in nats, and of a gradient of size 1."""
_works: dict[tuple[str, torch.dtype], bool] = {}
"""By kind of device and dtype of products."""


def is_fused(device: torch.device, dtype: torch.dtype, *, traced: bool = False) -> bool:
    """Whether `scores` and `to_gradient` serve for products in `dtype`.

    traced: only the memory of that device is asked for, and the tensors are another's.
    """
    if traced:
        return was_fused(device.type, dtype)
    if device.type not in COMPILED_ON:
        return False
    known = device.type, dtype
    if known not in _works:
        _works[known] = _try(device, dtype)
    return _works[known]


def was_fused(device_type: str, dtype: torch.dtype) -> bool:
    """Whether it was tried in this process, and worked."""
    return _works.get((device_type, dtype), False)


@torch.no_grad()
def scores(products: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-prob, entropy, largest logit and log-sum of each token, (K, 4), of products (K, V)."""
    if products.device.type not in COMPILED_ON:  # a trace
        return products.new_empty(len(products), 4, dtype=_exact(products))
    found: Tensor = _for(products, _scores)(products, targets, temperature)
    return found


@torch.no_grad()
def to_gradient(
    products: Tensor, normalizers: Tensor, targets: Tensor, slope: Tensor, temperature: float
) -> None:
    """slope (K, 1) times (one-hot(targets) - softmax(products / temperature)), in place of products (K, V).

    normalizers: the largest logits and log-sums (K, 2) of `scores`.
    """
    if products.device.type in COMPILED_ON:
        _for(products, _to_gradient)(products, normalizers, targets, slope, temperature)


def _scores(products: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = products.to(_exact(products)) / temperature
    largest = logits.amax(1, keepdim=True)
    shifted = logits - largest
    probs = shifted.exp()
    total = probs.sum(1, keepdim=True)
    log_total = total.log()
    logp = shifted.gather(1, targets.unsqueeze(1)) - log_total
    lowest = torch.finfo(logits.dtype).min  # a token that cannot occur (logit -inf) adds 0, not 0 * -inf
    entropies = log_total - (probs * shifted.clamp(min=lowest)).sum(1, keepdim=True) / total
    return torch.cat([logp, entropies, largest, log_total], dim=1)


def _to_gradient(
    products: Tensor, normalizers: Tensor, targets: Tensor, slope: Tensor, temperature: float
) -> None:
    logits = products.to(normalizers.dtype) / temperature
    probs = (logits - normalizers[:, :1] - normalizers[:, 1:]).exp()
    is_target = torch.arange(products.shape[1], device=products.device) == targets.unsqueeze(1)
    products.copy_(slope * (is_target.to(probs.dtype) - probs))


def _exact(products: Tensor) -> torch.dtype:
    return torch.promote_types(products.dtype, torch.float32)


def _for(products: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler makes another kernel for a single token, and goes without after eight: it is not asked."""
    return _compiled(function) if len(products) > 1 else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)  # the number of tokens changes


@torch.no_grad()
def _try(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled functions give what plain ones give."""
    generator = torch.Generator().manual_seed(0)
    products = (4 * torch.randn(_FEW, 1024, generator=generator)).to(device, dtype)[:, :1000]
    targets = torch.arange(_FEW, device=device)
    slope = torch.ones(_FEW, 1, device=device, dtype=_exact(products))
    try:
        found, expected = (made(products, targets, 1.0) for made in (_compiled(_scores), _scores))
        found_gradient, expected_gradient = products.clone(), products.clone()
        _compiled(_to_gradient)(found_gradient, expected[:, 2:], targets, slope, 1.0)
        _to_gradient(expected_gradient, expected[:, 2:], targets, slope, 1.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler says
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        logger.warning("the head's kernels are not fused, slower: {}", reason)
        return False
    pairs = ((found, expected), (found_gradient, expected_gradient))
    if all(torch.allclose(one.to(other), other, rtol=_TOLERANCE, atol=_TOLERANCE) for one, other in pairs):
        return True
    logger.warning("the head's kernels are not fused, slower: compiled ones give something else")
    return False
