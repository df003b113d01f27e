"""Calling reward functions of the user's, which may do anything, and keeping the process as it was."""

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.data.reward_files import RewardFunction, arguments_of, process_as_it_was
from grpo.data.source import collate
from grpo.errors import UserError
from grpo.types import Batch, Prompt


def _plain(value: Any) -> bool | int | float | str | None:
    """A value as JSON has it: numpy's and torch's single numbers are numbers, anything else is text."""
    if isinstance(value, np.generic | np.ndarray | Tensor):
        numbers = np.ravel(value.detach().cpu() if isinstance(value, Tensor) else value).tolist()
        value = numbers[0] if len(numbers) == 1 else value
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class RewardFailed(RuntimeError):
    """An error in a reward function of the user's."""


class RewardCall:
    """The arguments of reward functions for some completions, and what they log of those."""

    def __init__(self, batch: Batch, state: SimpleNamespace) -> None:
        """state: of the run, as `trainer_state`."""
        prompts = batch.row_prompts
        self.extra: list[dict[str, Any]] = [{} for _ in prompts]
        """By completion, see `Scores.extra`."""
        self.metrics: dict[str, list[float]] = {}
        self.arguments: dict[str, Any] = {
            "prompts": [prompt.for_rewards for prompt in prompts],
            "completions": list(map(Prompt.as_completion, prompts, batch.texts)),
            "completion_ids": [ids.tolist() for ids in batch.by_row(batch.ids)],
            **collate(prompts),
            "trainer_state": state,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != len(self.extra):
            raise UserError(
                f"log_extra({column!r}) got {len(values)} values for {len(self.extra)} completions"
            )
        for row, value in zip(self.extra, values, strict=True):
            row[column] = _plain(value)

    def _log_metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def begin(self, functions: Mapping[str, RewardFunction]) -> "BegunCall":
        """Calls coroutine functions and waits for none; the caller keeps the process `as_it_was`."""
        count = len(self.extra)

        async def scores_of(name: str, function: RewardFunction) -> list[float]:
            with _errors_of(name):
                answer = _as_list(await function(**_copies_for(function, self.arguments)), count)
            return _numbers(name, answer, count)

        scores = {
            name: asyncio.run_coroutine_threadsafe(scores_of(name, function), _loop())
            for name, function in functions.items()
        }
        return BegunCall(self, scores)

    def join(self, begun: "Sequence[BegunCall]", names: Collection[str]) -> dict[str, list[float]]:
        """Waits for calls about parts of these completions, in their order, and takes over what they logged.

        Returns the scores of all completions by these functions.
        """
        scores = {name: [score for each in begun for score in each.scores[name].result()] for name in names}
        rows = (row for each in begun for row in each.call.extra)
        for row, found in zip(self.extra, rows, strict=False):  # there may be none
            row.update(found)
        for metric, values in (item for each in begun for item in each.call.metrics.items()):
            self.metrics.setdefault(metric, []).extend(values)
        return scores


@dataclass(frozen=True)
class BegunCall:
    """A call of coroutine functions that nobody has waited for yet."""

    call: RewardCall
    scores: Mapping[str, "Future[list[float]]"]

    def cancel(self) -> None:
        """Cancels what still runs of the call."""
        for future in self.scores.values():
            future.cancel()


def is_coroutine_function(function: Any) -> bool:
    """Whether to call it gives something to be awaited, as far as can be told before."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_all(functions: Mapping[str, RewardFunction], arguments: dict[str, Any]) -> dict[str, list[float]]:
    """Returns their scores of each of the completions, NaN for None; coroutines are awaited together.

    They get copies, which they may change. RewardFailed for an error in one, but for Ctrl-C; ValueError for
    an answer that is not one score a completion.
    """
    answers: dict[str, Any] = {}
    count = len(arguments["completions"])
    for name, function in functions.items():
        with _errors_of(name), as_it_was(arguments):
            answers[name] = _as_list(function(**_copies_for(function, arguments)), count)
    coroutines = {name: answer for name, answer in answers.items() if inspect.isawaitable(answer)}

    async def wait_for(name: str) -> None:
        with _errors_of(name):
            answers[name] = _as_list(await coroutines[name], count)

    async def wait_for_all() -> None:
        await asyncio.gather(*map(wait_for, coroutines))

    if coroutines:
        with as_it_was(arguments):
            waiting = asyncio.run_coroutine_threadsafe(wait_for_all(), _loop())
            try:
                waiting.result()
            except BaseException:  # of one, or Ctrl-C: nobody waits for the others
                waiting.cancel()
                raise
    return {name: _numbers(name, answer, count) for name, answer in answers.items()}


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
        of_rewards = [frame for frame in frames if frame.filename != __file__]
        where = f" in {of_rewards[-1].filename}, line {of_rewards[-1].lineno}" if of_rewards else ""
        raise RewardFailed(f"reward {name!r} failed with {type(error).__name__}{where}: {error}") from error


def _copies_for(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function takes, copied: it may change them."""
    return {key: _copied(values) for key, values in arguments_of(function, arguments).items()}


def _copied(values: Any) -> Any:
    """Copies a list row by row, as rows may share what they hold."""
    if not isinstance(values, list):
        return values
    return [copy.deepcopy(row) if isinstance(row, list | dict | set) else row for row in values]


def _as_list(answer: Any, count: int) -> Any:
    """A list if it is a sequence of any kind, `count` + 1 at most: it may have no end."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        return answer
    return list(itertools.islice(answer, count + 1))


@contextmanager
def as_it_was(arguments: Mapping[str, Any]) -> Iterator[None]:
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
    """Returns an answer as `count` numbers, NaN for None. ValueError if it is not that."""
    wanted = f"it must return a list of {count}, one number, or None, for each completion."
    try:
        if isinstance(answer, str | bytes | Mapping):
            raise TypeError("which is no list")
        if texts := [score for score in answer if isinstance(score, str | bytes)]:
            raise TypeError(f"{texts[0]!r} is text, not a number")
        numbers = [math.nan if score is None else float(score) for score in answer]
    except Exception as error:  # of __float__, which may be the user's
        raise UserError(f"reward {name!r} returned a {type(answer).__name__} ({error}): {wanted}") from error
    if len(numbers) != count:
        number = len(numbers) if len(numbers) < count else f"more than {count}"
        raise UserError(f"reward {name!r} returned {number} scores for {count} completions: {wanted}")
    for row, (score, value) in enumerate(zip(answer, numbers, strict=True)):
        if score is not None and not math.isfinite(value):
            kind = "NaN" if math.isnan(value) else value
            raise UserError(
                f"reward {name!r} returned {kind} for completion {row}: return finite numbers, or None "
                "for what it does not judge."
            )
    return numbers
