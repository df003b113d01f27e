"""The loss of padded rows, as TRL has it: a small caller of `token_loss`."""

from torch import Tensor

from grpo.config.groups import LossSettings
from grpo.learning.loss import StepCounts, Tokens, token_loss, token_weights
from grpo.learning.metrics import loss_metrics


def counts_of(mask: Tensor, max_length: int) -> StepCounts:
    """The counts of a step whose completion mask is (N, C)."""
    return StepCounts(rows=len(mask), tokens=int(mask.bool().sum()), max_length=max_length)


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the step's loss, to call backward on, and of its metrics.

    logp: (R, C) log-probs with gradient. old_logp: (R, C) of the policy that is corrected for, or
    None for `logp` itself (one update per rollout). ref_logp: (R, C) or None; needed unless
    kl_coef is 0, and only measured if it is. advantages: (R,), or (R, C) where tokens have credit of their
    own. mask: (R, C) bool or 0/1: what stands outside is never read, not even as NaN, and gets a gradient of
    exactly zero. importance_weights: (R, C) or (R, 1), multiply the policy's loss, not the KL. The loss of
    rows is the sum of `token_loss`.

    Metrics are detached scalars for `merge_metrics`, `finish_metrics`. Zero rows give a loss of 0 and metrics
    that change nothing. ValueError for shapes that do not go together.
    """
    shapes = [tuple(t.shape) for t in (logp, old_logp, ref_logp, mask) if t is not None]
    if logp.ndim != 2 or len(set(shapes)) > 1 or advantages.shape not in (logp.shape, logp.shape[:1]):
        raise ValueError(
            f"Need log-probs and mask (R, C), advantages (R,) or (R, C); got {shapes}, "
            f"{tuple(advantages.shape)}."
        )
    at = mask.nonzero(as_tuple=True)  # rows and places, (K,) each

    def learned(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().expand_as(logp)[at]

    tokens = Tokens(
        num_rows=len(logp),
        row=at[0],
        sampler_logp=logp.detach()[at],
        weight=token_weights(mask.bool().sum(1), counts, settings.loss_type)[at[0]],
        advantage=advantages[at[0]] if advantages.ndim == 1 else advantages[at],
        old_logp=learned(old_logp),
        ref_logp=learned(ref_logp),
    )
    losses, ratios = token_loss(logp[at], tokens, settings, importance_weights=learned(importance_weights))
    return losses.sum(), loss_metrics(ratios, tokens, settings)
