"""What functions of ours have to mind that stand in for torch's and transformers'."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo.errors import UserError

NEVER = -30.0
"""A log-prob that is as good as none: none such is sampled, and fp32 knows -10,000 to a thousandth."""
MODEL_ERRORS = TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError, IndexError
"""Errors that a model raises that cannot be run the way that is tried."""
_OF_SCORES = "softcap", "s_aux", "position_bias"


def product_dtype(values: Tensor) -> torch.dtype:
    """Of products of these values: autocast's where it is on, which leaves float64 alone, else their own."""
    device = values.device.type
    if values.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return values.dtype


def computing_in(dtype: torch.dtype, device: torch.device, *, keeps_casts: bool = True) -> torch.autocast:
    """Inside, matrix products are computed in `dtype`, where it is lower than the weights' own.

    keeps_casts: whether weights that are trained are cast once for all of their uses inside.
    """
    lower = dtype in (torch.bfloat16, torch.float16)
    lowest = dtype if lower else torch.bfloat16
    return torch.autocast(
        device.type, dtype=lowest, enabled=lower, cache_enabled=None if keeps_casts else False
    )


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """ValueError for what some models (Gemma 2, GPT-OSS) would have an attention change about its scores."""
    if wanted := [name for name in _OF_SCORES if options.get(name) is not None]:
        raise UserError(f"its attention takes {', '.join(wanted)}, which is not supported here.")


@contextmanager
def exact_products() -> Iterator[None]:
    """Without TF32 and its like, whose rounding would pass for an error where the two are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
