"""How much of the cache texts take, which is less than if all were as long as they may get."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from grpo.rollout.static_cache import page_tokens

MARGIN = 1.25
"""Times what the last steps took that is planned for. With lengths of a lognormal distribution no token is
then sampled twice, and few are in a step whose texts are half as long again.
"""
WORTH_IT = 0.75
"""A plan is changed for one of so many times its tokens, or less."""
STEPS = 8
"""Steps that are looked back on."""


def lognormal_lengths(count: int, mean: float, most: int, *, spread: float = 0.7, seed: int = 0) -> list[int]:
    """Returns made-up lengths with a tail, as answers of chat models have them.

    spread: their standard deviation by their mean, before they are cut at `most`.
    """
    variance = np.log1p(spread**2)
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - variance / 2, variance**0.5, count)
    lengths: list[int] = drawn.round().clip(1, most).astype(int).tolist()
    return lengths


def tokens_at_once(lengths: Sequence[int], rows: int, new_tokens: int) -> float:
    """Returns the tokens that pages held at their most, divided by rows at once, of a rollout of texts with
    these lengths in this order. new_tokens: the most that a text may have.
    """
    page, free, changes = page_tokens(new_tokens), [0] * min(rows, len(lengths)), list[tuple[int, int]]()
    for length in lengths:
        begin = heappop(free)  # the slot that has been free for longest
        heappush(free, begin + length)
        pages = max(1, -(-length // page))
        changes.append((begin + length, -pages))
        changes += [(begin + number * page, 1) for number in range(pages)]
    most = np.cumsum([change for _, change in sorted(changes)]).max(initial=0)
    return float(most) * page / max(1, min(rows, len(lengths)))


@cache
def _typical_tokens_at_once(mean: int, new_tokens: int) -> float:
    return tokens_at_once(lognormal_lengths(512, mean, new_tokens), 64, new_tokens)


class CachePlan:
    """Tokens that a row is planned to hold in pages: at first as many as it may get, then what texts took.

    It changes where it would run short, or is far too large.
    """

    def __init__(self, new_tokens: int, typical: int | None = None) -> None:
        """typical: tokens of a text on average, where that is known from the start."""
        self.new_tokens = new_tokens
        self.tokens: float = new_tokens
        if typical is not None:
            self.tokens = min(new_tokens, MARGIN * _typical_tokens_at_once(typical, new_tokens))
        self._took: deque[float] = deque(maxlen=STEPS)

    def see(self, lengths: Sequence[int], rows: int) -> str | None:
        """Takes note of a step's lengths, in rows at once. Where that changes the plan, it says so.

        Where all decode at once though all might be as long as they may, there is nothing to plan.
        """
        if rows >= len(lengths) and self.tokens == self.new_tokens:
            return None
        self._took.append(tokens_at_once(lengths, rows, self.new_tokens))
        most, before = max(self._took), self.tokens
        wanted = min(MARGIN * most, self.new_tokens)
        if wanted <= WORTH_IT * before or (most > before / 1.1 and wanted > before):
            self.tokens = wanted
            return f"texts take {wanted:.0f} tokens of the cache a row, and not {before:.0f}"
        return None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint has of it."""
        return {"tokens": self.tokens, "took": [*self._took]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on as a checkpoint has it; of an older version's there is nothing."""
        self.tokens = state.get("tokens", self.tokens)
        self._took.extend(state.get("took", ()))
