"""The base of both rewards: named components, each in [0, 1], and their weighted mean.

The calling convention is TRL 1.16's: `reward(prompts=, completions=, completion_ids=, **columns)`
gives a float a row, or None where the prompt is another reward's. A component that cannot be scored
for a prompt (no engine and no labels, say) is left out of that prompt's mean; whether it can be is a
property of the prompt, never of the completion, so that all of a group are measured alike.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from loguru import logger

Text = str | Sequence[Mapping[str, Any]]
"""A string, or TRL's conversational form: messages, of which the last one's content counts."""


FORMAT = "format"
_warnings: set[str] = set()
"""Those that were logged."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedReward(abc.ABC):
    """A reward of named components. `weights` says which are scored; weight 0 logs without paying.

    ValueError names the weights that are negative, not finite, or of no known component.
    """

    name: str
    weights: Mapping[str, float]

    prefix: ClassVar[str]
    """The prefix of its prompts."""
    reads: ClassVar[tuple[str, ...]]
    """The columns it reads; one that is absent, or None in a row, is read from the prompt instead."""
    from_truth: ClassVar[Mapping[str, Callable[[Any, Any], float]]]
    """Components that compare a parsed completion with the truth of its prompt, by name; beside `format`,
    which is 1 for a well-formed completion."""

    def __post_init__(self) -> None:
        known = sorted([FORMAT, *self.from_truth])
        if unknown := sorted(set(self.weights) - set(known)):
            raise ValueError(f"{self.name} has no component {unknown}: it has {known}")
        if bad := {name: w for name, w in self.weights.items() if not (w >= 0 and math.isfinite(w))}:
            raise ValueError(f"weights of {self.name} must be finite and not negative: {bad}")
        if not any(self.weights.values()):
            raise ValueError(f"{self.name} needs at least one weight above 0: {dict(self.weights)}")

    @property
    def __name__(self) -> str:  # TRL logs rewards/{__name__}/mean
        return self.name

    def with_weights(self, weights: Mapping[str, float]) -> Self:
        """A copy with these weights; components not named keep theirs."""
        return dataclasses.replace(self, weights={**self.weights, **weights})

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: object = None,
        **columns: Any,
    ) -> list[float | None]:
        """The reward of each completion in [0, 1]; None where the prompt is not this reward's."""
        rows = self.components(prompts, completions, **columns)
        return [None if row is None else self.mean(row) for row in rows]

    def components(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[dict[str, float] | None]:
        """The components of each completion by name; None where the prompt is not this reward's.

        ValueError where prompts, completions and the columns it reads are not of one length.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions: expected as many")
        places, texts, own_columns = self._own(prompts, columns)
        rows: list[dict[str, float] | None] = [None] * len(prompts)
        scores = self._score(texts, [_text(completions[i]) for i in places], own_columns)
        for i, row in zip(places, scores, strict=True):
            rows[i] = row
        return rows

    def field_of(self, component: str, completion: str) -> tuple[int, int]:
        """The letters of a completion that a component judges; all of them where it is not told."""
        return 0, len(completion)

    def shares(self, row: Mapping[str, float]) -> dict[str, float]:
        """Returns what each component of one row adds to `mean`."""
        total = sum(self.weights[name] for name in row)
        return {name: self.weights[name] * value / total for name, value in row.items()} if total else {}

    def mean(self, row: Mapping[str, float]) -> float | None:
        """The weighted mean of one row of `components`; None where nothing weighted was scored."""
        total = sum(self.weights[name] for name in row)
        return sum(self.weights[name] * value for name, value in row.items()) / total if total else None

    def _own(
        self, prompts: Sequence[Text], columns: Mapping[str, Any]
    ) -> tuple[list[int], list[str], dict[str, list[Any]]]:
        """Which prompts are this reward's, their texts, and their part of every column in `reads`."""
        texts = [_text(prompt) for prompt in prompts]
        places = [i for i, text in enumerate(texts) if text.startswith(self.prefix)]
        picked = {}
        for name in self.reads:
            column = columns.get(name)
            if column is None:
                column = [None] * len(texts)
            if len(column) != len(texts):
                raise ValueError(f"column {name!r} has {len(column)} rows for {len(texts)} prompts")
            picked[name] = [column[i] for i in places]
        return places, [texts[i] for i in places], picked

    @abc.abstractmethod
    def _score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[dict[str, float]]:
        """The components of its own rows."""

    def _row(self, written: Any, truth: Any) -> dict[str, float]:
        """The components of a parsed completion; `truth` None leaves out those that need one."""
        row = {}
        for name in self.weights:
            if name == FORMAT:
                row[name] = float(written.well_formed)
            elif truth is not None:
                row[name] = self.from_truth[name](written, truth)
        return row

    def _needs_truth(self) -> list[str]:
        return [name for name in self.weights if name != FORMAT]

    def _leave_out(self, why: str, detail: str) -> None:
        """Warn once a process, with the first `detail`."""
        names = ", ".join(self._needs_truth())
        warning = f"{self.name} reward: {names} left out of the weighted mean: {why}"
        if warning not in _warnings:
            _warnings.add(warning)
            logger.warning("{} ({})", warning, detail)


def _text(text: Text) -> str:
    if isinstance(text, str):
        return text
    content = text[-1].get("content") if text else None
    return content if isinstance(content, str) else ""
