"""Rows that fit, against brute force, and the message when not one does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.memory import Budget, DoesNotFit, largest_rows, make_budget
from grpo.memory.budget import GB, DeviceMemory, larger_budget
from grpo.memory.phase import Footprint
from grpo.memory.planner import even_rows, plan_phase, smaller_rows

GROUPS = st.integers(1, 16)


def test_a_footprint_is_the_sum_of_its_parts_and_its_error():
    footprint = Footprint({"weights": 100.0, "activations": 20.5}, error_bytes=6.0)
    assert (footprint.peak_bytes, footprint.upper_bytes) == (120.5, 126.5)


@pytest.mark.parametrize(
    ("group_size", "sizes"),
    [(8, [64, 32, 16, 8, 4, 2, 1]), (8, [40, 16, 8, 4, 2, 1]), (6, [42, 18, 6, 3, 2, 1]), (7, [21, 7, 1]),
     (6, [5, 3, 2, 1]), (1, [10, 5, 2, 1])],
)  # fmt: skip
def test_sizes_to_try_halve_by_whole_groups_and_then_divide_the_group(group_size, sizes):
    tried = sizes[:1]
    while (smaller := smaller_rows(tried[-1], group_size)) is not None:
        tried.append(smaller)
    assert tried == sizes


@given(group_size=GROUPS, groups=GROUPS, odd=st.integers(0, 15), capacity=st.integers(0, 300))
def test_the_largest_rows_are_those_of_brute_force(group_size: int, groups: int, odd: int, capacity: int):
    batch_size = groups * group_size + odd % group_size  # a ceiling need not be whole groups
    asked: list[int] = []

    def fits(rows: int) -> bool:
        asked.append(rows)
        return rows <= capacity

    whole = [rows for rows in range(group_size, batch_size + 1, group_size) if rows <= capacity]
    parts = [rows for rows in range(1, group_size) if group_size % rows == 0 and rows <= capacity]
    found = largest_rows(fits, batch_size=batch_size, group_size=group_size)
    assert found == max(whole or parts, default=None)
    assert max(asked) <= batch_size
    assert len(asked) <= 1 + math.ceil(math.log2(groups + 1)) + group_size


@given(group_size=GROUPS, groups=GROUPS, at_once=GROUPS)
def test_even_rows_take_as_many_passes_and_no_smaller_ones_would_do(group_size, groups, at_once):
    batch_size, rows = groups * group_size, min(at_once, groups) * group_size
    even = even_rows(rows, batch_size=batch_size, group_size=group_size)
    passes = math.ceil(batch_size / rows)
    assert even <= rows and even % group_size == 0
    assert math.ceil(batch_size / even) == passes
    assert even == group_size or math.ceil(batch_size / (even - group_size)) > passes


def test_parts_of_a_group_stay_as_they_are():
    assert even_rows(3, batch_size=12, group_size=6) == 3


# --------------------------------------------------------------------------------------- a phase


def footprint(rows: int) -> Footprint:
    """100 bytes, and 10 a row, give or take 1 a row."""
    return Footprint({"weights": 100.0, "activations": 10.0 * rows}, error_bytes=float(rows))


def rows_within(usable_bytes: int, *, at_most: int | None = None) -> int:
    """For a batch of 40 in groups of 4."""
    plan = plan_phase(
        footprint, Budget(usable_bytes, "test"), phase="learn", batch_size=40, group_size=4, at_most=at_most
    )
    assert plan.footprint == footprint(plan.rows)
    return plan.rows


def test_the_peak_with_its_error_fits():
    assert rows_within(10_000) == 40
    assert rows_within(100 + 11 * 40) == 40
    assert rows_within(100 + 11 * 40 - 1) == 20  # 36 would fit: two passes of 20 do as well
    assert rows_within(100 + 11 * 20 - 1) == 16  # three passes, as even as groups allow
    assert rows_within(100 + 11 * 4) == 4
    assert rows_within(100 + 11 * 4 - 1) == 2  # a group of 4 is split by its divisors
    assert rows_within(100 + 11) == 1


@pytest.mark.parametrize(
    ("at_most", "rows"), [(100, 40), (40, 40), (39, 20), (16, 16), (7, 4), (4, 4), (3, 2), (1, 1)]
)
def test_rows_never_exceed_what_they_are_told(at_most, rows):
    assert rows_within(10_000, at_most=at_most) == rows


def test_the_limit_and_the_budget_hold_together():
    assert rows_within(100 + 11 * 8, at_most=16) == 8
    assert rows_within(100 + 11, at_most=3) == 1


@pytest.mark.parametrize("at_most", [None, 2])
def test_when_not_even_one_row_fits_the_phase_its_needs_and_the_budget_are_named(at_most):
    def large(rows: int) -> Footprint:
        return Footprint({"weights": 2.0 * GB, "activations": 1.5 * GB * rows}, error_bytes=GB / 4)

    with pytest.raises(DoesNotFit) as error:
        plan_phase(
            large,
            Budget(3 * GB, "75% of 4.00 GB"),
            phase="score",
            batch_size=8,
            group_size=4,
            at_most=at_most,
        )
    assert str(error.value) == (
        "score does not fit: one row needs 3.75 GB (weights 2.00 GB, activations 1.50 GB), "
        "and there are 3.00 GB (75% of 4.00 GB)."
    )


def test_the_limit_that_would_do_is_rounded_up():
    limit = Budget(GB // 2, "--memory-limit")
    assert larger_budget(limit, 0.651 * GB, 0.4 * GB) == "As it is, --memory-limit has to be at least 0.66GB."
    assert larger_budget(limit, 0.66 * GB, 0.58 * GB) == (
        "This process alone takes 0.58 GB: --memory-limit has to be at least 0.66GB."
    )
    assert larger_budget(Budget(GB // 2, "free"), GB, 0.4 * GB) == "As it is, 1.00 GB have to be there."


def test_where_only_a_share_may_be_held_what_has_to_be_there_is_more():
    budget = make_budget(DeviceMemory(GB, GB, 0), utilization=0.8)
    assert larger_budget(budget, GB, 0.4 * GB) == (
        "As it is, 1.25 GB have to be there, of which 80% are used (--memory-utilization)."
    )
    assert make_budget(DeviceMemory(5 * GB // 4, 2 * GB, 0), utilization=0.8).usable_bytes == GB
