"""Calling reward functions, ours and the user's, all in TRL's convention."""

import copy
import hashlib
import importlib.util
import inspect
import itertools
import math
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.data import collate
from grpo.types import Prompt, Rollout, exchanged
from rewards import REWARDS
from rewards.engine import EnginePool
from rewards.policy import PolicyReward
from rewards.weighted import WeightedReward

RewardFunction = Callable[..., list[float | None]]
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


class RewardFailed(RuntimeError):
    """An error in a reward function of the user's."""


def _answer(name: str, function: RewardFunction, arguments: dict[str, Any], count: int) -> Any:
    """What a function of the user's returned, as a list if it is a sequence of any kind, `count` + 1 at most.

    It gets copies, which it may change. RewardFailed for whatever it raises, but for Ctrl-C.
    """
    try:
        with _as_it_was(arguments):
            answer = function(**{key: _copied(value) for key, value in arguments.items()})
            if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
                return answer
            return list(itertools.islice(answer, count + 1))  # it may have no end
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() as well, or training would end as if all were done
        inside = traceback.extract_tb(error.__traceback__)[1:]
        where = f" in {inside[-1].filename}, line {inside[-1].lineno}" if inside else ""
        raise RewardFailed(f"reward {name!r} failed with {type(error).__name__}{where}: {error}") from error


def _copied(values: Any) -> Any:
    return [copy.deepcopy(value) if isinstance(value, list | dict | set) else value for value in values]


@contextmanager
def _as_it_was(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside, random numbers depend on the completions alone; afterwards all is as before.

    So a reward that draws some gives the same to the same completions, in a run that is resumed, too.
    """
    text = repr((arguments["prompts"], arguments["completions"]))
    seed = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:4], "big")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # which it may switch and leave
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _numbers(name: str, scores: Any, count: int) -> list[float | None]:
    """What a function of the user's returned, as `count` numbers or Nones; ValueError if it is not that."""
    wanted = f"it must return a list of {count}, one number, or None, for each completion."
    try:
        if isinstance(scores, str | bytes | Mapping):
            raise TypeError(f"a {type(scores).__name__} is no list")
        numbers = [_number(score) for score in scores]
    except Exception as error:  # of __float__, which may be the user's
        raise ValueError(f"reward {name!r} returned {_shown(scores)} ({error}): {wanted}") from error
    if len(numbers) != count:
        number = len(numbers) if len(numbers) < count else f"more than {count}"
        raise ValueError(f"reward {name!r} returned {number} scores for {count} completions: {wanted}")
    for row, value in enumerate(numbers):
        if value is not None and math.isinf(value):
            raise ValueError(
                f"reward {name!r} returned {value} for completion {row}: return finite numbers, or None "
                "for what it does not judge."
            )
    return numbers


def _number(score: Any) -> float | None:
    if isinstance(score, str | bytes):
        raise TypeError(f"{score!r} is text, not a number")
    return None if score is None else float(score)


def _shown(scores: Any) -> str:
    try:
        return repr(str(scores)[:60])
    except Exception:  # of __str__
        return f"a {type(scores).__name__}"


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
                scores = _numbers(name, _answer(name, function, arguments, len(prompts)), len(prompts))
            columns.append([torch.nan if score is None else score for score in scores])
        table = torch.tensor(columns, dtype=torch.float64).T  # (N, F)
        return Scores(tuple(self._functions), table, self._weights, components)


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
