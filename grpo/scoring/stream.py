"""Rows of a batch as the model sees them: one stream of tokens, in which nothing is padded.

A stream begins with the contexts (prompts) of its rows, each once, and then has each row's own tokens. Linear
layers see T tokens, `model/stream_attention.py` says what each attends to. Layouts are made on the host from
lengths alone, so that fake tensors can trace what is done with a stream.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo.model.stream_attention import Rectangle, Sequences, StreamAttention
from grpo.model.transfer import to_device

Numbers = NDArray[np.int64]

RECTANGLE_SCORES = 2**14
"""Scores of attention, of one head, that take as long as another rectangle does: what a cut has to save."""


@dataclass(frozen=True)
class Stream:
    """R rows in T tokens, of which K are learned from, or scored."""

    ids: Tensor
    """(1, T)"""
    positions: Tensor
    """(1, T)"""
    states: Tensor
    """(K,) places among the T of the states that predict the K tokens, row by row."""
    targets: Tensor
    """(K,) ids of these tokens."""
    attention: StreamAttention
    row: Tensor
    """(K,) which of the R rows a token belongs to; on the host."""
    place: Tensor
    """(K,) which of its row's tokens it is; on the host."""
    tokens: Tensor
    """(K,) which of the batch's tokens it is; on the host."""
    layout: "Layout"

    def __len__(self) -> int:
        """T, the tokens that the model computes."""
        return self.ids.shape[1]

    @property
    def num_rows(self) -> int:
        """R"""
        return len(self.layout.context_of)

    def to(self, device: torch.device, *others: Tensor) -> tuple["Stream", list[Tensor]]:
        """Copies what the model needs to a device, with other tensors that belong to it, in one copy."""
        attention, mine = self.attention.tensors, [self.ids, self.positions, self.states, self.targets]
        moved = to_device([*mine, *attention, *others], device)
        ids, places, states, targets = moved[:4]
        stream = replace(
            self,
            ids=ids,
            positions=places,
            states=states,
            targets=targets,
            attention=self.attention.to(moved[4 : 4 + len(attention)]),
        )
        return stream, moved[4 + len(attention) :]


@dataclass(frozen=True)
class Layout:
    """The places of B contexts and R rows in a stream, on the host."""

    context_sizes: Numbers
    """(B,) tokens."""
    context_of: Numbers
    """(R,) which context each row has."""
    row_sizes: Numbers
    """(R,) own tokens that the model reads: up to the one before the last that is scored."""
    longest_row: int
    """Tokens of the longest row, the last one included."""

    @cached_property
    def starts(self) -> Numbers:
        """(B + R + 1,) where contexts, rows and nothing more begin."""
        sizes = np.concatenate([[0], self.context_sizes, self.row_sizes])
        return sizes.cumsum()

    @property
    def context_starts(self) -> Numbers:
        return self.starts[: len(self.context_sizes)]

    @property
    def row_starts(self) -> Numbers:
        return self.starts[len(self.context_sizes) : -1]

    def attention(self) -> StreamAttention:
        """Says what each token attends to: contexts to themselves, rows to their context, too."""
        nothing = np.zeros_like(self.context_sizes)
        of_contexts = _Pieces(self.context_starts, self.context_sizes, nothing, nothing)
        before = self.context_starts[self.context_of], self.context_sizes[self.context_of]
        of_rows = _Pieces(self.row_starts, self.row_sizes, *before)
        order, done, rectangles = np.zeros(self.starts[-1], dtype=np.int64), 0, []
        for pieces in (*of_contexts.alike(), *of_rows.alike()):
            queries, is_there = _places(pieces.starts, pieces.sizes)
            before_them, _ = _places(pieces.before_starts, pieces.before_sizes)
            order[queries[is_there]] = done + np.flatnonzero(is_there)
            done += queries.size
            keys = np.concatenate([before_them, queries], 1)
            rectangles.append(Rectangle(*map(torch.tensor, (queries, keys, pieces.before_sizes))))
        return StreamAttention(rectangles, torch.tensor(order), self._sequences())

    def _sequences(self) -> Sequences:
        """Lists contexts and rows in the stream's order, those without a token left out."""
        before = np.concatenate([np.zeros_like(self.context_sizes), self.context_sizes[self.context_of]])
        before_starts = np.concatenate([self.context_starts, self.context_starts[self.context_of]])
        sizes, starts = np.diff(self.starts), self.starts[:-1]
        some = sizes > 0
        sizes, starts, before, before_starts = sizes[some], starts[some], before[some], before_starts[some]
        both = np.stack([before, sizes], 1).flatten()  # what comes before each piece, and itself
        begins = np.stack([before_starts, starts], 1).flatten()
        keys = np.arange(both.sum()) + np.repeat(begins - (both.cumsum() - both), both)
        query_ends, key_ends = (
            torch.tensor(np.concatenate([[0], counts.cumsum()]), dtype=torch.int32)
            for counts in (sizes, before + sizes)
        )
        return Sequences(
            query_ends, torch.tensor(keys), key_ends, int(sizes.max()), int((before + sizes).max())
        )

    def whole_texts(self) -> "WholeTexts":
        """Says where each row's text is, its context and its own tokens, for models that read no streams."""
        contexts = self.context_sizes[self.context_of]
        texts = [
            np.concatenate([np.arange(start, start + size), np.arange(own, own + count)])
            for start, size, own, count in zip(
                self.context_starts[self.context_of], contexts, self.row_starts, self.row_sizes, strict=True
            )
        ]
        width = max(map(len, texts))
        places = np.zeros((len(texts), width), dtype=np.int64)
        for row, text in zip(places, texts, strict=True):
            row[: len(text)] = text
        lengths = contexts + self.row_sizes
        return WholeTexts(places, np.arange(width) < lengths[:, None], contexts, np.arange(len(texts)))


