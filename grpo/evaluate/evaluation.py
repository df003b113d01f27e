"""Scores of completions, column by column, with intervals, and the differences of two models."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo.data.source import digest
from grpo.errors import UserError
from grpo.evaluate.scores import HALF_MOVES, Column, decimals
from grpo.statistics import mean_interval
from grpo.types import Prompt


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
        """95 % interval of the mean over prompts."""
        scores = self.scores[column]
        return mean_interval(scores, bounds=(0.0, 1.0) if _is_rate(column, scores) else None)

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
        """Returns the same columns with a prefix before their names."""
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
        """Reads a file that `save` wrote, score for score. ValueError for any other file."""
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
    """Mean of after - before, and its 95 % interval over prompts.

    ValueError unless both have the column, and for the same prompts.
    """
    for evaluation in (before, after):
        if column not in evaluation.scores:
            raise UserError(f"no column {column!r} in an evaluation of {', '.join(evaluation.scores)}")
    if column in before.of_other_prompts(after):
        raise UserError(f"{column!r} is of other prompts before than after: evaluate both on the same ones")
    first, last = before.scores[column], after.scores[column]
    bounds = (-1.0, 1.0) if _is_rate(column, first) and _is_rate(column, last) else None
    return float((last - first).mean()), *mean_interval(last - first, bounds=bounds)


def _is_rate(column: str, scores: Column) -> bool:
    """Whether scores are shares in [0, 1], as of a reward that only ever is 0 or 1."""
    return decimals(column) is None or (column != HALF_MOVES and bool(np.isin(scores, (0.0, 1.0)).all()))
