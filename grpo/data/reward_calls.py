"""One call of a reward function of the user's, who may do anything in it."""

import copy
import hashlib
import itertools
import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RewardFunction = Callable[..., list[float | None]]


class RewardFailed(RuntimeError):
    """An error in a reward function of the user's."""


def call(name: str, function: RewardFunction, arguments: dict[str, Any]) -> list[float | None]:
    """What it says of each of the completions.

    RewardFailed for an error in it; ValueError for an answer that is not one score a completion.
    """
    count = len(arguments["completions"])
    return _numbers(name, _answer(name, function, arguments, count), count)


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
