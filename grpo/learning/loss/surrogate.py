"""The loss of a micro-batch: clipped policy gradient and KL, and what both are weighted by."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.config.groups import LossSettings
from grpo.learning.loss.metrics import loss_metrics


@dataclass(frozen=True)
class StepCounts:
    """What the losses are divided by: counts of the whole step, summed over processes."""

    rows: int
    """Completions in the step, those without a token in the mask included."""
    tokens: int
    """Completion tokens in the mask."""
    max_length: int
    """The longest a completion may be (a setting, not what was seen)."""


def loss_counts(mask: Tensor, max_length: int) -> StepCounts:
    """The counts of a step whose completion mask is (N, C), before it is split."""
    return StepCounts(rows=mask.shape[0], tokens=int(mask.bool().sum()), max_length=max_length)


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    counts: StepCounts,
    settings: LossSettings,
    importance_weights: Tensor | None = None,
    measured: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the step's loss, to call backward on, and of its metrics.

    logp: (R, C) log-probs with gradient. old_logp: (R, C) of the policy that is corrected for, or
    None for `logp` itself (one update per rollout). ref_logp: (R, C) or None; needed unless
    kl_coef is 0, and only measured if it is. advantages: (R,), or (R, C) where tokens have credit of their
    own. mask: (R, C) bool or 0/1.
    importance_weights: (R, C) or (R, 1), multiply the policy's loss, not the KL.
    measured: whether metrics are wanted, which take as long as the loss.

    Losses: PPO's clip (1707.06347, eq. 7) with dual clip (1912.09729), averaged as GRPO
    (2402.03300, eq. 3), DAPO (2503.14476, eq. 8) or Dr. GRPO (2503.20783) do; CISPO (2506.13585,
    eq. 4); sequence ratios by GSPO (2507.18071, eq. 7).

    Computed in fp32 or finer. Metrics are detached scalars for `merge_metrics`, `finish_metrics`.
    Zero rows give a loss of 0 and metrics that change nothing.
    """
    shapes = [tuple(t.shape) for t in (logp, old_logp, ref_logp, mask) if t is not None]
    if logp.ndim != 2 or len(set(shapes)) > 1 or advantages.shape not in (logp.shape, logp.shape[:1]):
        raise ValueError(
            f"Need log-probs and mask (R, C), advantages (R,) or (R, C); got {shapes}, "
            f"{tuple(advantages.shape)}."
        )
    if settings.kl_coef != 0 and ref_logp is None:
        raise ValueError(
            f"kl_coef is {settings.kl_coef} but ref_logp is None: score the reference, or set it to 0."
        )
    mask = mask.bool()
    dtype = torch.promote_types(logp.dtype, torch.float32)

    def inside(values: Tensor) -> Tensor:  # before any exp: 0 * exp(inf) is NaN, in backward too
        return torch.where(mask, values.to(dtype), 0.0)

    logp = inside(logp)
    old_logp = logp.detach() if old_logp is None else inside(old_logp.detach())
    advantages = advantages.to(dtype)
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1)  # (R, 1)
    row_tokens = mask.sum(dim=1).clamp(min=1)  # (R,)

    log_ratio = logp - old_logp
    if settings.importance_level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / row_tokens.unsqueeze(1)  # (R, 1)

    token_loss = _policy_loss(logp, log_ratio, advantages, settings)  # (R, C) or (R, 1)
    if importance_weights is not None:
        token_loss = token_loss * inside(importance_weights.detach().expand_as(mask))
    kl = None
    if ref_logp is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and settings.kl_coef != 0):
            kl = _kl(logp, inside(ref_logp.detach()), log_ratio, settings)  # (R, C)
        if settings.kl_coef != 0:
            token_loss = token_loss + settings.kl_coef * kl
    token_loss = torch.where(mask, token_loss, 0.0)  # (R, C)

    if settings.loss_type == "grpo":
        loss = (token_loss.sum(dim=1) / row_tokens).sum() / max(counts.rows, 1)
    elif settings.loss_type == "dr_grpo":
        loss = token_loss.sum() / max(counts.rows * counts.max_length, 1)
    else:
        loss = token_loss.sum() / max(counts.tokens, 1)
    with torch.no_grad():
        return loss, loss_metrics(log_ratio.exp(), kl, advantages, mask, settings) if measured else {}


def _policy_loss(logp: Tensor, log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    taught = advantages != 0  # a row without advantage teaches nothing, whatever its ratio (0 * inf is NaN)
    ratio = torch.where(taught, log_ratio, 0.0).exp()
    if settings.loss_type == "cispo":
        return -ratio.detach().clamp(max=settings.ratio_high) * advantages * torch.where(taught, logp, 0.0)
    clipped = ratio.clamp(settings.ratio_low, settings.ratio_high)
    if settings.dual_clip is not None:
        ratio = ratio.clamp(max=settings.dual_clip)
    return -torch.min(ratio * advantages, clipped * advantages)


def _kl(logp: Tensor, ref_logp: Tensor, log_ratio: Tensor, settings: LossSettings) -> Tensor:
    """KL(policy, reference) per token, (R, C): Schulman's k2 or k3 (joschu.net/blog/kl-approx.html).

    Corrected (DeepSeek-V3.2, 2512.02556), the expected gradient over the old policy's samples is
    that of the reverse KL. For k3 the ratio must carry gradient; for k2 it must not, because k2's
    gradient is already the reverse KL's on-policy.
    """
    behind = ref_logp - logp
    if settings.kl_estimator == "k2":
        kl = behind.square() / 2
        return kl * log_ratio.detach().exp() if settings.kl_correction else kl
    kl = behind.exp() - behind - 1
    return kl * log_ratio.exp() if settings.kl_correction else kl


def truncated_importance_weights(
    old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """min(p_scorer / p_sampler, cap) per token, (R, C): corrects for a sampler that rounds differently.

    Truncated importance sampling (Yao et al. 2025; TRL's "token_truncate"). 1 outside the mask.
    """
    log_weight = torch.where(mask.bool(), old_logp.detach() - sampler_logp.detach(), 0.0)
    return log_weight.exp().clamp(max=cap)


def adaptive_kl(
    kl_coef: float, kl: float, target: float, *, gain: float = 0.1, max_error: float = 0.2
) -> float:
    """The next step's KL coefficient, so that the KL (nats per token) settles at `target`.

    The log-space proportional controller of Ziegler et al. 2019 (1909.08593, section 2.2): the
    relative error, clipped to ±max_error, times `gain`, is the coefficient's relative change.
    """
    if not target > 0:
        raise ValueError(
            f"The KL target is {target}; it must be above 0 nats per token (usual: 0.01 to 0.1)."
        )
    if not math.isfinite(kl):
        raise ValueError(
            f"The KL is {kl}: such a step must be skipped, its KL says nothing about the coefficient."
        )
    error = min(max(kl / target - 1, -max_error), max_error)
    return kl_coef * (1 + gain * error)
