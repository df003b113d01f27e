"""Calling reward functions, ours and the user's, all in TRL's convention. A user's may do anything."""

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
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.data.reward_files import (
    RewardFunction,
    arguments_of,
    check_columns,
    check_tasks,
    load_rewards,
    process_as_it_was,
)
from grpo.data.source import collate
from grpo.errors import UserError
from grpo.rewards import EnginePool, PolicyReward, WeightedReward
from grpo.types import Batch, Prompt


def _plain(value: Any) -> bool | int | float | str | None:
    """A value as JSON has it: numpy's and torch's single numbers are numbers, anything else is text."""
    if isinstance(value, np.generic | np.ndarray | Tensor):
        numbers = np.ravel(value.detach().cpu() if isinstance(value, Tensor) else value).tolist()
        value = numbers[0] if len(numbers) == 1 else value
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class RewardFailed(RuntimeError):
    """An error in a reward function of the user's."""


@dataclass(frozen=True)
class Scores:
    """The rewards and lengths of a step's N completions, which every process knows."""

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
    """Numbers that rewards logged of all (`log_metric`), by name; the mean of several is logged."""
    lengths: Tensor
    """(N,) sampled tokens."""
    terminated: Tensor
    """(N,) bool: ended by itself."""
    prompt_lengths: Tensor
    """(N,) tokens of each row's prompt."""

    @property
    def rewards(self) -> Tensor:
        """(N,) weighted sums. ValueError for a row that no function scored."""
        rewards = self.rewards_where_scored
        if rows := rewards.isnan().nonzero().flatten().tolist():
            raise UserError(
                f"No reward function scored row {rows[0]} ({len(rows)} of {len(rewards)} rows). Every "
                "completion needs at least one number: add a reward function for that kind of prompt, or "
                "leave such prompts out."
            )
        return rewards

    @property
    def rewards_where_scored(self) -> Tensor:
        """(N,) weighted sums, in which NaN adds nothing, as in TRL; NaN for a row that no function scored."""
        rewards = (self.table * self.weights).nansum(dim=1)
        return rewards.masked_fill(self.table.isnan().all(dim=1), torch.nan)

    @staticmethod
    def join(parts: Sequence["Scores"]) -> "Scores":
        """One after the other."""
        metrics: dict[str, list[float]] = {}
        for name, values in (item for part in parts for item in part.metrics.items()):
            metrics[name] = [*metrics.get(name, ()), *values]
        columns: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS
        }
        return replace(
            parts[0],
            components=[row for part in parts for row in part.components],
            extra=[row for part in parts for row in part.extra],
            metrics=metrics,
            **columns,
        )

    def replace_groups(self, groups: Sequence[int], others: "Scores", group_size: int) -> "Scores":
        """Returns the same with `groups` (numbers among the B) taken from `others`, in order."""
        both, rows = Scores.join([self, others]), list(range(len(self.table)))
        for place, group in enumerate(groups):
            first = len(self.table) + place * group_size
            rows[group * group_size : (group + 1) * group_size] = range(first, first + group_size)
        components, extra = ([column[row] for row in rows] for column in (both.components, both.extra))
        columns: dict[str, Any] = {name: getattr(both, name)[rows] for name in _TENSORS}
        return replace(both, components=components, extra=extra, **columns)


_TENSORS = "table", "lengths", "terminated", "prompt_lengths"
"""The columns of scores that are tensors."""


@dataclass(frozen=True)
class Judged:
    """One component: what it adds to the rewards of a step's completions, (N,), and the letters it looks at.

    letters: of the texts that were asked for.
    """

    values: Tensor
    letters: list[tuple[int, int]]


