"""Metrics of a loss: sums and extremes of micro-batches, and a step's metrics made of them.

A metric has its final name from the start, which tells how it combines: the least of `min`, the most of
`max`, the sum of all others.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo.config.groups import LossSettings

if TYPE_CHECKING:
    from grpo.learning.loss import Tokens


@torch.no_grad()
def loss_metrics(ratios: Mapping[str, Tensor], tokens: "Tokens", settings: LossSettings) -> dict[str, Tensor]:
    """Returns the sums and extremes that `finish_metrics` needs of a `token_loss`.

    At the sequence level a ratio belongs to a row, and rows without tokens count (as in TRL).
    """
    ratio, row, advantage = ratios["log_ratio"].exp(), tokens.row, tokens.advantage  # (K,) each
    if settings.importance_level == "sequence":
        row = torch.arange(tokens.num_rows, device=ratio.device)  # (R,), as the ratios
        advantage = advantage.new_zeros(tokens.num_rows).index_copy(0, tokens.row, advantage)

    def by_row(values: Tensor) -> Tensor:  # (R,)
        return ratio.new_zeros(tokens.num_rows).index_add(0, row, values.to(ratio))

    row_ratios = by_row(torch.ones_like(ratio))

    def largest(values: Tensor) -> Tensor:  # -inf where there is none
        return torch.cat([values, values.new_full((1,), -math.inf)]).max()

    def largest_share(flags: Tensor, sign: int) -> Tensor:  # of a row's ratios, of rows that have some
        share = sign * by_row(flags) / row_ratios.clamp(min=1)
        return sign * largest(share.masked_fill(row_ratios == 0, -math.inf))

    metrics = {
        "tokens": ratio.new_full((), len(tokens.row)),
        "ratios": ratio.new_full((), len(ratio)),
        "ratio/mean": ratio.sum(),
        "ratio/min": -largest(-ratio),
        "ratio/max": largest(ratio),
    }
    high = (ratio > settings.ratio_high) & (advantage > 0)
    low = (ratio < settings.ratio_low) & (advantage < 0)
    if settings.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = high.sum()
    else:
        metrics |= {
            "clip_ratio/low_mean": low.sum(),
            "clip_ratio/low_min": largest_share(low, -1),
            "clip_ratio/high_mean": high.sum(),
            "clip_ratio/high_max": largest_share(high, 1),
            "clip_ratio/region_mean": (low | high).sum(),
        }
    if settings.dual_clip is not None:
        metrics["clip_ratio/dual_mean"] = ((ratio > settings.dual_clip) & (advantage < 0)).sum()
    if "kl" in ratios:
        metrics["kl"] = ratios["kl"].sum()
    return {name: value.to(ratio) for name, value in metrics.items()}


def _combined_by(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    if name.endswith("min"):
        return torch.minimum
    return torch.maximum if name.endswith("max") else torch.add


def merge_metrics(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of two micro-batches together; an empty mapping is nothing yet."""
    if not left or not right:
        return dict(left or right)
    return {name: _combined_by(name)(left[name], right[name]) for name in left}


def finish_metrics(merged: Mapping[str, Tensor]) -> dict[str, float]:
    """The step's metrics by TRL's names, from merged ones; one transfer from the device.

    `kl` is nats per token. `clip_ratio/*` and `cispo_clip_ratio` are shares of ratios; `low_min` and
    `high_max` are the smallest and largest share in a row of the whole step (TRL takes them per
    micro-batch and averages). `ratio/*` and `clip_ratio/dual_mean` are our own. NaN where there is
    nothing to average; what is not finite is passed on. Nothing in, nothing out.
    """
    if not merged:
        return {}
    values = dict(zip(merged, torch.stack(list(merged.values())).tolist(), strict=True))
    tokens, ratios = values.pop("tokens"), values.pop("ratios")
    finished = {}
    for name, value in values.items():
        count = tokens if name == "kl" else ratios
        is_sum = _combined_by(name) is torch.add
        finished[name] = math.nan if not count else value / count if is_sum else value
    return finished
