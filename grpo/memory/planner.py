"""Rows per phase: the most that fit, as multiples of the group.

Pure: predictions and a budget in, numbers out. Who runs phases by them is `adaptive.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grpo.memory.budget import Budget, readable
from grpo.memory.phase import Footprint


@dataclass(frozen=True)
class PhasePlan:
    """Rows at once in one phase, and what that is expected to hold."""

    rows: int
    footprint: Footprint


class DoesNotFit(ValueError):
    """Not even one row of a phase fits."""


def smaller_rows(rows: int, group_size: int) -> int | None:
    """The next size to try after `rows` did not fit; None below one row.

    Half, as a multiple of the group; within a group, its divisors.
    """
    if rows > group_size:
        return max(group_size, rows // 2 // group_size * group_size)
    return next((part for part in range(min(rows, group_size) - 1, 0, -1) if group_size % part == 0), None)


def largest_multiple(fits: Callable[[int], bool], *, at_most: int, multiple: int) -> int:
    """The largest multiple up to `at_most` for which `fits`, which must be monotone; 0 for none.

    The very largest is asked first: where all fits, as it mostly does, nothing less has to be traced.
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
    divisors = [part for part in range(group_size - 1, 0, -1) if group_size % part == 0]
    return next((part for part in divisors if fits(part)), None)


def even_rows(rows: int, *, batch_size: int, group_size: int) -> int:
    """As many passes as with `rows` at once, of sizes as equal as whole groups allow."""
    if rows < group_size:
        return rows
    passes = -(-batch_size // rows)
    return -(-batch_size // (passes * group_size)) * group_size


def plan_phase(
    footprint: Callable[[int], Footprint],
    budget: Budget,
    *,
    phase: str,
    batch_size: int,
    group_size: int,
    at_most: int | None = None,
) -> PhasePlan:
    """The largest safe rows of one phase. DoesNotFit names the phase, what it needs and what there is.

    footprint: of the phase, as a function of rows. at_most: rows never to be exceeded.
    """
    ceiling = batch_size if at_most is None else min(batch_size, at_most)

    def fits(rows: int) -> bool:
        return footprint(rows).upper_bytes <= budget.usable_bytes

    if ceiling < group_size:
        sizes = [part for part in range(ceiling, 0, -1) if group_size % part == 0]
        rows = next((part for part in sizes if fits(part)), None)
    else:
        rows = largest_rows(fits, batch_size=ceiling, group_size=group_size)
    if rows is None:
        needed = footprint(1)
        parts = ", ".join(f"{name} {readable(size)}" for name, size in needed.parts.items() if size)
        raise DoesNotFit(
            f"{phase} does not fit: one row needs {readable(needed.upper_bytes)} ({parts}), "
            f"and there are {budget}."
        )
    rows = even_rows(rows, batch_size=batch_size, group_size=group_size)
    return PhasePlan(rows, footprint(rows))
