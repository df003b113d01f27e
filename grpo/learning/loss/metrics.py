"""What a loss says of itself: sums and extremes of micro-batches, and a step's metrics made of them."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from grpo.config.groups import LossSettings
from grpo.learning.loss.tokens import Tokens


@torch.no_grad()
def loss_metrics(ratios: Mapping[str, Tensor], tokens: Tokens, settings: LossSettings) -> dict[str, Tensor]:
    """What `finish_metrics` needs, of what `token_loss` says.

    Names in `_min` and `_max` combine so, all others by adding.
    At the sequence level a ratio belongs to a row, and rows without tokens count (as in TRL).
    """
    ratio, row, advantage = ratios["log_ratio"].exp(), tokens.row, tokens.advantage
    if settings.importance_level == "sequence":
        row = torch.arange(tokens.num_rows, device=ratio.device)
        advantage = advantage.new_zeros(tokens.num_rows).index_copy(0, tokens.row, advantage)

    def by_row(values: Tensor) -> Tensor:
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
        "ratio": ratio.sum(),
        "ratio_min": -largest(-ratio),
        "ratio_max": largest(ratio),
    }
    high = (ratio > settings.ratio_high) & (advantage > 0)
    if settings.loss_type == "cispo":
        metrics["cispo_clip"] = high.sum().to(ratio)
    else:
        low = (ratio < settings.ratio_low) & (advantage < 0)
        metrics["clip_low"] = low.sum().to(ratio)
        metrics["clip_low_min"] = largest_share(low, -1)
        metrics["clip_high"] = high.sum().to(ratio)
        metrics["clip_high_max"] = largest_share(high, 1)
        metrics["clip_region"] = (low | high).sum().to(ratio)
        if settings.dual_clip is not None:
            metrics["clip_dual"] = ((ratio > settings.dual_clip) & (advantage < 0)).sum().to(ratio)
    if "kl" in ratios:
        metrics["kl"] = ratios["kl"].sum()
    return metrics


_FINISHED_NAMES = {
    "ratio": "ratio/mean",
    "ratio_min": "ratio/min",
    "ratio_max": "ratio/max",
    "clip_low": "clip_ratio/low_mean",
    "clip_low_min": "clip_ratio/low_min",
    "clip_high": "clip_ratio/high_mean",
    "clip_high_max": "clip_ratio/high_max",
    "clip_region": "clip_ratio/region_mean",
    "clip_dual": "clip_ratio/dual_mean",
    "cispo_clip": "cispo_clip_ratio",
    "kl": "kl",
}


def metric_reduction(name: str) -> Literal["sum", "min", "max"]:
    """How a metric of `grpo_loss` combines over micro-batches and processes."""
    if name.endswith("_min"):
        return "min"
    return "max" if name.endswith("_max") else "sum"


def merge_metrics(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of two micro-batches together; an empty mapping is nothing yet."""
    if not left or not right:
        return dict(left or right)
    combine: dict[str, Callable[[Tensor, Tensor], Tensor]]
    combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
    return {name: combine[metric_reduction(name)](left[name], right[name]) for name in left}


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
    counts = {"tokens": values.pop("tokens"), "ratios": values.pop("ratios")}
    finished = {}
    for name, value in values.items():
        count = counts["tokens" if name == "kl" else "ratios"]
        if not count:
            value = math.nan
        elif metric_reduction(name) == "sum":
            value /= count
        finished[_FINISHED_NAMES[name]] = value
    return finished
