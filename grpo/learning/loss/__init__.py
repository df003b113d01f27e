"""The clipped policy-gradient losses of GRPO and its kin, as pure functions of tensors.

A step of any number of rows may be split into micro-batches: each loss is a SUM over a
micro-batch's tokens or rows, divided by a count of the WHOLE step that the caller passes
(`StepCounts`). Micro-batch losses, gradients and metric sums therefore add up to the step's,
however the rows were split (invariance I1).

Shapes: R rows of a micro-batch, C completion tokens. What stands outside `mask` is never read,
not even as NaN, and gets a gradient of exactly zero. What is not finite inside it is not hidden:
it reaches the loss and the metrics, so that the caller can skip the step.

TRL 1.16's `GRPOTrainer._compute_loss` is the measure; tests/learning/test_loss_equals_trl.py
compares values, gradients and metrics. Left out on purpose: bnpo (its value depends on the split), sapo,
luspo, vespo, the entropy bonus, and k1 in the loss (its gradient has zero mean on-policy; it goes
into the reward).
"""

from grpo.config.groups import LossSettings
from grpo.learning.loss.metrics import finish_metrics, merge_metrics
from grpo.learning.loss.surrogate import (
    StepCounts,
    adaptive_kl,
    grpo_loss,
    loss_counts,
    truncated_importance_weights,
)

__all__ = [
    "LossSettings",
    "StepCounts",
    "adaptive_kl",
    "finish_metrics",
    "grpo_loss",
    "loss_counts",
    "merge_metrics",
    "truncated_importance_weights",
]
