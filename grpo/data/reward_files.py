"""Reward functions by name or file, what they are called with, and what is put back after their code has run.

Nothing here loads torch, so that a wrong name is told at once.
"""

import functools
import importlib.util
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from loguru import logger

from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.data.gym import SCORE, gym_score
from grpo.data.source import collate
from grpo.errors import UserError
from grpo.files import as_path
from grpo.prompt import Prompt
from grpo.rewards import REWARDS

RewardFunction = Callable[..., Any]
"""In TRL's convention, perhaps a coroutine function."""
AnyConfig = TypeVar("AnyConfig", bound=Config)

KNOWN_REWARDS: Mapping[str, RewardFunction] = {**REWARDS, SCORE: gym_score}
"""The project's own, by name."""
PROMPTS_LOOKED_AT = 1000
"""Prompts of each task that are looked at, for the columns that rewards need."""
OWN_TASK_TOKENS = 512
"""The length of completions where prompts and rewards are the user's own and no number is given; TRL's
default."""
_ON_REQUEST = ("trainer_state", "log_extra", "log_metric")
"""Arguments that only a reward with a parameter for them gets."""


def load_rewards(
    specs: Sequence[str | RewardFunction], weights: Sequence[float] = ()
) -> dict[str, RewardFunction]:
    """Loads rewards by name; a function stays as it is, a text goes through `load_reward`.

    ValueError for two of one name, and for weights of another number.
    """
    if len(weights) not in (0, len(specs)):
        raise UserError(f"reward_weights has {len(weights)} numbers for {len(specs)} rewards: give one each.")
    functions: dict[str, RewardFunction] = {}
    for spec in specs:
        name, function = load_reward(spec) if isinstance(spec, str) else (_name(spec), spec)
        if name in functions:
            raise UserError(f"two rewards are called {name!r}: rename one")
        functions[name] = function
    return functions


def resolve_max_new_tokens(config: AnyConfig, context: int | None = None) -> AnyConfig:
    """The settings with a longest completion; where none is given, by what is asked and rewarded.

    RookWorld's texts fit into 144 tokens; what people ask and reward themselves gets 512, and at most half of
    the model's context.
    """
    if config.max_new_tokens:
        return config
    tokens = SamplingSettings.max_new_tokens
    if config.prompts != "bundled" and not set(config.reward) <= set(REWARDS):
        tokens = min(OWN_TASK_TOKENS, context // 2) if context else OWN_TASK_TOKENS
        logger.info("max_new_tokens is {}, as prompts and rewards are your own", tokens)
    return replace(config, max_new_tokens=tokens)


def load_reward(spec: str) -> tuple[str, RewardFunction]:
    """A reward by name, or by `path/to/file.py:function`. ValueError says what can be given."""
    path, name = reward_file(spec)
    if path is None:
        if spec in KNOWN_REWARDS:
            return spec, KNOWN_REWARDS[spec]
        raise UserError(
            f"reward {spec!r} is not known: give one of {', '.join(KNOWN_REWARDS)}, "
            "or a function of your own as file.py:name."
        )
    if not path.is_file():
        raise UserError(f"reward {spec!r}: there is no file {str(path)!r}.")
    module = _module(path, path.stat().st_mtime_ns)
    function = getattr(module, name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"reward {spec!r}: {str(path)!r} has no function {name!r}; it has {', '.join(names)}."
        )
    return name, function


def reward_file(spec: str) -> tuple[Path | None, str]:
    """The file that a reward is in, if it is the user's own, and its name."""
    path, separator, name = spec.rpartition(":")
    return (as_path(path) if separator else None), name


@functools.cache
def _module(path: Path, changed_ns: int) -> ModuleType:
    """A file, run once as it is; its folder is searched last for what it imports.

    Processes that it starts import it by its name, the file's, unless another module has that name, as for a
    file called rewards.py. ValueError, with what the file raised, if it cannot be run.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    by_name = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    is_same = by_name is not None and by_name.origin is not None and Path(by_name.origin).resolve() == path
    name = path.stem if is_same else f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward file {str(path)!r} is not a Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with process_as_it_was():
            spec.loader.exec_module(module)
            search_path = list(sys.path)
        sys.path[:] = search_path  # where it wants to find what it imports later
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"reward file {str(path)!r} fails on import: {error!r}") from error
    return module


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check_tasks(functions: Mapping[str, RewardFunction], tasks: Collection[str]) -> None:
    """ValueError if there are prompts that no reward will score. A user's own scores any."""
    scored = {getattr(function, "prefix", "") for function in functions.values()}
    known = {"policy": ("P:", 0), "environment": ("A:", 1)}
    for task in sorted(tasks if "" not in scored else ()):
        prefix, other_share = known.get(task, (None, None))
        if prefix not in scored:
            add = f"add --reward {task}, or give --policy-share {other_share}"
            remedy = add if prefix else "give --reward file.py:name"
            raise UserError(f"no reward in {', '.join(functions)} scores {task} prompts: {remedy}.")


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
            raise UserError(
                f"reward {name!r} is called with {', '.join(names)}: {error}. Give --prompts "
                "that have it, or the function a default, and **columns for what it does not use."
            ) from error


def arguments_of(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that it is called with: of those on request only the ones that it has a parameter for."""
    parameters = _signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unasked = () if takes_any else set(_ON_REQUEST) - parameters.keys()
    return {name: value for name, value in arguments.items() if name not in unasked}


def _signature(function: RewardFunction) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # not written in Python: it may take anything
        return inspect.signature(lambda **columns: None)


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Afterwards folder, umask, `sys.path`, signal handlers, timer and torch's defaults are as they were.

    Code that is run to be judged goes into folders of its own, and ends what takes too long by signals.
    """
    path, mask, folder = list(sys.path), os.umask(0o077), -1
    os.umask(mask)
    with suppress(OSError):  # of a folder that is gone, or may not be read
        folder = os.open(".", os.O_RDONLY)
    handlers, timer, defaults = _handlers(), signal.getitimer(signal.ITIMER_REAL), _torch_defaults()
    try:
        yield
    finally:
        if folder >= 0:
            os.fchdir(folder)
            os.close(folder)
        os.umask(mask)
        sys.path[:] = path
        signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in _handlers().items():
            if handlers[number] not in (None, handler):  # None: not of Python
                signal.signal(number, handlers[number])
        if (now := _torch_defaults()) != defaults:
            torch = sys.modules["torch"]
            torch.set_default_dtype(defaults[0] or torch.float32)
            torch.set_num_threads(defaults[1] or now[1])


def _handlers() -> dict[int, Any]:
    """The handlers of signals, where they can be set: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _torch_defaults() -> tuple[Any, int]:
    """The default dtype and the number of threads; nothing and 0 where torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    return (torch.get_default_dtype(), torch.get_num_threads()) if torch else (None, 0)
