"""Calling reward functions, ours and the user's, all in TRL's convention."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo.data import collate
from grpo.data.reward_calls import call, call_together
from grpo.data.reward_files import RewardFunction, check_columns, check_tasks, is_async, load_rewards
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
        return combine_rewards(self.table, self.weights)

    @property
    def rewards_where_scored(self) -> Tensor:
        """(N,) weighted sums, NaN for a row that no function scored."""
        scored = ~self.table.isnan().all(1)
        rewards = torch.full((len(self.table),), torch.nan, dtype=self.table.dtype)
        rewards[scored] = combine_rewards(self.table[scored], self.weights)
        return rewards

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


@dataclass
class _Said:
    """What rewards log about N completions."""

    count: int
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column of the completions' table, one value a completion. ValueError for another number."""
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.count} completions")
        self.extra[column] = [_plain(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """One number for the step; of several the mean is logged."""
        self.metrics.setdefault(name, []).append(float(value))

    def rows(self) -> list[dict[str, Any]]:
        return [{name: values[row] for name, values in self.extra.items()} for row in range(self.count)]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


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
        prompts, said = rollout.row_prompts, _Said(len(rollout.completions))
        arguments: dict[str, Any] = {
            "prompts": [prompt.asked for prompt in prompts],
            "completions": [
                prompt.said(text) for prompt, text in zip(prompts, rollout.completions, strict=True)
            ],
            "completion_ids": [
                row[:length]
                for row, length in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)
            ],
            **collate(prompts),
            "trainer_state": self.state,
            "log_extra": said.log_extra,
            "log_metric": said.log_metric,
        }
        components: list[dict[str, float]] = [{} for _ in prompts]
        scores: dict[str, list[float | None]] = {}
        for name, function in self._functions.items():
            if isinstance(function, WeightedReward):
                parts = function.components(**arguments)
                scores[name] = [None if row is None else function.mean(row) for row in parts]
                for row, part in enumerate(parts):
                    components[row].update({f"{name}/{key}": value for key, value in (part or {}).items()})
            elif not is_async(function):
                scores[name] = call(name, function, arguments)
        if waiting := {name: each for name, each in self._functions.items() if is_async(each)}:
            scores |= call_together(waiting, arguments)
        columns = [
            [torch.nan if score is None else score for score in scores[name]] for name in self._functions
        ]
        table = torch.tensor(columns, dtype=torch.float64).T  # (N, F)
        return Scores(tuple(self._functions), table, self._weights, components, said.rows(), said.metrics)

    def judged(self, scores: Scores, completions: Sequence[str]) -> Iterator[Judged]:
        """By component of our own rewards, what it adds to `scores.rewards`, and what it judges."""
        for (name, function), weight in zip(self._functions.items(), self._weights.tolist(), strict=True):
            if isinstance(function, WeightedReward):
                names = {f"{name}/{key}": key for key in function.weights}
                rows = [
                    {names[each]: value for each, value in row.items() if each in names}
                    for row in scores.components
                ]
                yield from judged_by(function, rows, completions, weight)


def judged_by(
    function: WeightedReward,
    rows: Sequence[Mapping[str, float]],
    completions: Sequence[str],
    weight: float = 1.0,
) -> Iterator[Judged]:
    """By component of one reward. rows: the components of each completion, none where it is another's."""
    shares = [function.shares(row) for row in rows]
    for component in dict.fromkeys(key for row in shares for key in row):
        values = torch.tensor([weight * row.get(component, 0.0) for row in shares], dtype=torch.float64)
        yield Judged(values, [function.field_of(component, text) for text in completions])


def combine_rewards(rewards_per_function: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what each reward function said, `(N, F)` and `(F,)` to `(N,)`.

    NaN means "not mine" (a reward function returned None) and adds nothing, as in TRL's weighted
    `nansum`. A row that every function left out raises a ValueError that names it.
    """
    if rewards_per_function.ndim != 2 or weights.shape != rewards_per_function.shape[1:]:
        raise ValueError(
            f"Rewards of shape {tuple(rewards_per_function.shape)} do not go with weights of shape "
            f"{tuple(weights.shape)}: give (N, F) rewards and one weight for each of the F functions."
        )
    unscored = rewards_per_function.isnan().all(dim=1)
    if unscored.any():
        rows = unscored.nonzero().flatten().tolist()
        raise ValueError(
            f"No reward function scored row {rows[0]} ({len(rows)} of {len(unscored)} rows). Every "
            "completion needs at least one number: add a reward function for that kind of prompt, or "
            "leave such prompts out."
        )
    return (rewards_per_function * weights.to(rewards_per_function)).nansum(dim=1)
