"""Calling reward functions, ours and the user's, all in TRL's convention."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo.data import collate
from grpo.data.reward_calls import call_all
from grpo.data.reward_files import RewardFunction, check_columns, check_tasks, load_rewards
from grpo.types import Prompt, Rollout
from rewards.engine import EnginePool
from rewards.policy import PolicyReward
from rewards.weighted import WeightedReward


@dataclass(frozen=True)
class Scores:
    """What the reward functions said of N completions."""

    names: tuple[str, ...]
    """The F reward functions."""
    table: Tensor
    """(N, F) float64, NaN where a function said "not mine"."""
    weights: Tensor
    """(F,)."""
    components: list[dict[str, float]]
    """N: the components of our own rewards by name, `policy/best_move` and so on."""
    extra: list[dict[str, Any]]
    """N: what rewards had to say of a completion besides (`log_extra`), by column."""
    metrics: dict[str, list[float]]
    """What they had to say of all (`log_metric`), by name."""

    @property
    def rewards(self) -> Tensor:
        """(N,) weighted sums. ValueError for a row that no function scored."""
        rewards = self.rewards_where_scored
        if rows := rewards.isnan().nonzero().flatten().tolist():
            raise ValueError(
                f"No reward function scored row {rows[0]} ({len(rows)} of {len(rewards)} rows). Every "
                "completion needs at least one number: add a reward function for that kind of prompt, or "
                "leave such prompts out."
            )
        return rewards

    @property
    def rewards_where_scored(self) -> Tensor:
        """(N,) weighted sums, in which NaN adds nothing, as in TRL; NaN for a row that no function scored."""
        rewards = (self.table * self.weights).nansum(dim=1)
        return rewards.masked_fill(self.table.isnan().all(dim=1), torch.nan)

    @staticmethod
    def join(parts: Sequence["Scores"]) -> "Scores":
        """One after the other."""
        return replace(
            parts[0],
            table=torch.cat([part.table for part in parts]),
            components=[row for part in parts for row in part.components],
            extra=[row for part in parts for row in part.extra],
            metrics=_joined([part.metrics for part in parts]),
        )

    def replace_groups(self, groups: Sequence[int], others: "Scores", group_size: int) -> "Scores":
        """With `groups` (indices among the B) taken from `others`, in order."""
        rows = [group * group_size + row for group in groups for row in range(group_size)]
        table, components, extra = self.table.clone(), list(self.components), list(self.extra)
        table[rows] = others.table
        for place, row in enumerate(rows):
            components[row], extra[row] = others.components[place], others.extra[place]
        metrics = _joined([self.metrics, others.metrics])
        return replace(self, table=table, components=components, extra=extra, metrics=metrics)


@dataclass(frozen=True)
class Judged:
    """What one component adds to the rewards of N completions (N,), and the letters that it looks at."""

    values: Tensor
    letters: list[tuple[int, int]]


@dataclass
class TrainerState:
    """What a reward may know of the run it is part of, by the names of transformers' state."""

    global_step: int = 0
    """Steps that are done."""
    max_steps: int = 0


class _Log:
    """What rewards log about N completions."""

    def __init__(self, count: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(count)]
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the completions' table, one value a completion. ValueError for another number."""
        if len(values) != len(self.rows):
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {len(self.rows)} completions"
            )
        for row, value in zip(self.rows, values, strict=True):
            row[column] = value if isinstance(value, bool | int | float | str | None) else str(value)

    def log_metric(self, name: str, value: float) -> None:
        """One number for the step; of several the mean is logged."""
        self.metrics.setdefault(name, []).append(float(value))


def _joined(parts: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [value for part in parts for value in part.get(name, ())] for name in names}


class RewardFunctions:
    """The run's reward functions and their weights."""

    def __init__(self, specs: Sequence[str | RewardFunction], weights: Sequence[float] = ()) -> None:
        self._functions = load_rewards(specs, weights)
        self.state = TrainerState()
        self._weights = torch.tensor(weights or [1.0] * len(specs), dtype=torch.float64)

    def with_engine(self, engine: EnginePool | None) -> "RewardFunctions":
        """The same rewards, with an engine to judge moves."""
        judged = copy.copy(self)
        if engine is not None:
            judged._functions = {
                name: function.with_engine(engine) if isinstance(function, PolicyReward) else function
                for name, function in self._functions.items()
            }
        return judged

    def check(self, tasks: Collection[str], prompts: Sequence[Prompt]) -> None:
        """ValueError for prompts that no reward scores, and for rewards that these prompts are not for."""
        check_tasks(self._functions, tasks)
        check_columns(self._functions, prompts)

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Let rewards start on the prompts in the background, while completions are sampled."""
        columns = collate(prompts)
        for function in self._functions.values():
            if isinstance(function, PolicyReward):
                function.prepare([prompt.text for prompt in prompts], **columns)

    def __call__(self, rollout: Rollout) -> Scores:
        """Score a rollout. RewardFailed, or ValueError for an answer that is not one score a completion."""
        prompts, log = rollout.row_prompts, _Log(len(rollout.completions))
        ids = zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)
        arguments: dict[str, Any] = {
            "prompts": [prompt.asked for prompt in prompts],
            "completions": list(map(Prompt.said, prompts, rollout.completions)),
            "completion_ids": [row[:length] for row, length in ids],
            **collate(prompts),
            "trainer_state": self.state,
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        components: list[dict[str, float]] = [{} for _ in prompts]
        users = {name: each for name, each in self._functions.items() if not isinstance(each, WeightedReward)}
        scores = call_all(users, arguments)
        for name, function in self._functions.items():
            if isinstance(function, WeightedReward):
                parts = function.components(**arguments)
                means = (None if part is None else function.mean(part) for part in parts)
                scores[name] = [torch.nan if mean is None else mean for mean in means]
                for row, part in zip(components, parts, strict=True):
                    row.update({f"{name}/{key}": value for key, value in (part or {}).items()})
        columns = [scores[name] for name in self._functions]
        table = torch.tensor(columns, dtype=torch.float64).T  # (N, F)
        return Scores(tuple(self._functions), table, self._weights, components, log.rows, log.metrics)

    def judged(self, scores: Scores, completions: Sequence[str]) -> Iterator[Judged]:
        """By component of our own rewards, what it adds to `scores.rewards`, and what it judges."""
        for (name, function), weight in zip(self._functions.items(), self._weights.tolist(), strict=True):
            if not isinstance(function, WeightedReward):
                continue
            names = {f"{name}/{key}": key for key in function.weights}
            shares = [
                function.shares({names[key]: value for key, value in row.items() if key in names})
                for row in scores.components
            ]
            for component in dict.fromkeys(key for row in shares for key in row):
                values = torch.tensor(
                    [weight * row.get(component, 0.0) for row in shares], dtype=torch.float64
                )
                yield Judged(values, [function.field_of(component, text) for text in completions])
