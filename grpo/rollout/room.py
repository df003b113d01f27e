"""How many rows, prompts and pages a rollout has places for."""

from collections.abc import Iterable
from typing import NamedTuple

from grpo.memory.rows import prompts_held
from grpo.rollout.static_cache import page_tokens


class DecodeCapacity(NamedTuple):
    """The capacity of an arena, and the tokens that end a completion."""

    rows: int
    """Rows that decode at once."""
    prompts: int
    pages: int
    group_size: int
    """Rows of a prompt at most."""
    prompt_tokens: int
    new_tokens: int
    page: int
    """Tokens of a page."""
    ends: tuple[int, ...]

    @property
    def pages_per_row(self) -> int:
        """Pages of a row that gets as long as it may."""
        return -(-self.new_tokens // self.page)

    @classmethod
    def of(
        cls,
        rows: int,
        prompts: int,
        group_size: int,
        prompt_tokens: int,
        new_tokens: int,
        ends: Iterable[int] = (),
        *,
        cache_tokens: float | None = None,
        page: int | None = None,
    ) -> "DecodeCapacity":
        """Returns what so many rows at once take of a rollout of so many prompts.

        cache_tokens: that rows are planned to hold of their own, on average; None: as many as they may get.
        """
        page, tokens = page or page_tokens(new_tokens), min(new_tokens, cache_tokens or new_tokens)
        places = prompts_held(rows, tokens, prompt_tokens, prompts=prompts, group_size=group_size)
        room = cls(rows, places, 0, group_size, prompt_tokens, new_tokens, page, tuple(ends))
        pages = most = rows * room.pages_per_row
        if tokens < new_tokens:
            pages = min(most, max(int(rows * tokens / page), rows, room.pages_per_row))
        return room._replace(pages=pages)
