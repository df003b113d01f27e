"""Sizes of passes: whole groups where they fit, divisors of a group below."""

from collections.abc import Callable
from typing import NamedTuple

from grpo.errors import UserError


class DoesNotFit(UserError):
    """Not even one row of a phase fits."""


class PassSize(NamedTuple):
    """Rows of a pass, the most completion tokens that one has, and the prompt tokens of their groups."""

    rows: int
    completion_tokens: int = 1
    prompt_tokens: int = 0
    computed: int = 0
    """Tokens of the whole pass where rows are of unlike lengths; 0: all rows are as long as the longest."""
    batch_rows: int = 0
    """Rows of the whole batch, of a phase in which the others wait and their prompts are there already."""


def num_tokens(size: PassSize, group_size: int) -> int:
    """Returns the tokens of a pass: its rows' completions, and the prompts that are there."""
    if size.computed:
        return size.computed
    prompts = -(-size.rows // group_size)
    if size.rows < size.batch_rows:
        prompts = prompts_held(*size[:3], prompts=-(-size.batch_rows // group_size), group_size=group_size)
    return size.rows * size.completion_tokens + prompts * size.prompt_tokens


def prompts_held(rows: int, tokens: float, prompt_tokens: int, *, prompts: int, group_size: int) -> int:
    """Prompts that are there while so many rows at once are sampled, of a batch of `prompts`.

    Those whose rows have not all ended are about twice as many as rows at once would fill, where texts have
    tails (lengths of a lognormal distribution); others are encoded ahead, in a sixteenth of what rows take.
    """
    in_use = -(-rows // group_size)
    ahead = min(in_use, int(rows * tokens / 16 / max(1, prompt_tokens)))
    return min(prompts, 2 * in_use + ahead, rows + -(-rows // 8))


def smaller_rows(rows: int, group_size: int) -> int | None:
    """The next size to try after `rows` did not fit; None below one row.

    Half, as a multiple of the group; within a group, its divisors.
    """
    if rows > group_size:
        return max(group_size, rows // 2 // group_size * group_size)
    return next((part for part in range(min(rows, group_size) - 1, 0, -1) if group_size % part == 0), None)


def largest_multiple(fits: Callable[[int], bool], *, at_most: int, multiple: int) -> int:
    """The largest multiple up to `at_most` for which `fits`, which must be monotone; 0 for none.

    The very largest is asked first: where all fits, as it mostly does, nothing less has to be looked at.
    """
    low, high = 0, at_most // multiple  # multiples: `low` fits, above `high` is not asked
    if high and fits(high * multiple):
        return high * multiple
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * multiple) else (low, middle - 1)
    return low * multiple


def largest_rows(fits: Callable[[int], bool], *, batch_size: int, group_size: int) -> int | None:
    """The most rows at once, at most `batch_size`, for which `fits`; None if not even one does.

    Multiples of the group where one fits, else a divisor of it. `fits` must be monotone.
    """
    if rows := largest_multiple(fits, at_most=batch_size, multiple=group_size):
        return rows
    divisors = [part for part in range(min(batch_size, group_size - 1), 0, -1) if group_size % part == 0]
    return next((part for part in divisors if fits(part)), None)


def even_rows(rows: int, *, batch_size: int, group_size: int) -> int:
    """As many passes as with `rows` at once, of sizes as equal as whole groups allow."""
    if rows < group_size:
        return rows
    passes = -(-batch_size // rows)
    return -(-batch_size // (passes * group_size)) * group_size
