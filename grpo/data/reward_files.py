"""Reward functions by name or file, and what can be known of them before anything large is loaded."""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo.data.foreign import process_as_it_was
from grpo.data.source import collate
from grpo.prompt import Prompt
from rewards import REWARDS
from rewards.weighted import WeightedReward

RewardFunction = Callable[..., Any]
"""In TRL's convention, perhaps a coroutine function."""

PROMPTS_LOOKED_AT = 1000
"""Of each task, or of a file's rows, for whether there are the columns that rewards need."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids")
ON_REQUEST = ("trainer_state", "log_extra", "log_metric")
"""What a reward gets that has a parameter for it."""


def load_rewards(
    specs: Sequence[str | RewardFunction], weights: Sequence[float] = ()
) -> dict[str, RewardFunction]:
    """By name: functions as they are, others as of `load_reward`.

    ValueError for two of one name, and for weights of another number.
    """
    if len(weights) not in (0, len(specs)):
        raise ValueError(
            f"reward_weights has {len(weights)} numbers for {len(specs)} rewards: give one each."
        )
    loaded = [load_reward(spec) if isinstance(spec, str) else (_name(spec), spec) for spec in specs]
    names = [name for name, _ in loaded]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two rewards are called {min(twice)!r}: rename one")
    return dict(loaded)


def load_reward(spec: str) -> tuple[str, RewardFunction]:
    """A reward by name, or by `path/to/file.py:function`. ValueError says what can be given."""
    path, name = reward_file(spec)
    if path is None:
        if spec in REWARDS:
            return spec, REWARDS[spec]
        raise ValueError(
            f"reward {spec!r} is not known: give one of {', '.join(REWARDS)}, "
            "or a function of your own as file.py:name."
        )
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: there is no file {str(path)!r}.")
    try:
        module = _module(path, path.stat().st_mtime_ns)
    except ImportError as error:
        if not isinstance(error.__cause__, Exception):
            raise ValueError(f"reward {spec!r}: {str(path)!r} is not a Python file.") from error
        raise ValueError(f"reward {spec!r}: {str(path)!r} fails on import: {error.__cause__!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"reward {spec!r}: {str(path)!r} has no function {name!r}; it has {', '.join(there)}."
        )
    return name, function


def reward_file(spec: str) -> tuple[Path | None, str]:
    """The file that a reward is in, if it is the user's own, and its name."""
    path, separator, name = spec.rpartition(":")
    return (Path(path).expanduser() if separator else None), name


@functools.cache
def _module(path: Path, changed_ns: int) -> ModuleType:
    """Run once as it is; its folder is searched last for what it imports.

    Processes that it starts import it by its name, the file's: but where that is a module's that is there, as
    of a file called rewards.py. ImportError where that cannot be, caused by what the file raised.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    there = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    own = there is not None and there.origin is not None and Path(there.origin).resolve() == path
    name = path.stem if own else f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with process_as_it_was():
            spec.loader.exec_module(module)
            places = list(sys.path)
        sys.path[:] = places  # where it wants to find what it imports later
    except Exception as error:
        del sys.modules[spec.name]
        raise ImportError(path) from error
    return module


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine: a function's own, or that of an object which is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def taken(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments all that it has to take, and those on request that it takes."""
    refused = _not_taken(function, ON_REQUEST)
    return {name: value for name, value in arguments.items() if name not in refused}


def check_tasks(functions: Mapping[str, RewardFunction], tasks: Collection[str]) -> None:
    """ValueError if there are prompts that no reward will score. A user's own scores any."""
    known = {"policy": "P:", "environment": "A:"}
    own = [function for function in functions.values() if isinstance(function, WeightedReward)]
    if len(own) < len(functions):
        return
    scored = {function.prefix for function in own}
    for task in sorted(tasks):
        if known.get(task) not in scored:
            other = {"policy": "--policy-share 0", "environment": "--policy-share 1"}.get(task)
            remedy = f"add --reward {task}, or give {other}" if other else "give --reward file.py:name"
            raise ValueError(f"no reward in {', '.join(functions)} scores {task} prompts: {remedy}.")


def check_columns(functions: Mapping[str, RewardFunction], prompts: Sequence[Prompt]) -> None:
    """ValueError if a user's reward needs what no prompt has, or does not take what it is given."""
    there = list(collate(prompts))
    for name, function in functions.items():
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


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python: it may take anything
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _needed_columns(function: RewardFunction) -> list[str]:
    """What it wants by name besides what is always given."""
    needed = [p.name for p in _parameters(function) if p.kind in _BY_NAME and p.default is p.empty]
    return [name for name in needed if name not in (*_ALWAYS_GIVEN, *ON_REQUEST)]


def _not_taken(function: RewardFunction, given: Sequence[str]) -> list[str]:
    """What it is given by name and has no parameter for."""
    parameters = _parameters(function)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return []
    return sorted({*given} - {p.name for p in parameters if p.kind in _BY_NAME})
