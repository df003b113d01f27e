"""The vocabulary head in lower precision, a part of it at a time, and what models do to its products."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor
from transformers import PretrainedConfig

CAST_ROWS = 4096
"""Rows of a matrix, such as the vocabulary's, that are cast at once: a whole copy in fp32 would be large."""


_CAPS = "final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"
"""Names of a soft cap on logits in configurations: of Gemma 2, xLSTM and RecurrentGemma."""


class LogitRule(NamedTuple):
    """How a model makes logits of its head's products z: scale · z, or cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> "LogitRule":
        """By the names that transformers has for it; the checks at load find out whether it is so."""
        text = config.get_text_config(decoder=True)
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):  # Cohere, Falcon-H1, Granite
            factor = getattr(text, name, None) or 1.0
            divides = name == "logits_scaling" and text.model_type != "hyperclovax"
            scale *= 1 / factor if divides else factor
        caps = [getattr(text, name, None) for name in _CAPS]
        return cls(scale, next((cap for cap in caps if cap), None))

    def __call__(self, products: Tensor) -> Tensor:
        """Logits of products, in their place where there is something to be done."""
        if self.cap is None:
            return products if self.scale == 1 else products.mul_(self.scale)
        return products.mul_(self.scale / self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of logits by products."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


def chunks(count: int, size: int, tensor: Tensor) -> Iterator[slice]:
    """Places of `count` things of a tensor, `size` at a time.

    Of a tensor without storage, as in a trace of memory, the first alone: the others hold no more.
    """
    is_traced = tensor.untyped_storage().device.type == "meta"
    for start in range(0, min(count, size) if is_traced else count, size):
        yield slice(start, start + size)


def centred_head(weight: Tensor, dtype: torch.dtype, rule: LogitRule | None = None) -> Tensor:
    """A head (V, D), or its bias (V,), in `dtype`, less its mean over the vocabulary.

    The mean adds the same to all logits of a token, which no probability sees, but rounding does:
    GPT-2's lie near -100, where bf16 knows halves only. Where logits are capped, their mean counts.
    """
    if rule is not None and rule.cap is not None:
        return weight.to(dtype)
    finite = weight[weight.isfinite()] if weight.dim() == 1 else weight  # a token that cannot occur has -inf
    mean = finite.mean(0, dtype=torch.float32)
    centred = torch.empty_like(weight, dtype=dtype)
    for rows in chunks(len(weight), CAST_ROWS, weight):
        centred[rows].copy_(weight[rows] - mean)
    return centred


@cache
def adds_in(exact: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether a product of numbers in `dtype` can be added to ones that are more exact; tried once.

    That is `torch.addmm` with an `out_dtype`, which CUDA has.
    """
    if device.type != "cuda":
        return False
    ones, total = torch.ones(8, 8, dtype=dtype, device=device), torch.ones(8, 8, dtype=exact, device=device)
    try:
        torch.addmm(total, ones.T, ones, out_dtype=exact, out=total)
        works = bool((total == 9).all())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        works, reason = False, str(error).splitlines()[0]
    else:
        reason = "they come out wrong"
    if not works:
        logger.info("products are not added to sums in {} at once, slower: {}", exact, reason)
    return works


def factor_dtype(dtype: torch.dtype, device: torch.device, *, fp32_logits: bool) -> torch.dtype:
    """Returns what a head's weight and its states are multiplied in, where others are multiplied in `dtype`.

    fp32_logits: whether logits are to be rounded to fp32 alone, see `multiply`.
    """
    exact = torch.promote_types(dtype, torch.float32)
    return exact if fp32_logits and not adds_in(exact, dtype, device) else dtype


def multiply(states: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Returns states (k, D) @ weightᵀ (D, V) + bias (V,) in `out` (k, V), which may be more exact."""
    if out.dtype != states.dtype:
        start = out.zero_() if bias is None else out.copy_(bias)
        return torch.addmm(start, states, weight.T, out_dtype=out.dtype, out=out)
    if bias is None:
        return torch.mm(states, weight.T, out=out)
    return torch.addmm(bias, states, weight.T, out=out)
