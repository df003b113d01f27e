"""A batch in streams, each of which takes no more memory than the planned rows of the longest texts would."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from grpo.memory import PassSize
from grpo.memory.rows import num_tokens
from grpo.scoring.stream import Stream, make_stream
from grpo.types import Batch


def streams(
    batch: Batch,
    rows: int,
    *,
    scored: Tensor | None = None,
    longest: tuple[int, int] | None = None,
    of_equal_rows: bool = False,
) -> Iterator[Stream]:
    """Yields all rows of a batch in streams that each take no more tokens than `rows` of the longest would.

    scored: (K,) bool, which of the batch's tokens; None: all. longest: prompt and new tokens that `rows` is
    meant for; None: those of this batch. of_equal_rows: the same number of rows each time, however long, as
    where several processes have to make the same passes.
    """
    ids, group, offsets = batch.ids.numpy(), batch.group.tolist(), batch.offsets.tolist()
    wanted = None if scored is None else scored.numpy()
    for chosen in pack(batch, rows, longest=longest, of_equal_rows=of_equal_rows):
        groups = {number: place for place, number in enumerate(sorted({group[row] for row in chosen}))}
        tokens = [slice(offsets[row], offsets[row + 1]) for row in chosen]
        stream = make_stream(
            [batch.context_ids[number] for number in groups],
            [groups[group[row]] for row in chosen],
            [ids[own] for own in tokens],
            learned=None if wanted is None else [wanted[own] for own in tokens],
        )
        yield replace(stream, tokens=batch.offsets[chosen][stream.row] + stream.place)


def pack(
    batch: Batch, rows: int, *, longest: tuple[int, int] | None = None, of_equal_rows: bool = False
) -> list[list[int]]:
    """Decides which rows of a batch go into each stream, the largest stream first; see `streams`.

    Groups stay whole, so that their prompt is there once, unless one alone is too much: then its rows are
    parted. The largest go first, into the first stream that has room for them.
    """
    lengths = batch.lengths.numpy()
    of_prompts = np.array([len(ids) for ids in batch.context_ids])
    rows_of = np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(batch.group.numpy())) + 1)
    if of_equal_rows:
        size = batch.group_size
        order = np.concatenate(sorted(rows_of, key=lambda group: -lengths[group].max()))
        each = rows - rows % size if rows >= size else rows
        return [order[start : start + each].tolist() for start in range(0, len(order), each)]
    prompt_tokens, new_tokens = longest or (int(of_prompts.max()), max(1, int(lengths.max())))
    room = num_tokens(PassSize(rows, new_tokens, prompt_tokens), batch.group_size)
    parts: list[tuple[int, list[int]]] = []
    for of_prompt, of_group in zip(of_prompts.tolist(), rows_of, strict=True):
        part: list[int] = []
        tokens = of_prompt
        for row in of_group[np.argsort(-lengths[of_group], kind="stable")].tolist():
            if part and tokens + lengths[row] > room:
                parts.append((tokens, part))
                part, tokens = [], of_prompt
            part.append(row)
            tokens += int(lengths[row])
        parts.append((tokens, part))
    left: list[int] = []
    packed: list[list[int]] = []
    for tokens, part in sorted(parts, key=lambda each: -each[0]):
        number = next((number for number, free in enumerate(left) if free >= tokens), len(left))
        if number == len(left):
            left.append(room)
            packed.append([])
        left[number] -= tokens
        packed[number] += part
    return packed


def largest_stream(batch: Batch, rows: int, **options: Any) -> PassSize:
    """Returns the size of the largest among `streams`, which their memory depends on."""

    def size(chosen: list[int]) -> PassSize:
        prompts = [len(batch.context_ids[group]) for group in batch.group[chosen].unique().tolist()]
        own = batch.lengths[chosen]
        return PassSize(min(rows, len(batch)), int(own.max()), max(prompts), sum(prompts) + int(own.sum()))

    return max(map(size, pack(batch, rows, **options)), key=lambda each: each.computed)
