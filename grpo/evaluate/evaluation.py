"""What completions score, column by column, with intervals, and what two models say about each other."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from grpo.data.source import digest
from grpo.errors import UserError
from grpo.evaluate.scores import Column, decimals
from grpo.types import Prompt

LEVEL = 0.95
LEVEL_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Deviations of a normal distribution within which so much lies."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One model's scores, in columns."""

    scores: Mapping[str, Column]
    """By column, one score for each prompt that has it, the mean over its samples, in the prompts' order."""
    prompts: Mapping[str, str]
    """By column, a digest of the prompts that have it: two evaluations are paired where it is the same."""

    @staticmethod
    def of(prompts: Sequence[Prompt], scores: Mapping[str, Column]) -> "Evaluation":
        """From scores (B, samples), NaN where there is none. A column without any score is left out."""
        scored = {name: np.flatnonzero(~np.isnan(values).all(1)) for name, values in scores.items()}
        scored = {name: rows for name, rows in scored.items() if len(rows)}
        return Evaluation(
            {name: np.nanmean(scores[name][rows], axis=1) for name, rows in scored.items()},
            {name: digest([prompts[row] for row in rows.tolist()]) for name, rows in scored.items()},
        )

    def mean(self, column: str) -> float:
        return float(self.scores[column].mean())

    def interval(self, column: str) -> tuple[float, float]:
        """95 % interval of the mean over prompts.

        Wilson's for a share whose every score is 0 or 1, as one sample a prompt gives in most columns;
        otherwise a percentile bootstrap, infinite for a single prompt.
        """
        scores = self.scores[column]
        if decimals(column) is None and np.isin(scores, (0.0, 1.0)).all():
            return wilson_interval(int(scores.sum()), len(scores))
        return bootstrap_interval(scores) if len(scores) > 1 else (-math.inf, math.inf)

    def of_other_prompts(self, other: "Evaluation") -> list[str]:
        """Columns that both have, but of different prompts: there is nothing to compare."""
        return [name for name, prompts in self.prompts.items() if other.prompts.get(name, prompts) != prompts]

    def as_metrics(self) -> dict[str, float]:
        """Means by column, named as TRL names what it evaluates: `eval_reward`."""
        return {f"eval_{column}": self.mean(column) for column in self.scores}

    def interval_metrics(self) -> dict[str, float]:
        """The ends of the means' intervals, named after them: `eval_reward/low` and `eval_reward/high`."""
        ends = {column: zip(("low", "high"), self.interval(column), strict=True) for column in self.scores}
        return {f"eval_{column}/{end}": value for column, pair in ends.items() for end, value in pair}

    def __or__(self, other: "Evaluation") -> "Evaluation":
        """The columns of both."""
        return Evaluation({**self.scores, **other.scores}, {**self.prompts, **other.prompts})

    def prefixed(self, prefix: str) -> "Evaluation":
        """Its columns under other names."""
        return Evaluation(
            {prefix + name: scores for name, scores in self.scores.items()},
            {prefix + name: prompts for name, prompts in self.prompts.items()},
        )

    def save(self, file: Path) -> None:
        """Write JSON: the scores, and for whoever reads it each column's mean and interval."""
        content = {
            column: {
                "mean": self.mean(column),
                "interval": [end if math.isfinite(end) else None for end in self.interval(column)],
                "prompts": self.prompts[column],
                "scores": scores.tolist(),
            }
            for column, scores in self.scores.items()
        }
        file.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")

    @staticmethod
    def load(file: Path) -> "Evaluation":
        """What `save` wrote, score for score. ValueError for any other file."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return Evaluation(
                {column: np.array(entry["scores"], np.float64) for column, entry in content.items()},
                {column: entry["prompts"] for column, entry in content.items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{file} is no saved evaluation ({reason}): give what --json wrote") from error


def paired_difference(before: Evaluation, after: Evaluation, column: str) -> tuple[float, float, float]:
    """Mean of after - before, and its 95 % bootstrap interval over prompts.

    ValueError unless both have the column, and for the same prompts.
    """
    for evaluation in (before, after):
        if column not in evaluation.scores:
            raise UserError(f"no column {column!r} in an evaluation of {', '.join(evaluation.scores)}")
    if column in before.of_other_prompts(after):
        raise UserError(f"{column!r} is of other prompts before than after: evaluate both on the same ones")
    differences = after.scores[column] - before.scores[column]
    return float(differences.mean()), *bootstrap_interval(differences)


def wilson_interval(hits: int, num: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson, 1927). By hand: loading scipy.stats takes 23 MB for good."""
    z = LEVEL_Z
    middle = (hits + z**2 / 2) / (num + z**2)
    reach = z * math.sqrt(hits * (num - hits) / num + z**2 / 4) / (num + z**2)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def bootstrap_interval(values: Column) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean (Efron, 1979), of 10,000 resamples."""
    rng, num = np.random.default_rng(0), len(values)
    drawn = (rng.integers(num, size=(100, num)) for _ in range(100))  # not all in memory
    means = np.concatenate([values[indices].mean(1) for indices in drawn])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
