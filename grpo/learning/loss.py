"""The clipped policy-gradient losses of GRPO and its kin, as pure functions of tensors.

A step of any number of rows may be split into streams: each loss is a SUM over tokens, of what a token weighs
(`token_weights`: one over a count of the WHOLE step) times the loss of that token. Their losses, gradients
and metric sums therefore add up to the step's, however the rows were split (invariance I1).

Shapes: K tokens that are learned from, of R rows of a stream. What is not finite is not hidden: it reaches
the loss and the metrics, so that the caller can skip the step.

TRL 1.16's `GRPOTrainer._compute_loss` is the measure; tests/learning/test_loss_equals_trl.py
compares values, gradients and metrics. Left out on purpose: bnpo (its value depends on the split), sapo,
luspo, vespo, the entropy bonus, and k1 in the loss (its gradient has zero mean on-policy; it goes
into the reward).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo.config.groups import LossSettings, LossType
from grpo.errors import UserError
from grpo.types import Batch


@dataclass(frozen=True)
class StepCounts:
    """Counts of the whole step, summed over processes, which losses are divided by."""

    rows: int
    """Completions in the step, those without a token in the mask included."""
    tokens: int
    """Completion tokens in the mask."""
    max_length: int
    """The longest a completion may be (a setting, not what was seen)."""


def loss_counts(batch: Batch, max_length: int) -> StepCounts:
    """Counts a step that is this batch, before it is split."""
    return StepCounts(rows=len(batch), tokens=int(batch.learned.sum()), max_length=max_length)


def token_weights(row_tokens: Tensor, counts: StepCounts, loss_type: LossType) -> Tensor:
    """Returns the weight of each row's tokens in the step's loss, (R,) in float64, fixed before any pass.

    row_tokens: (R,) tokens of the rows that are learned from.
    """
    if loss_type == "grpo":  # each row's mean
        return 1 / (row_tokens.clamp(min=1).double() * max(counts.rows, 1))
    total = counts.rows * counts.max_length if loss_type == "dr_grpo" else counts.tokens
    return torch.full_like(row_tokens, 1 / max(total, 1), dtype=torch.float64)


@dataclass(frozen=True)
class Tokens:
    """The tokens of `num_rows` rows that are learned from, row by row: (K,) each, nothing is padded."""

    num_rows: int
    row: Tensor
    """Which of the rows it belongs to, from 0 on."""
    weight: Tensor
    """Its weight in the step's loss, which is sum(weight * loss of the token)."""
    advantage: Tensor
    sampler_logp: Tensor
    """Log-probs as the sampler saw them, which `importance_cap` corrects for."""
    old_logp: Tensor | None = None
    """Log-probs under the policy that is corrected for; None: the policy as it is (one update a batch)."""
    ref_logp: Tensor | None = None
    """Log-probs under the reference model, where there is one."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that there are, by name."""
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value)}

    def part(self, which: slice) -> "Tokens":
        """Returns some of the K tokens."""
        return self.with_tensors({name: value[which] for name, value in self.tensors().items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Tokens":
        """Returns the same with others in place of its `tensors`."""
        return replace(self, **tensors)  # type: ignore[arg-type]  # none of them is the number of rows


def token_loss(
    logp: Tensor,
    tokens: Tokens,
    settings: LossSettings,
    *,
    importance_cap: float | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what each token adds to the step's loss, (K,), and what `loss_metrics` is made of.

    logp: (K,) log-probs, of which the losses are: PPO's clip (1707.06347, eq. 7) with dual clip (1912.09729),
    averaged as GRPO (2402.03300, eq. 3), DAPO (2503.14476, eq. 8) or Dr. GRPO (2503.20783) do; CISPO
    (2506.13585, eq. 4); sequence ratios by GSPO (2507.18071, eq. 7), for which all tokens of a row have to be
    here. Computed in fp32 or finer.

    importance_cap: see `truncated_importance_weights`; those, or given `importance_weights` (K,), multiply
    the policy's loss, not the KL. The second result: the log-ratios, (K,) or of sequences (num_rows,), and
    the KL (K,), if there is a reference.
    """
    if settings.kl_coef != 0 and tokens.ref_logp is None:
        raise UserError(
            f"kl_coef is {settings.kl_coef} but ref_logp is None: score the reference, or set it to 0."
        )
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp = logp.to(dtype)
    old_logp = logp.detach() if tokens.old_logp is None else tokens.old_logp.to(dtype)
    log_ratio = logp - old_logp  # (K,)
    ratios = {"log_ratio": log_ratio}
    if settings.importance_level == "sequence":  # the mean over the row
        sums = logp.new_zeros(2, tokens.num_rows)  # of log-ratios and of tokens: (2, R)
        sums = sums.index_add(1, tokens.row, torch.stack([log_ratio, torch.ones_like(logp)]))
        ratios["log_ratio"] = sums[0] / sums[1].clamp(min=1)
        log_ratio = ratios["log_ratio"][tokens.row]
    loss = _policy_loss(logp, log_ratio, tokens.advantage.to(dtype), settings)
    if importance_cap is not None:
        importance_weights = truncated_importance_weights(old_logp, tokens.sampler_logp, cap=importance_cap)
    if importance_weights is not None:
        loss = loss * importance_weights.to(dtype)
    if tokens.ref_logp is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and settings.kl_coef != 0):
            ratios["kl"] = _kl(logp, tokens.ref_logp.to(dtype), log_ratio, settings)
        if settings.kl_coef != 0:
            loss = loss + settings.kl_coef * ratios["kl"]
    return tokens.weight.to(dtype) * loss, ratios


def _policy_loss(logp: Tensor, log_ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    taught = advantage != 0  # a row without advantage teaches nothing, whatever its ratio (0 * inf is NaN)
    ratio = torch.where(taught, log_ratio, 0.0).exp()
    if settings.loss_type == "cispo":
        return -ratio.detach().clamp(max=settings.ratio_high) * advantage * torch.where(taught, logp, 0.0)
    clipped = ratio.clamp(settings.ratio_low, settings.ratio_high)
    if settings.dual_clip is not None:
        ratio = ratio.clamp(max=settings.dual_clip)
    return -torch.min(ratio * advantage, clipped * advantage)


def _kl(logp: Tensor, ref_logp: Tensor, log_ratio: Tensor, settings: LossSettings) -> Tensor:
    """KL(policy, reference) per token, (K,): Schulman's k2 or k3 (joschu.net/blog/kl-approx.html).

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


def truncated_importance_weights(old_logp: Tensor, sampler_logp: Tensor, *, cap: float) -> Tensor:
    """min(p_scorer / p_sampler, cap) per token: corrects for a sampler that rounds differently.

    Truncated importance sampling (Yao et al. 2025; TRL's "token_truncate").
    """
    return (old_logp.detach() - sampler_logp.detach()).exp().clamp(max=cap)


def adaptive_kl(
    kl_coef: float, kl: float, target: float, *, gain: float = 0.1, max_error: float = 0.2
) -> float:
    """The next step's KL coefficient, so that the KL (nats per token) settles at `target`.

    The log-space proportional controller of Ziegler et al. 2019 (1909.08593, section 2.2): the
    relative error, clipped to ±max_error, times `gain`, is the coefficient's relative change.
    """
    if not target > 0:
        raise UserError(f"The KL target is {target}; it must be above 0 nats a token (usual: 0.01 to 0.1).")
    if not math.isfinite(kl):
        raise UserError(f"The KL is {kl}: such a step must be skipped, it tells nothing of the coefficient.")
    error = min(max(kl / target - 1, -max_error), max_error)
    return kl_coef * (1 + gain * error)
