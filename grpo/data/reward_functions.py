"""The reward functions of a run, ours and the user's, all in TRL's convention, and what they say."""

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo.data.reward_calls import BegunCall, RewardCall, as_it_was, call_all, is_coroutine_function
from grpo.data.reward_files import RewardFunction, check_columns, check_tasks, load_rewards
from grpo.data.source import collate
from grpo.errors import UserError
from grpo.rewards import EnginePool, PolicyReward, WeightedReward
from grpo.types import Batch, Prompt


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
        """Returns the rows of all parts, one after the other."""
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

    char_spans: of the texts that were asked for.
    """

    values: Tensor
    char_spans: list[tuple[int, int]]


class RewardFunctions:
    """The run's reward functions and their weights."""

    def __init__(self, specs: Sequence[str | RewardFunction], weights: Sequence[float] = ()) -> None:
        self._functions = load_rewards(specs, weights)
        self.state = SimpleNamespace(global_step=0, max_steps=0)
        """The run as a reward may see it: steps that are done, and to do, by transformers' names."""
        self._weights = torch.tensor(weights or [1.0] * len(specs), dtype=torch.float64)
        self._forget_calls()

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function, by name."""
        return dict(zip(self._functions, self._weights.tolist(), strict=True))

    def with_engine(self, engine: EnginePool | None) -> "RewardFunctions":
        """The same rewards, with an engine to judge moves."""
        judged = copy.copy(self)
        judged._forget_calls()
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
        users = {name: f for name, f in self._functions.items() if is_coroutine_function(f)}
        key = _key_of(batch.prompts[0], batch.texts)
        if users and key not in self._begun:
            call = RewardCall(batch, self.state)
            if not self._begun:
                self._meanwhile.enter_context(as_it_was(call.arguments))
            self._begun[key] = call.begin(users)
        for function in self._functions.values():
            if isinstance(function, PolicyReward):
                columns = collate(batch.row_prompts)
                function.prepare([prompt.text for prompt in batch.row_prompts], batch.texts, **columns)

    def forget_begun(self) -> None:
        """Drops what was begun and nobody waits for any more."""
        for begun in self._begun.values():
            begun.cancel()
        self._meanwhile.close()
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._begun: dict[tuple[int, tuple[str, ...]], BegunCall] = {}
        self._meanwhile = ExitStack()
        """Entered while calls that were begun may run."""

    def __call__(self, batch: Batch) -> Scores:
        """Scores a batch's rows. RewardFailed; ValueError for an answer that is not a score for each."""
        prompts, call = batch.row_prompts, RewardCall(batch, self.state)
        components: list[dict[str, float]] = [{} for _ in prompts]
        users = {name: f for name, f in self._functions.items() if not isinstance(f, WeightedReward)}
        try:
            begun = self._begun_of(batch)
            later = {name for name in users if begun and is_coroutine_function(users[name])}
            scores = call_all({n: f for n, f in users.items() if n not in later}, call.arguments)
            scores |= call.join(begun, later)
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
            tuple(self._functions),
            table,
            self._weights,
            components,
            call.extra,
            call.metrics,
            batch.lengths,
            batch.terminated,
            contexts[batch.group],
        )

    def _begun_of(self, batch: Batch) -> list[BegunCall]:
        """Returns the calls of a batch's prompts, in their order, if all were begun, else none."""
        rows: list[list[str]] = [[] for _ in batch.prompts]
        for group, text in zip(batch.group.tolist(), batch.texts, strict=True):
            rows[group].append(text)
        begun = [self._begun.get(_key_of(*each)) for each in zip(batch.prompts, rows, strict=True)]
        return [each for each in begun if each is not None] if None not in begun else []

    def judged(self, scores: Scores, texts: Sequence[str]) -> Iterator[Judged]:
        """Yields what each component of our rewards adds to `scores.rewards`, and the letters it judges."""
        for name, weight in self.weights.items():
            function = self._functions[name]
            if not isinstance(function, WeightedReward):
                continue
            names = {f"{name}/{key}": key for key in function.weights}
            shares = [
                function.shares({names[key]: value for key, value in row.items() if key in names})
                for row in scores.components
            ]
            for component in dict.fromkeys(key for row in shares for key in row):
                values = [weight * row.get(component, 0.0) for row in shares]
                char_spans = [function.field_of(component, text) for text in texts]
                yield Judged(torch.tensor(values, dtype=torch.float64), char_spans)


def _key_of(prompt: Prompt, texts: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """The key of a begun call: the prompt as an object, and what was sampled for it."""
    return id(prompt), tuple(texts)
