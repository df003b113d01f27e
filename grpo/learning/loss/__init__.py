"""The clipped policy-gradient losses of GRPO and its kin, as pure functions of tensors.

A step of any number of rows may be split into micro-batches: each loss is a SUM over tokens, of what a token
weighs (`token_weights`: one over a count of the WHOLE step) times the loss of that token. Micro-batch losses,
gradients and metric sums therefore add up to the step's, however the rows were split (invariance I1).

Shapes: K tokens that are learned from, of R rows of a micro-batch with C completion tokens at most. What is
not finite is not hidden: it reaches the loss and the metrics, so that the caller can skip the step.

TRL 1.16's `GRPOTrainer._compute_loss` is the measure; tests/learning/test_loss_equals_trl.py
compares values, gradients and metrics. Left out on purpose: bnpo (its value depends on the split), sapo,
luspo, vespo, the entropy bonus, and k1 in the loss (its gradient has zero mean on-policy; it goes
into the reward).
"""

from grpo.config.groups import LossSettings
from grpo.learning.loss.metrics import finish_metrics, loss_metrics, merge_metrics
from grpo.learning.loss.surrogate import adaptive_kl, grpo_loss, token_loss, truncated_importance_weights
from grpo.learning.loss.tokens import StepCounts, Tokens, loss_counts, token_weights

__all__ = [
    "LossSettings",
    "StepCounts",
    "Tokens",
    "adaptive_kl",
    "finish_metrics",
    "grpo_loss",
    "loss_counts",
    "loss_metrics",
    "merge_metrics",
    "token_loss",
    "token_weights",
    "truncated_importance_weights",
]
