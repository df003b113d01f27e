"""What is learned, GRPO and plain language modelling, as "accumulate gradients over micro-batches"."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.forward import recomputed_layers
from grpo.loss import (
    LossSettings,
    StepCounts,
    finish_metrics,
    grpo_loss,
    merge_metrics,
    truncated_importance_weights,
)
from grpo.scoring import micro_batch_logprobs, micro_batches, window_logprobs
from grpo.values import Rollout


@dataclass(frozen=True)
class GRPOBatch:
    """Everything the loss of one step depends on, frozen before the first backward pass.

    advantages: (N,). old_logp, ref_logp: (N, C) or None. mask: (N, C) tokens that are learned from.
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
    importance_cap: float | None = None,
    checkpoint: bool = False,
) -> dict[str, float]:
    """Add the step's gradient to the parameters' `.grad`, `rows` rows at a time.

    The split changes nothing (invariance I1), nor does `checkpoint`, which recomputes activations
    in the backward pass to save memory. Returns the loss, the entropy in nats a token, the
    difference between sampler and scorer in log-prob, and the metrics of `grpo_loss`.
    """
    device = model.device
    exact = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
    loss_sum = torch.zeros((), device=device, dtype=exact)
    entropy_sum, gap_sum, gap_max = loss_sum.clone(), loss_sum.clone(), loss_sum.clone()
    merged: dict[str, Tensor] = {}

    def part(values: Tensor | None, of: Tensor, width: int) -> Tensor | None:
        return None if values is None else values[of, :width].to(device)

    for micro in micro_batches(batch.rollout, rows):
        width = micro.completion_ids.shape[1]
        logp, entropy = micro_batch_logprobs(
            model, micro, temperature=temperature, dtype=dtype, entropy=True, checkpoint=checkpoint
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

        merged = merge_metrics(merged, metrics)
        gap = (logp.detach() - sampler_logp).abs() * batch.rollout.mask[micro.rows, :width].to(device)
        loss_sum += loss.detach()
        gap_sum += gap.sum()
        gap_max = torch.maximum(gap_max, gap.max().to(exact))
        if entropy is not None:
            entropy_sum += (entropy * mask).sum()

    tokens = max(batch.counts.tokens, 1)
    sampled_tokens = max(int(batch.rollout.lengths.sum()), 1)
    return {
        "loss": loss_sum.item(),
        "entropy": entropy_sum.item() / tokens,
        "sampling/sampling_logp_difference/mean": gap_sum.item() / sampled_tokens,
        "sampling/sampling_logp_difference/max": gap_max.item(),
        **(finish_metrics(merged) if batch.counts.tokens else {}),
    }


def accumulate_lm(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    checkpoint: bool = False,
) -> dict[str, float]:
    """Plain language modelling: add the gradient of the mean loss over `windows` (N, T + 1).

    Every token but a window's first is predicted. The split into `rows` at a time changes nothing.
    Returns the loss in nats a token.
    """
    num_tokens = windows[:, 1:].numel()
    exact = torch.float32 if model.device.type == "mps" else torch.float64
    total = torch.zeros((), device=model.device, dtype=exact)
    with recomputed_layers(model) if checkpoint else nullcontext():
        for part in windows.split(rows):
            loss = -window_logprobs(model, part, dtype=dtype).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    return {"loss": total.item()}


@torch.no_grad()
def heldout_loss(
    model: PreTrainedModel, windows: Tensor, *, dtype: torch.dtype, rows: int
) -> tuple[float, float]:
    """Mean loss over `windows` (N, T + 1) in nats a token, and its standard error over windows."""
    losses = torch.cat([-window_logprobs(model, part, dtype=dtype).mean(1) for part in windows.split(rows)])
    spread = losses.std().item() / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    return losses.mean().item(), spread