class WholeTexts(NamedTuple):
    """The texts of R rows, padded on the right to W tokens, by their places in a stream."""

    places: Numbers
    """(R, W), 0 where there is padding."""
    is_there: NDArray[np.bool_]
    """(R, W), False where there is padding."""
    begins: Numbers
    """(R,) where a row's own tokens begin in its text."""
    rows: Numbers
    """(R,) the rows' numbers in the stream."""

    def by_length(self) -> "list[WholeTexts]":
        """Returns texts of one length together, without padding."""
        lengths, parts = self.is_there.sum(1), []
        for length in np.unique(lengths):
            part = WholeTexts(*(each[lengths == length] for each in self))
            parts.append(part._replace(places=part.places[:, :length], is_there=part.is_there[:, :length]))
        return parts

    def own_starts(self, parts: "Sequence[WholeTexts]") -> Numbers:
        """Returns where each row's own tokens begin, (R,), when the texts of `parts` stand one by one."""
        starts, done = np.zeros(len(self.rows), dtype=np.int64), 0
        for part in parts:
            num_rows, width = part.places.shape
            starts[part.rows] = done + np.arange(num_rows) * width + part.begins
            done += part.places.size
        return starts


@dataclass(frozen=True)
class _Pieces:
    """Pieces of a stream, and what comes before each: where they start, and how many tokens they have."""

    starts: Numbers
    sizes: Numbers
    before_starts: Numbers
    before_sizes: Numbers

    def alike(self) -> Iterator["_Pieces"]:
        """Pieces of like length together; those without a token are left out."""
        order = np.lexsort([self.before_sizes, self.sizes])
        order = order[self.sizes[order] > 0]
        start = 0
        for count in _like_lengths(self.sizes[order], self.before_sizes[order]):
            yield self._take(order[start : start + count])
            start += count

    def _take(self, chosen: Numbers) -> "_Pieces":
        return _Pieces(
            self.starts[chosen], self.sizes[chosen], self.before_starts[chosen], self.before_sizes[chosen]
        )


