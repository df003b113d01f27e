"""Held-out quality in the RookWorld README's columns, each with a 95 % interval.

Scoring is pure, what it finds is an `Evaluation`, and whatever a model is asked to do (answer prompts,
play itself, mate in one) ends as one. Left out: all that is played (`grpo/play`).
"""

from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.heldout import evaluate, interleave, score_heldout
from grpo.evaluate.scores import score_completions
from grpo.evaluate.tables import results_table

__all__ = [
    "Evaluation",
    "evaluate",
    "interleave",
    "paired_difference",
    "results_table",
    "score_completions",
    "score_heldout",
]
