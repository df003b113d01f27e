"""Calling reward functions, ours and the user's, all in TRL's convention."""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.data import collate
from grpo.data.reward_calls import RewardFunction, call
from grpo.types import Prompt, Rollout, exchanged
from rewards import REWARDS
from rewards.engine import EnginePool
from rewards.policy import PolicyReward
from rewards.weighted import WeightedReward

PROMPTS_LOOKED_AT = 1000
"""Of each task, for whether there are the columns that rewards need."""


@exchanged
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
        )

    def replace_groups(self, groups: Sequence[int], others: "Scores", group_size: int) -> "Scores":
        """With `groups` (indices among the B) taken from `others`, in order."""
        rows = [group * group_size + row for group in groups for row in range(group_size)]
        table, components = self.table.clone(), list(self.components)
        table[rows] = others.table
        for row, component in zip(rows, others.components, strict=True):
            components[row] = component
        return replace(self, table=table, components=components)


@dataclass(frozen=True)
class Judged:
    """What one component adds to the rewards of N completions (N,), and the letters that it looks at."""

    values: Tensor
    letters: list[tuple[int, int]]


def load_reward(spec: str) -> tuple[str, RewardFunction]:
    """A reward by name, or by `path/to/file.py:function`. ValueError says what can be given."""
    path, separator, name = spec.rpartition(":")
    if not separator:
        if spec in REWARDS:
            return spec, REWARDS[spec]
        raise ValueError(
            f"reward {spec!r} is not known: give one of {', '.join(REWARDS)}, "
            "or a function of your own as file.py:name."
        )
    if not Path(path).is_file():
        raise ValueError(f"reward {spec!r}: there is no file {path!r}.")
    # Under a name of its own: a file of the user's may well be called rewards.py.
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{Path(path).stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"reward {spec!r}: {path!r} is not a Python file.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_spec.name]
        raise ValueError(f"reward {spec!r}: {path!r} fails on import: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"reward {spec!r}: {path!r} has no function {name!r}; it has {', '.join(there)}.")
    return name, function


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids")


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python: it may take anything
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _needed_columns(function: RewardFunction) -> list[str]:
    """What it wants by name besides what is always given."""
    needed = [p.name for p in _parameters(function) if p.kind in _BY_NAME and p.default is p.empty]
    return [name for name in needed if name not in _ALWAYS_GIVEN]


def _not_taken(function: RewardFunction, given: Sequence[str]) -> list[str]:
    """What it is given by name and has no parameter for."""
    parameters = _parameters(function)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return []
    return sorted({*given} - {p.name for p in parameters if p.kind in _BY_NAME})


class RewardFunctions:
    """The run's reward functions and their weights."""

    def __init__(self, specs: Sequence[str], weights: Sequence[float] = ()) -> None:
        self._functions = dict(load_reward(spec) for spec in specs)
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

    def check_tasks(self, tasks: Collection[str]) -> None:
        """ValueError if there are prompts that no reward will score. A user's own scores any."""
        known = {"policy": "P:", "environment": "A:"}
        if not all(isinstance(function, WeightedReward) for function in self._functions.values()):
            return
        scored = {f.prefix for f in self._functions.values() if isinstance(f, WeightedReward)}
        for task in sorted(tasks):
            if known.get(task) not in scored:
                other = {"policy": "--policy-share 0", "environment": "--policy-share 1"}.get(task)
                remedy = f"add --reward {task}, or give {other}" if other else "give --reward file.py:name"
                raise ValueError(
                    f"no reward in {', '.join(self._functions)} scores {task} prompts: {remedy}."
                )

    def check_columns(self, prompts: Sequence[Prompt]) -> None:
        """ValueError if a user's reward needs what no prompt has, or does not take what it is given."""
        there = list(collate(prompts))
        for name, function in self._functions.items():
            if isinstance(function, WeightedReward):
                continue
            missing = [column for column in _needed_columns(function) if column not in there]
            if missing and prompts:
                columns = f"column{'s' * (len(missing) > 1)} {', '.join(missing)}"
                raise ValueError(
                    f"reward {name!r} needs the {columns}; the prompts have {', '.join(there) or 'none'}: "
                    "give --prompts with it, or the function a default."
                )
            if too_many := _not_taken(function, [*_ALWAYS_GIVEN, *there]):
                raise ValueError(
                    f"reward {name!r} does not take {', '.join(too_many)}, which every reward is given: "
                    "add **columns to its parameters."
                )

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Let rewards start on the prompts in the background, while completions are sampled."""
        columns = collate(prompts)
        for function in self._functions.values():
            if isinstance(function, PolicyReward):
                function.prepare([prompt.text for prompt in prompts], **columns)

    def __call__(self, rollout: Rollout) -> Scores:
        """Score a rollout. RewardFailed, or ValueError for an answer that is not one score a completion."""
        prompts = rollout.row_prompts
        arguments: dict[str, Any] = {
            "prompts": [prompt.text for prompt in prompts],
            "completions": rollout.completions,
            "completion_ids": [
                row[:length]
                for row, length in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)
            ],
            **collate(prompts),
        }
        columns: list[list[float]] = []
        components: list[dict[str, float]] = [{} for _ in prompts]
        for name, function in self._functions.items():
            if isinstance(function, WeightedReward):
                parts = function.components(**arguments)
                scores = [None if row is None else function.mean(row) for row in parts]
                for row, part in enumerate(parts):
                    components[row].update({f"{name}/{key}": value for key, value in (part or {}).items()})
            else:
                scores = call(name, function, arguments)
            columns.append([torch.nan if score is None else score for score in scores])
        table = torch.tensor(columns, dtype=torch.float64).T  # (N, F)
        return Scores(tuple(self._functions), table, self._weights, components)

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
