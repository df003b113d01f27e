"""Calls of the user's reward functions, who may do anything in them."""

import asyncio
import copy
import functools
import hashlib
import inspect
import itertools
import math
import random
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from grpo.data.foreign import process_as_it_was
from grpo.data.reward_files import RewardFunction, arguments_of


class RewardFailed(RuntimeError):
    """An error in a reward function of the user's."""


def call_all(functions: Mapping[str, RewardFunction], arguments: dict[str, Any]) -> dict[str, list[float]]:
    """What they say of each of the completions, NaN for None; coroutine functions are awaited together.

    They get copies, which they may change. RewardFailed for an error in one, but for Ctrl-C; ValueError for
    an answer that is not one score a completion.
    """
    count = len(arguments["completions"])
    waiting = {name: function for name, function in functions.items() if _is_async(function)}
    answers: dict[str, Any] = {}
    for name in [name for name in functions if name not in waiting]:
        with _errors_of(name), _as_it_was(arguments):
            answers[name] = _as_list(functions[name](**_copies(functions[name], arguments)), count)

    async def wait_for(name: str) -> None:
        with _errors_of(name):
            answers[name] = _as_list(await waiting[name](**_copies(waiting[name], arguments)), count)

    async def together() -> None:
        await asyncio.gather(*map(wait_for, waiting))

    if waiting:
        with _as_it_was(arguments):
            asked = asyncio.run_coroutine_threadsafe(together(), _loop())
            try:
                asked.result()
            except BaseException:  # of one, or Ctrl-C: nobody waits for the others
                asked.cancel()
                raise
    return {name: _numbers(name, answers[name], count) for name in functions}


def _is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine: a function's own, or that of an object which is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all calls, so that a client that a reward keeps open stays of use; in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """RewardFailed for whatever a function of the user's raises, but for Ctrl-C."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # sys.exit() as well, or training would end as if all were done
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if frame.filename != __file__]
        where = f" in {inside[-1].filename}, line {inside[-1].lineno}" if inside else ""
        raise RewardFailed(f"reward {name!r} failed with {type(error).__name__}{where}: {error}") from error


def _copies(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments that a function takes; of lists row by row, as rows may share what they hold."""
    return {name: _copied(value) for name, value in arguments_of(function, arguments).items()}


def _copied(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    return [copy.deepcopy(value) if isinstance(value, list | dict | set) else value for value in values]


def _as_list(answer: Any, count: int) -> Any:
    """A list if it is a sequence of any kind, `count` + 1 at most."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        return answer
    return list(itertools.islice(answer, count + 1))  # it may have no end


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
        with process_as_it_was(), torch.set_grad_enabled(torch.is_grad_enabled()):  # which it may switch
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _numbers(name: str, answer: Any, count: int) -> list[float]:
    """What a function returned, as `count` numbers, NaN for None. ValueError if it is not that."""
    wanted = f"it must return a list of {count}, one number, or None, for each completion."
    try:
        if isinstance(answer, str | bytes | Mapping):
            raise TypeError("which is no list")
        if texts := [score for score in answer if isinstance(score, str | bytes)]:
            raise TypeError(f"{texts[0]!r} is text, not a number")
        numbers = [math.nan if score is None else float(score) for score in answer]
    except Exception as error:  # of __float__, which may be the user's
        raise ValueError(f"reward {name!r} returned a {type(answer).__name__} ({error}): {wanted}") from error
    if len(numbers) != count:
        number = len(numbers) if len(numbers) < count else f"more than {count}"
        raise ValueError(f"reward {name!r} returned {number} scores for {count} completions: {wanted}")
    for row, (score, value) in enumerate(zip(answer, numbers, strict=True)):
        if score is not None and not math.isfinite(value):
            kind = "NaN" if math.isnan(value) else value
            raise ValueError(
                f"reward {name!r} returned {kind} for completion {row}: return finite numbers, or None "
                "for what it does not judge."
            )
    return numbers