def _like_lengths(sizes: Numbers, before: Numbers) -> list[int]:
    """Returns how many pieces, in rising order, go into each rectangle, so that little of it is padding."""
    count = len(sizes)
    if count < 2:
        return [count] if count else []
    most_before, most_behind = np.maximum.accumulate(before), np.maximum.accumulate(before[::-1])[::-1]
    cuts = np.arange(1, count)
    together = count * sizes[-1] * (sizes[-1] + most_before[-1])
    first = cuts * sizes[:-1] * (sizes[:-1] + most_before[:-1])
    second = (count - cuts) * sizes[-1] * (sizes[-1] + most_behind[1:])
    saved = together - first - second
    best = int(saved.argmax())
    if saved[best] <= RECTANGLE_SCORES:
        return [count]
    cut = best + 1
    return [*_like_lengths(sizes[:cut], before[:cut]), *_like_lengths(sizes[cut:], before[cut:])]


def _places(starts: Numbers, sizes: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Places of pieces (R, most of sizes), 0 where one has no token, and where it has."""
    columns = np.arange(int(sizes.max()))
    is_there = columns < sizes[:, None]
    return np.where(is_there, starts[:, None] + columns, 0), is_there


class Texts(NamedTuple):
    """Rows behind their prompts, in numbers."""

    prompts: list[list[int]]
    prompt_of: list[int]
    """Which prompt each row has."""
    rows: list[list[int]]
    """Each row's own tokens."""

    def stream(self, **options: Any) -> Stream:
        """See `make_stream`."""
        return make_stream(*self, **options)

    def whole(self) -> list[list[int]]:
        """Each row behind its prompt."""
        return [[*self.prompts[prompt], *row] for prompt, row in zip(self.prompt_of, self.rows, strict=True)]


def make_stream(
    contexts: Sequence[Sequence[int]],
    context_of: Sequence[int],
    rows: Sequence[Any],
    *,
    learned: Sequence[Any] | None = None,
    first_positions: Sequence[int] | None = None,
) -> Stream:
    """Makes the stream of some rows, on the host.

    contexts: token ids that rows begin with, at least one each. context_of: (R,) which one each row has.
    rows: R arrays of token ids. learned: R arrays of bool, which tokens are scored; None: all.
    first_positions: of each context's first token, if not 0.
    """
    scored = [
        np.arange(len(ids)) if learned is None else np.flatnonzero(learned[number])
        for number, ids in enumerate(rows)
    ]
    layout = Layout(
        context_sizes=np.array([len(ids) for ids in contexts]),
        context_of=np.array(context_of, dtype=np.int64),
        row_sizes=np.array([int(places[-1]) if len(places) else 0 for places in scored], dtype=np.int64),
        longest_row=max(1, *map(len, rows)),
    )
    read = [ids[:count] for ids, count in zip(rows, layout.row_sizes, strict=True)]
    first = np.zeros_like(layout.context_sizes) if first_positions is None else np.array(first_positions)
    behind = (first + layout.context_sizes)[layout.context_of]
    segments, starts = np.diff(layout.starts), layout.starts
    place_of = np.arange(starts[-1]) + np.repeat(np.concatenate([first, behind]) - starts[:-1], segments)
    row = np.repeat(np.arange(len(rows)), [len(places) for places in scored])
    place = np.concatenate([np.zeros(0, dtype=np.int64), *scored])
    context_ends = layout.context_starts + layout.context_sizes - 1
    states = np.where(place == 0, context_ends[layout.context_of[row]], layout.row_starts[row] + place - 1)
    targets = [np.asarray(ids)[places] for ids, places in zip(rows, scored, strict=True)]

    def tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long)

    return Stream(
        ids=tensor(np.concatenate([*contexts, *read]).astype(np.int64)).unsqueeze(0),
        positions=tensor(place_of).unsqueeze(0),
        states=tensor(states),
        targets=tensor(np.concatenate([np.zeros(0, dtype=np.int64), *targets])),
        attention=layout.attention(),
        row=tensor(row),
        place=tensor(place),
        tokens=tensor(np.cumsum([0, *map(len, rows)])[row] + place),
        layout=layout,
    )
