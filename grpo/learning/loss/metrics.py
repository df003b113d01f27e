"""What a loss says of itself: sums and extremes of micro-batches, and a step's metrics made of them."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from grpo.config.groups import LossSettings


def loss_metrics(
    ratio: Tensor, kl: Tensor | None, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> dict[str, Tensor]:
    """What `finish_metrics` needs. Names in `_min` and `_max` combine so, all others by adding.

    At the sequence level a ratio belongs to a row, and rows without tokens count (as in TRL).
    """
    per_row = settings.importance_level == "sequence"
    valid = torch.ones_like(ratio, dtype=torch.bool) if per_row else mask  # where a ratio is one
    row_ratios = valid.sum(dim=1)

    def total(flags: Tensor) -> Tensor:
        return (flags & valid).sum().to(ratio)

    def largest(values: Tensor, where: Tensor) -> Tensor:  # -inf where there is none
        nothing = values.new_full((1,), -math.inf)
        return torch.cat([values.masked_fill(~where, -math.inf).flatten(), nothing]).max()

    def row_share(flags: Tensor) -> Tensor:  # of a row's ratios
        return (flags & valid).sum(dim=1) / row_ratios.clamp(min=1).to(ratio)

    metrics = {
        "tokens": mask.sum().to(ratio),
        "ratios": valid.sum().to(ratio),
        "ratio": torch.where(valid, ratio, 0.0).sum(),
        "ratio_min": -largest(-ratio, valid),
        "ratio_max": largest(ratio, valid),
    }
    high = (ratio > settings.ratio_high) & (advantages > 0)
    if settings.loss_type == "cispo":
        metrics["cispo_clip"] = total(high)
    else:
        low = (ratio < settings.ratio_low) & (advantages < 0)
        metrics["clip_low"] = total(low)
        metrics["clip_low_min"] = -largest(-row_share(low), row_ratios > 0)
        metrics["clip_high"] = total(high)
        metrics["clip_high_max"] = largest(row_share(high), row_ratios > 0)
        metrics["clip_region"] = total(low | high)
        if settings.dual_clip is not None:
            metrics["clip_dual"] = total((ratio > settings.dual_clip) & (advantages < 0))
    if kl is not None:
        metrics["kl"] = torch.where(mask, kl, 0.0).sum()
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
