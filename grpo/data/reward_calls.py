"""One call of a reward function of the user's, who may do anything in it."""

import asyncio
import copy
import hashlib
import itertools
import math
import random
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from grpo.data.foreign import process_as_it_was
from grpo.data.reward_files import RewardFunction, taken


class RewardFailed(RuntimeError):
    """An error in a reward function of the user's."""


def call(name: str, function: RewardFunction, arguments: dict[str, Any]) -> list[float | None]:
    """What it says of each of the completions.

    It gets copies, which it may change. RewardFailed for an error in it, but for Ctrl-C; ValueError for an
    answer that is not one score a completion.
    """
    count = len(arguments["completions"])
    with _errors_of(name), _as_it_was(arguments):
        answer = _as_list(function(**_own(function, arguments)), count)
    return _numbers(name, answer, count)


def call_together(
    functions: Mapping[str, RewardFunction], arguments: dict[str, Any]
) -> dict[str, list[float | None]]:
    """The same of coroutine functions, which are awaited together."""
    count = len(arguments["completions"])

    async def one(name: str, function: RewardFunction) -> Any:
        with _errors_of(name):
            return _as_list(await function(**_own(function, arguments)), count)

    async def together() -> Sequence[Any]:
        return await asyncio.gather(*(one(name, function) for name, function in functions.items()))

    with _as_it_was(arguments):
        asked = asyncio.run_coroutine_threadsafe(together(), _loop())
        try:
            answers = asked.result()
        except BaseException:  # of one, or Ctrl-C: nobody waits for the others
            asked.cancel()
            raise
    return {name: _numbers(name, answer, count) for name, answer in zip(functions, answers, strict=True)}


@cache
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


def _own(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the arguments that a function takes."""
    return {name: _copied(value) for name, value in taken(function, arguments).items()}


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
        if value is not None and not math.isfinite(value):
            kind = "NaN" if math.isnan(value) else value
            raise ValueError(
                f"reward {name!r} returned {kind} for completion {row}: return finite numbers, or None "
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