class RewardFunctions:
    """The run's reward functions and their weights."""

    def __init__(self, specs: Sequence[str | RewardFunction], weights: Sequence[float] = ()) -> None:
        self._functions = load_rewards(specs, weights)
        self.state = SimpleNamespace(global_step=0, max_steps=0)
        """What a reward may know of the run: steps that are done, and to do, by transformers' names."""
        self._weights = torch.tensor(weights or [1.0] * len(specs), dtype=torch.float64)
        self._begun: dict[_Key, _Begun] = {}

    def with_engine(self, engine: EnginePool | None) -> "RewardFunctions":
        """The same rewards, with an engine to judge moves."""
        judged = copy.copy(self)
        judged._begun = {}
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

    def begin(self, batch: Batch) -> None:
        """Let rewards start on completions of a prompt in the background, while others are sampled.

        The engine is asked about moves, and coroutine functions are called, with these completions alone;
        scoring a batch that has them waits for both.
        """
        users = {name: f for name, f in self._functions.items() if _is_coroutine_function(f)}
        key = _key_of(batch.prompts[0], batch.texts)
        if users and key not in self._begun:
            call = _Call(batch, self.state)
            self._begun[key] = _Begun(call, {name: call.start(name, f) for name, f in users.items()})
        for function in self._functions.values():
            if isinstance(function, PolicyReward):
                columns = collate(batch.row_prompts)
                function.prepare([prompt.text for prompt in batch.row_prompts], batch.texts, **columns)

    def forget_begun(self) -> None:
        """Nobody waits any more for what was begun."""
        for begun in self._begun.values():
            for answer in begun.answers.values():
                answer.cancel()
        self._begun.clear()

    def __call__(self, batch: Batch) -> Scores:
        """Scores a batch's rows. RewardFailed; ValueError for an answer that is not a score for each."""
        prompts, call = batch.row_prompts, _Call(batch, self.state)
        components: list[dict[str, float]] = [{} for _ in prompts]
        users = {name: f for name, f in self._functions.items() if not isinstance(f, WeightedReward)}
        try:
            begun = self._begun_of(batch)
            later = {name for name in users if begun and _is_coroutine_function(users[name])}
            scores = call_all({n: f for n, f in users.items() if n not in later}, call.arguments)
            scores |= call.join([*begun], later)
        finally:
            self.forget_begun()
        for name, function in self._functions.items():
            if isinstance(function, WeightedReward):
                parts = function.components(**call.arguments)
                means = (None if part is None else function.mean(part) for part in parts)
                scores[name] = [torch.nan if mean is None else mean for mean in means]
                for row, part in zip(components, parts, strict=True):
                    row.update({f"{name}/{key}": value for key, value in (part or {}).items()})
        columns = [scores[name] for name in self._functions]
        table = torch.tensor(columns, dtype=torch.float64).T  # (N, F)
        contexts = torch.tensor([len(ids) for ids in batch.context_ids])
        return Scores(
            tuple(self._functions), table, self._weights, components, call.extra, call.metrics,
            batch.lengths, batch.terminated, contexts[batch.group],
        )  # fmt: skip

    def _begun_of(self, batch: Batch) -> "list[_Begun]":
        """What was begun of each of a batch's prompts, in their order; nothing where it was not of all."""
        rows = [[] for _ in batch.prompts]  # type: list[list[str]]
        for group, text in zip(batch.group.tolist(), batch.texts, strict=True):
            rows[group].append(text)
        begun = [self._begun.get(_key_of(*each)) for each in zip(batch.prompts, rows, strict=True)]
        return [each for each in begun if each is not None] if None not in begun else []

    def judged(self, scores: Scores, texts: Sequence[str]) -> Iterator[Judged]:
        """Yields what each component of our rewards adds to `scores.rewards`, and the letters it judges."""
        for (name, function), weight in zip(self._functions.items(), self._weights.tolist(), strict=True):
            if not isinstance(function, WeightedReward):
                continue
            names = {f"{name}/{key}": key for key in function.weights}
            shares = [
                function.shares({names[key]: value for key, value in row.items() if key in names})
                for row in scores.components
            ]
            for component in dict.fromkeys(key for row in shares for key in row):
                values = [weight * row.get(component, 0.0) for row in shares]
                letters = [function.field_of(component, text) for text in texts]
                yield Judged(torch.tensor(values, dtype=torch.float64), letters)


# ------------------------------------------------------------------------------- functions of the user's


class _Call:
    """What reward functions are called with for some completions, and what they say besides scores."""

    def __init__(self, batch: Batch, state: SimpleNamespace) -> None:
        prompts = batch.row_prompts
        self.extra: list[dict[str, Any]] = [{} for _ in prompts]
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

    def start(self, name: str, function: RewardFunction) -> "Future[list[float]]":
        """Call a coroutine function in the background."""
        count = len(self.extra)

        async def wait_for() -> list[float]:
            with _errors_of(name):
                arguments = arguments_of(function, self.arguments).items()
                answer = _as_list(await function(**{key: _copied(value) for key, value in arguments}), count)
            return _numbers(name, answer, count)

        return asyncio.run_coroutine_threadsafe(wait_for(), _loop())

    def join(self, begun: "Sequence[_Begun]", names: Collection[str]) -> dict[str, list[float]]:
        """Returns what these functions say of all completions, once they have answered, and takes over what
        they logged. begun: the calls that these completions were parts of, in order.
        """
        scores: dict[str, list[float]] = {name: [] for name in names}
        with _as_it_was(self.arguments):
            for name in names:
                for each in begun:
                    scores[name] += each.answers[name].result()
        rows = (row for each in begun for row in each.call.extra)
        for row, found in zip(self.extra, rows, strict=False):
            row.update(found)
        for each in begun:
            for metric, values in each.call.metrics.items():
                self.metrics.setdefault(metric, []).extend(values)
        return scores


@dataclass(frozen=True)
class _Begun:
    """Calls that were begun while other rows were sampled."""

    call: _Call
    answers: "dict[str, Future[list[float]]]"


_Key = tuple[int, tuple[str, ...]]


def _key_of(prompt: Prompt, texts: Sequence[str]) -> _Key:
    """A prompt, as an object, and what was sampled for it."""
    return id(prompt), tuple(texts)


def _is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_all(functions: Mapping[str, RewardFunction], arguments: dict[str, Any]) -> dict[str, list[float]]:
    """What they say of each of the completions, NaN for None; coroutines are awaited together.

    They get copies, which they may change. RewardFailed for an error in one, but for Ctrl-C; ValueError for
    an answer that is not one score a completion.
    """
    answers: dict[str, Any] = {}
    count = len(arguments["completions"])
    for name, function in functions.items():
        with _errors_of(name), _as_it_was(arguments):
            copies = {key: _copied(values) for key, values in arguments_of(function, arguments).items()}
            answers[name] = _as_list(function(**copies), count)
    coroutines = {name: answer for name, answer in answers.items() if inspect.isawaitable(answer)}

    async def wait_for(name: str) -> None:
        with _errors_of(name):
            answers[name] = _as_list(await coroutines[name], count)

    async def wait_for_all() -> None:
        await asyncio.gather(*map(wait_for, coroutines))

    if coroutines:
        with _as_it_was(arguments):
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


def _copied(values: Any) -> Any:
    """Of a list row by row, as rows may share what they hold."""
    if not isinstance(values, list):
        return values
    return [copy.deepcopy(row) if isinstance(row, list | dict | set) else row for row in values]


def _as_list(answer: Any, count: int) -> Any:
    """A list if it is a sequence of any kind, `count` + 1 at most: it may have no end."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        return answer
    return list(itertools.islice(answer, count + 1))


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
