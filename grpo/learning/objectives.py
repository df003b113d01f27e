"""What is learned, as "accumulate gradients over micro-batches"."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing
from grpo.learning.loss import (
    LossSettings,
    StepCounts,
    finish_metrics,
    grpo_loss,
    merge_metrics,
    truncated_importance_weights,
)
from grpo.learning.step import begin_gradients
from grpo.scoring.micro_batches import micro_batch_logprobs, micro_batches
from grpo.types import Rollout

Sums = dict[str, Tensor]
"""Sums, least and largest values over rows, as `merge_metrics` puts them together; empty without rows."""


@dataclass(frozen=True)
class GRPOBatch:
    """Everything the loss of one step depends on, frozen before the first backward pass.

    Of the rows that this process learns from; `counts` are of the whole step. advantages: (N,).
    old_logp, ref_logp: (N, C) or None. mask: (N, C) tokens that are learned from.
    """

    rollout: Rollout
    advantages: Tensor
    mask: Tensor
    counts: StepCounts
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None


def accumulate_grpo(
    model: PreTrainedModel,
    batch: GRPOBatch,
    *,
    settings: LossSettings,
    temperature: float,
    dtype: torch.dtype,
    rows: int,
    pass_tokens: int | None = None,
    importance_cap: float | None = None,
    checkpointing: Checkpointing = "none",
) -> Sums:
    """Add the step's gradient to the parameters' `.grad`, in the parts that `micro_batches` makes.

    The split changes nothing (invariance I1), nor does `checkpointing`: what the backward pass
    computes again to save memory. Returns what `finish_grpo` makes metrics of.
    """
    device = model.device
    exact = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
    sums: Sums = {}
    begin_gradients(model)

    def part(values: Tensor | None, of: Tensor, width: int) -> Tensor | None:
        return None if values is None else values[of, :width].to(device)

    for micro in micro_batches(batch.rollout, rows, pass_tokens=pass_tokens):
        width = micro.completion_ids.shape[1]
        logp, entropy = micro_batch_logprobs(
            model, micro, temperature=temperature, dtype=dtype, entropy=True, checkpointing=checkpointing
        )  # (R, C)
        sampler_logp = batch.rollout.sampler_logp[micro.rows, :width].to(device)
        old_logp = part(batch.old_logp, micro.rows, width)
        mask = batch.mask[micro.rows, :width].to(device)
        weights = None
        if importance_cap is not None:
            scored = logp.detach() if old_logp is None else old_logp
            weights = truncated_importance_weights(scored, sampler_logp, mask, cap=importance_cap)
        loss, metrics = grpo_loss(
            logp, old_logp, part(batch.ref_logp, micro.rows, width),
            batch.advantages[micro.rows].to(device=device, dtype=logp.dtype), mask,
            counts=batch.counts, settings=settings, importance_weights=weights,
        )  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]

        gap = (logp.detach() - sampler_logp).abs() * batch.rollout.mask[micro.rows, :width].to(device)
        metrics |= {"loss": loss.detach(), "gap": gap.sum(), "gap_max": gap.max()}
        if entropy is not None:
            metrics["entropy"] = (entropy * mask).sum()
        sums = merge_metrics(sums, {name: value.to(exact) for name, value in metrics.items()})
    return dict(zip(sums, torch.stack(list(sums.values())).cpu(), strict=True))


def finish_grpo(parts: Sequence[Sums], counts: StepCounts, sampled_tokens: int) -> dict[str, float]:
    """A step's metrics from what `accumulate_grpo` returned, in each process or in one.

    The loss, the entropy in nats a token, the difference between sampler and scorer in log-prob (over all
    `sampled_tokens`, masked or not), and the metrics of `grpo_loss`.
    """
    sums: Sums = {}
    for part in parts:
        sums = merge_metrics(sums, part)
    loss, entropy = sums.pop("loss").item(), sums.pop("entropy").item()
    gap, gap_max = sums.pop("gap").item(), sums.pop("gap_max").item()
    return {
        "loss": loss,
        "entropy": entropy / max(counts.tokens, 1),
        "sampling/sampling_logp_difference/mean": gap / max(sampled_tokens, 1),
        "sampling/sampling_logp_difference/max": gap_max,
        **(finish_metrics(sums) if counts.tokens else {}),
    }
