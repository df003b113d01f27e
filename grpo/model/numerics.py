"""Numerics that our functions share with those of torch and transformers that they replace."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo.errors import UserError

MIN_LOGP = -30.0
"""A log-prob that is as good as none: none such is sampled, and fp32 knows -10,000 to a thousandth."""
MODEL_ERRORS = TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError, IndexError
"""Errors that a model raises that cannot be run the way that is tried."""


def matmul_dtype(values: Tensor) -> torch.dtype:
    """Returns the dtype of products of these values: autocast's, which leaves float64 alone, or their own."""
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


class ScoreRule(NamedTuple):
    """The changes that a model makes to scores of attention beside scaling them, as it tells its
    attention."""

    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap): Gemma 2."""
    sinks: Tensor | None = None
    """(H,) the score of a token that each one sees, and that has no value: GPT-OSS."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ScoreRule":
        """Reads it from what transformers calls attention with; ValueError for what is none of both."""
        if options.get("position_bias") is not None:
            raise UserError("its attention takes position_bias, which is not supported here.")
        return cls(options.get("softcap"), options.get("s_aux"))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done."""
        return self.softcap is None and self.sinks is None

    def capped(self, scores: Tensor) -> Tensor:
        """Returns scores that nothing is masked of, capped."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def weights(self, scores: Tensor) -> Tensor:
        """Returns the softmax of masked scores (R, H, Q, K), where the sinks take their share."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


PLAIN = ScoreRule()


@contextmanager
def without_tf32() -> Iterator[None]:
    """Without TF32 and its like, whose rounding would pass for an error where the two are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
