"""Reward functions by name or file, and whether they and the prompts are for each other."""

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
"""Of each task, for whether there are the columns that rewards need."""
_ON_REQUEST = ("trainer_state", "log_extra", "log_metric")
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
    module = _module(path, path.stat().st_mtime_ns)
    function = getattr(module, name, None)
    if not callable(function):
        there = [name for name, value in vars(module).items() if inspect.isfunction(value)]
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
    of a file called rewards.py. ValueError where that cannot be, with what the file raised.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    there = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    own = there is not None and there.origin is not None and Path(there.origin).resolve() == path
    name = path.stem if own else f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward file {str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with process_as_it_was():
            spec.loader.exec_module(module)
            places = list(sys.path)
        sys.path[:] = places  # where it wants to find what it imports later
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"reward file {str(path)!r} fails on import: {error!r}") from error
    return module


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check_tasks(functions: Mapping[str, RewardFunction], tasks: Collection[str]) -> None:
    """ValueError if there are prompts that no reward will score. A user's own scores any."""
    known = {"policy": "P:", "environment": "A:"}
    scored = {function.prefix for function in functions.values() if isinstance(function, WeightedReward)}
    if not all(isinstance(function, WeightedReward) for function in functions.values()):
        return
    for task in sorted(tasks):
        if known.get(task) not in scored:
            other = {"policy": "--policy-share 0", "environment": "--policy-share 1"}.get(task)
            remedy = f"add --reward {task}, or give {other}" if other else "give --reward file.py:name"
            raise ValueError(f"no reward in {', '.join(functions)} scores {task} prompts: {remedy}.")


def check_columns(functions: Mapping[str, RewardFunction], prompts: Sequence[Prompt]) -> None:
    """ValueError if a reward needs what no prompt has, or does not take what it is given."""
    if not prompts:  # as an evaluation without any finds, which says so
        return
    names = ["prompts", "completions", "completion_ids", *collate(prompts)]
    for name, function in functions.items():
        arguments = arguments_of(function, dict.fromkeys([*names, *_ON_REQUEST]))
        try:
            _signature(function).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"reward {name!r} is called with {', '.join(names)}: {error}. Give --prompts "
                "that have it, or the function a default, and **columns for what it does not use."
            ) from error


def arguments_of(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that it is called with: all, but of those on request the ones that it has a parameter for."""
    parameters = _signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {
        name: value
        for name, value in arguments.items()
        if takes_any or name in parameters or name not in _ON_REQUEST
    }


def _signature(function: RewardFunction) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # not written in Python: it may take anything
        return inspect.signature(lambda **columns: None)
