"""The places of rows, prompts and pages, as the host knows them, and as tables that the device reads."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.rollout.room import DecodeCapacity
from grpo.rollout.static_cache import Places

FEW_ROWS = 64
"""On CUDA so many rows of a small model take as long as one."""


@dataclass
class Slot:
    """A row that decodes."""

    row: int
    """The caller's number."""
    group: int
    """The caller's number of its prompt."""
    tokens: int = 1
    """Sampled so far, if the row has not ended."""
    pages: list[int] = field(default_factory=list)


class Sizes(NamedTuple):
    """How much of the tables a step reads."""

    rows: int
    prompts: int
    per_prompt: int
    pages: int
    per_row: int

    def recorded(self, room: DecodeCapacity) -> "Sizes":
        """Returns sizes that recordings are made for: all, a half, a quarter and so on of what there is.

        Fewer than FEW_ROWS rows save nothing.
        """
        return Sizes(
            halved(room.rows, self.rows, FEW_ROWS),
            halved(room.prompts, self.prompts, -(-FEW_ROWS // room.group_size)),
            room.group_size,
            halved(room.pages, self.pages, FEW_ROWS),
            halved(room.pages_per_row, self.per_row, 1),
        )


class Tables:
    """Tensors that stay where they are, and of which a step reads a part."""

    def __init__(self, room: DecodeCapacity, device: torch.device, *, recorded: bool) -> None:
        """recorded: whether steps are recorded for a size, so that there have to be few."""
        self._room, self._recorded = room, recorded

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=device)

        self._places = Places(
            numbers(room.prompts, room.group_size),
            numbers(room.rows),
            numbers(room.pages),
            numbers(room.pages),
            numbers(room.rows, room.pages_per_row),
            numbers(room.rows, room.pages_per_row).bool(),
        )
        self._row_prompts = numbers(room.rows)

    def update(
        self, slots: Sequence[Slot], place_of: Mapping[int, int], num_prompts: int, num_pages: int
    ) -> None:
        """Takes over where everything is.

        place_of: of prompts, by group. num_prompts, num_pages: places that are read. There is one of each at
        least, as the other processes of a sharded model have some.
        """
        prompts = [place_of[slot.group] for slot in slots]
        rows_of_prompts: list[list[int]] = [[] for _ in range(num_prompts)]
        within = list[int]()
        """By row, its place among those of its prompt."""
        for row, place in enumerate(prompts):
            within.append(len(rows_of_prompts[place]))
            rows_of_prompts[place].append(row)
        pages = {page: (row, at) for row, slot in enumerate(slots) for at, page in enumerate(slot.pages)}
        per_prompt = max(map(len, rows_of_prompts), default=1)
        per_row = max((len(slot.pages) for slot in slots), default=1)
        sizes = Sizes(*(max(1, n) for n in (len(slots), num_prompts, per_prompt, num_pages, per_row)))
        self.sizes = sizes = sizes.recorded(self._room) if self._recorded else sizes
        of_pages = [pages.get(page, (0, 0)) for page in range(sizes.pages)]
        values = (
            _table(rows_of_prompts, sizes.prompts, sizes.per_prompt),
            _filled(
                [place * sizes.per_prompt + at for place, at in zip(prompts, within, strict=True)], sizes.rows
            ),
            [row for row, _ in of_pages],
            [at for _, at in of_pages],
            _table([slot.pages for slot in slots], sizes.rows, sizes.per_row),
            _table([[True] * len(slot.pages) for slot in slots], sizes.rows, sizes.per_row),
        )
        self.places = Places(
            self._places.prompt_rows[: sizes.prompts, : sizes.per_prompt],
            self._places.in_prompts[: sizes.rows],
            self._places.page_rows[: sizes.pages],
            self._places.page_numbers[: sizes.pages],
            self._places.row_pages[: sizes.rows, : sizes.per_row],
            self._places.has_page[: sizes.rows, : sizes.per_row],
        )
        self.row_prompts = self._row_prompts[: sizes.rows]
        for stored, new in zip(self.places, values, strict=True):
            stored.copy_(torch.tensor(new))
        self.row_prompts.copy_(torch.tensor(_filled(prompts, sizes.rows)))


def _filled(numbers: Sequence[int], count: int) -> list[int]:
    """The same with zeros behind them, `count` in all."""
    return [*numbers, *[0] * (count - len(numbers))]


def _table(lists: Collection[Sequence[int]], rows: int, columns: int) -> list[list[int]]:
    """Lists of unlike lengths as one table, with zeros behind them and below."""
    return [_filled(numbers, columns) for numbers in lists] + [[0] * columns] * (rows - len(lists))


def halved(places: int, needed: int, few: int) -> int:
    """So many places, or as small a half, quarter and so on of them as holds those needed and a few."""
    while places > 1 and (half := -(-places // 2)) >= max(needed, few):
        places = half
    return places
