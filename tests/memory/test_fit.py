"""Rows at once: measured, planned, kept to, and after running out of memory fewer; numbers by hand."""

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from several_processes import in_processes, values

from grpo.memory import Budget, Device, DoesNotFit, Fit, PassSize, largest_rows
from grpo.memory.device import Peak
from grpo.memory.fit import AGAIN_AFTER, Pass
from grpo.memory.formula import MEASUREMENTS_PER_SIZE, Formula
from grpo.memory.rows import even_rows, num_tokens, smaller_rows

pytestmark = pytest.mark.usefixtures("frozen")
G, BATCH, ROOMY = 4, 64, 10_000
MB = 2**20
GROUPS = st.integers(1, 16)
BYTES = st.floats(0, 1e6)


class Meter:
    """A device where 150 bytes are held; a pass adds `base`, and 10 bytes a row.

    capacity: bytes beyond which a pass runs out of memory, whatever the budget says. process: what it holds
    before a pass and at its peak.
    """

    def __init__(self, usable: int = ROOMY, *, row: float = 10, slack: float = 0.0) -> None:
        self.usable, self.row, self.slack, self.capacity = usable, row, slack, math.inf
        self.base, self.counts, self.process = 0.0, True, (150, 150)
        self.tried, self.asked_exact = list[int](), list[bool]()
        self.budget = lambda: Budget(self.usable, "test")
        self.used_bytes, self.neighbours = lambda: 150, lambda: ""
        self.room_bytes = lambda: self.budget().usable_bytes - 150

    @contextmanager
    def measure(self, *, exact: bool) -> Iterator[Peak]:
        self.asked_exact.append(exact)
        peak = Peak(used_before_bytes=150, process_before_bytes=self.process[0])
        yield peak
        peak.process_bytes = self.process[1]
        peak.added_bytes = int(self.added) if self.counts else None

    def work(self, rows: int, tokens: int = 1) -> int:
        self.tried.append(rows)
        self.added = self.base + self.row * rows * tokens
        if 150 + self.added > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return rows

    def fit(self, *sizes: int, **options) -> Fit:
        """That has seen so many rows."""
        fit = Fit(self, **{"group_size": G, **options})
        for rows in sizes:
            fit.see("learn", PassSize(rows), self.base + self.row * rows)
        return fit

    def steps(self, fit: Fit, count: int, batch: int = BATCH) -> list[int]:
        return [fit.run("learn", self.work, PassSize(batch)) for _ in range(count)]


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def fit(meter: Meter) -> Fit:
    return meter.fit(G, BATCH)


def changes(logged: list[str]) -> list[str]:
    return [line.removeprefix("INFO plan: ") for line in logged if line.startswith("INFO plan: ")]


# ------------------------------------------------------------------------------- rows that fit


def test_sizes_to_try_halve_by_whole_groups_and_then_divide_the_group():
    for group_size, sizes in {8: [56, 24, 8, 4, 2, 1], 12: [20, 12, 6, 4, 3, 2, 1], 1: [7, 3, 1]}.items():
        assert [smaller_rows(rows, group_size) for rows in sizes] == [*sizes[1:], None]
    assert num_tokens(PassSize(10, 5, 7), 4) == 10 * 5 + 3 * 7  # three groups, the last of two rows


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
    assert even <= rows and even % group_size == 0 and math.ceil(batch_size / even) == passes
    assert even == group_size or math.ceil(batch_size / (even - group_size)) > passes
    assert even_rows(3, batch_size=12, group_size=6) == 3  # parts of a group stay as they are


# ------------------------------------------------------------------------------------ the formula


@given(a=BYTES, b=BYTES, c=BYTES, rows=st.integers(1, 500), tokens=st.integers(1, 500))
def test_bytes_that_are_affine_in_rows_and_tokens_are_found(a, b, c, rows, tokens):
    """To half a percent: a little is given for the simplest explanation."""
    formula, scale = Formula(), a + 200 * b + 20_000 * c
    for R, T in ((4, 10), (8, 10), (8, 200), (200, 10), (100, 200)):
        formula.see(R, R * T, a + b * R + c * R * T)
    size = a + b * rows + c * rows * tokens
    assert formula(rows, rows * tokens) == pytest.approx(size, rel=0.01, abs=0.005 * scale)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**12)), min_size=1))
def test_whatever_was_seen_no_bytes_are_negative_and_more_rows_take_no_less(seen):
    formula = Formula()
    with pytest.raises(ValueError, match="nothing was measured"):
        formula(1, 1)
    for rows, tokens, num_bytes in seen:
        formula.see(rows, rows * tokens, num_bytes)
    told = [formula(rows, 50 * rows) for rows in (1, 2, 10, 100, 1000)]
    # Beside what was seen the formula is corrected by 1.25 at most, up or down.
    assert told[0] >= 0 and all(more >= less / 1.25**2 for less, more in pairwise(told))
    assert len(formula.seen) <= len(seen)


def test_what_was_seen_itself_is_not_estimated():
    """Peaks bend: 40 rows and 48 are alike, and one of them is not corrected by the other."""
    formula = Formula()
    for rows, size in ((8, 80), (40, 400), (48, 470)):
        formula.see(rows, 10 * rows, size)
    assert formula(48, 480) == pytest.approx(470) and formula(40, 400) == pytest.approx(400)


def test_one_size_is_taken_for_its_tokens_and_of_sizes_alike_the_newest_count():
    formula = Formula()
    for _ in range(20):
        formula.see(4, 40, 160)
    for _ in range(MEASUREMENTS_PER_SIZE):
        formula.see(4, 41, 82)
    assert [formula(4, 41), formula(16, 164)] == pytest.approx([82, 328], rel=0.01)


def test_a_peak_that_bends_is_approached_in_steps(meter):
    """The larger of two moments, 400 + 2 R and 10 R: what is seen of few rows is too little for many."""
    meter.usable, meter.row, fit = 150 + 1500, 0, meter.fit()

    def work(rows: int) -> int:
        meter.base = max(400 + 2 * rows, 10 * rows)
        return meter.work(rows)

    found = [fit.run("learn", work, PassSize(1000)) for _ in range(9)]
    assert found[:3] == [4, 8, 32] and found[3] <= 128
    assert 120 <= found[-1] <= 150 and found[-1] == found[-2]


# ------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("room", "fixed", "rows"),
    [
        (10_000, None, 64),
        (645, None, 64),
        (635, None, 32),  # two parts
        (285, None, 24),  # 28 fit: three parts are as few with 24
        (45, None, 4),
        (35, None, 2),
        (15, None, 1),
        (5, None, 1),  # which the pass itself has to show
        # what a person wants is a ceiling, and gives way to what fits
        (10_000, 2, 2),
        (10_000, 48, 48),
        (10_000, 999, 64),
        (45, 16, 4),
    ],
)
def test_the_plan_by_hand_where_a_row_takes_ten_bytes(room: int, fixed: int | None, rows: int):
    fit = Meter(150 + room).fit(G, BATCH, fixed={} if fixed is None else {"learn": fixed})
    assert fit.plan("learn", PassSize(BATCH)) == rows == fit.planned()["learn"]


@given(size=GROUPS, groups=st.integers(1, 40), base=BYTES, row=st.floats(1, 1e4), room=st.floats(0, 1e7))
def test_planned_rows_are_the_most_that_fit_in_even_parts(size, groups, base, row, room):
    meter, batch = Meter(int(room) + 150, row=row), groups * size
    meter.base = base
    fit = meter.fit(*{1, size, batch}, group_size=size)
    sizes = [part for part in range(1, size) if size % part == 0] + [*range(size, batch + 1, size)]
    needs = {rows: fit.needs("learn", PassSize(rows)) for rows in sizes}
    # Between sizes that were measured it is right to a thousandth, and so need not rise with each row.
    assume(all(abs(need - fit.room_bytes()) > 1e-3 * need for need in needs.values()))
    fitting = [rows for rows, need in needs.items() if need <= fit.room_bytes()]
    for _ in range(3):  # one more where all is taken to grow with rows
        found = fit.plan("learn", PassSize(batch))
    assert found == even_rows(max(fitting, default=1), batch_size=batch, group_size=size)
    assert not fitting or fit.needs("learn", PassSize(found)) <= fit.room_bytes()


def test_rows_grow_as_they_are_seen_to_fit(meter):
    """A group, twice as many, then four times as many; where not all fit, evenly."""
    assert meter.steps(meter.fit(), 5, batch=400) == [4, 8, 32, 100, 400]
    assert meter.steps(meter.fit(), 4, batch=8) == [4, 8, 8, 8]
    meter.usable = 150 + 880
    assert meter.steps(meter.fit(), 5, batch=400) == [4, 8, 32, 80, 80]  # 88 fit: five passes either way
    # Of 870 bytes gradients take 400, so that twice the rows seem not to fit, and do: half as many tell.
    meter.base, meter.usable = 400, 150 + 870
    assert meter.steps(meter.fit(), 5, batch=24) == [4, 2, 12, 24, 24]


def test_what_is_left_of_a_batch_does_not_settle_the_plan(meter):
    """A batch in parts, of which each is planned for what is left: 24 rows as 4, 8 and 12."""
    fit, left, taken = meter.fit(), 24, []
    while left:
        taken.append(fit.run("learn", meter.work, PassSize(left)))
        left -= taken[-1]
    assert taken == [4, 8, 12] and meter.steps(fit, 2, batch=24) == [24, 24]
    assert meter.steps(fit, 3, batch=400) == [80, 200, 400]  # a larger batch than any before


def test_rows_follow_the_tokens_of_which_only_the_result_may_tell(meter):
    """Texts are planned for the 10 tokens, and 2 for each group, that there may be, and have 5."""
    fit, meter.usable = meter.fit(), 150 + 8800
    took, longest = (lambda rows, _: PassSize(rows, 5, 2)), PassSize(400, 10, 2)
    found = [fit.run("sample", lambda rows: meter.work(rows, 5), longest, took=took) for _ in range(6)]
    assert found == [4, 8, 32, 80, 80, 80] and fit.take_passes()[-1].tokens == 5 + 2
    assert fit.plan("sample", PassSize(400, 20, 2)) < 50  # twice as long


def test_a_phase_may_begin_with_what_is_known_of_another(meter, fit):
    fit.borrow_formula("evaluate", "learn")
    assert fit.plan("score", PassSize(32)) == G
    meter.row = 20  # as it turns out
    assert fit.run("evaluate", meter.work, PassSize(32)) == 32
    assert fit.take_passes()[0].predicted_bytes == pytest.approx(320, abs=1)
    assert fit.predict("evaluate", PassSize(32)) == pytest.approx(640, rel=0.01)
    assert fit.predict("learn", PassSize(32)) == pytest.approx(320, rel=0.01)


def test_processes_that_have_to_agree_take_as_many_and_do_not_do_it_again(meter):
    fit = meter.fit(sync_rows=lambda rows: min(rows, 16), replays=False)
    assert meter.steps(fit, 4) == [4, 8, 16, 16] and fit.planned() == {"learn": 16}
    meter.capacity = 200
    with pytest.raises(DoesNotFit, match="16 rows"):
        meter.steps(fit, 1)
    assert meter.tried[4:] == [16]


# ------------------------------------------------------------------- rows stay, and change for a reason


def test_memory_that_comes_and_goes_changes_no_rows_as_long_as_they_fit(meter, fit, logged: list[str]):
    for usable in (5_000, 900, 150 + 641, 9_000):
        meter.usable = usable
        assert meter.steps(fit, 2) == [BATCH, BATCH]
    meter.usable = 150 + 330
    assert meter.steps(fit, 2) == [32, 32]
    meter.usable = ROOMY
    assert meter.steps(fit, AGAIN_AFTER) == [*[32] * (AGAIN_AFTER - 2), 64, 64]  # fifty have gone well
    shrunk, grown = changes(logged)
    assert shrunk.startswith("learn 64 -> 32 rows at once: ") and shrunk.endswith("0.00 GB (test)")
    assert grown.startswith("learn 32 -> 64 rows at once: ")
    reasons = [(each.rows, each.reason.split(":")[0]) for each in fit.take_passes() if each.reason]
    assert reasons == [(32, "64 -> 32"), (64, "32 -> 64")]


def test_a_step_of_few_rows_leaves_the_plan_as_it_was_and_longer_texts_do_not(meter, fit, logged):
    meter.usable = 150 + 330
    assert [*meter.steps(fit, 2), *meter.steps(fit, 2, batch=8), *meter.steps(fit, 1)] == [32, 32, 8, 8, 32]
    assert not changes(logged) and fit.plan("learn", PassSize(BATCH, 2)) == 16
    fit.discard_plan("learn")
    assert fit.plan("learn", PassSize(BATCH)) == 32


def test_a_plan_leaves_a_tenth_for_what_a_process_holds_beside_tensors_and_then_stands():
    """640 bytes of tensors, and 64 more. What the process in fact holds then goes up and down by itself."""
    meter = Meter(150 + 700, slack=0.1)
    fit = meter.fit(G, BATCH)
    assert fit.needs("learn", PassSize(BATCH)) == pytest.approx(704, rel=0.01)
    assert meter.steps(fit, 1) == [32]
    meter.usable = 150 + 710
    fit.discard_plan("learn")
    for room, *meter.process in (710, 150, 900), (645, 900, 900), (641, 900, 5000), (700, 150, 5000):
        meter.usable = 150 + room
        assert meter.steps(fit, 1) == [BATCH]
    meter.usable = 150 + 645
    assert meter.steps(fit, AGAIN_AFTER + 1) == [BATCH] * (AGAIN_AFTER + 1)  # planned anew, and no fewer
    meter.usable = 150 + 635  # which not even tensors have room in
    assert meter.steps(fit, 2) == [56, 56]


def test_a_checkpoint_keeps_rows_ceilings_and_all_that_was_seen(logged: list[str]):
    meter = Meter(2000, slack=0.1)
    meter.capacity, meter.process = 500, (150, 500)
    fit, other = meter.fit(G, BATCH), meter.fit(2, 8)
    assert meter.steps(fit, 7)[-1] == 32
    stored = json.loads(json.dumps(fit.state()))
    assert other.plan("learn", PassSize(16)) == 16
    logged.clear()
    other.restore(stored)
    assert len(changes(logged)) == 1 and "32" in changes(logged)[0]
    assert json.loads(json.dumps(other.state())) == stored
    tried = []
    for each in fit, other:
        meter.tried, meter.capacity = [], 500
        meter.steps(each, AGAIN_AFTER)
        meter.capacity = math.inf
        meter.steps(each, 2 * AGAIN_AFTER)
        tried.append(meter.tried)
    assert tried[0] == tried[1] and set(tried[0]) == {32, 64}


# ------------------------------------------------------------------------------ running out of memory


def test_what_runs_out_is_done_again_with_fewer_and_there_are_fewer_afterwards(meter, fit, logged):
    discarded, meter.capacity = [], 150 + 200
    done = fit.run("learn", meter.work, PassSize(BATCH), rollback=lambda: discarded.append(1))
    assert done == 16 and meter.tried == [64, 64, 32, 16] and len(discarded) == 3
    assert meter.steps(fit, 1) == [16] and meter.tried[4:] == [16]
    (line,) = changes(logged)
    assert line.startswith("learn 64 -> 16 rows at once: memory ran out (OutOfMemoryError")
    first, second = fit.take_passes()
    assert (first.rows, first.retries, second.retries) == (16, 3, 0)
    assert first.reason is None and second.reason.startswith("64 -> 16: memory ran out")
    meter.usable = 150 + 45  # a tighter budget still counts
    assert meter.steps(fit, 1) == [4]
    meter.capacity = 0
    with pytest.raises(DoesNotFit, match=r"^learn does not fit: memory ran out with 4, 4, 2, 1"):
        meter.steps(fit, 1)


def test_more_are_tried_after_fifty_that_went_well_and_what_fails_again_is_given_up_again(meter, fit):
    meter.capacity = 150 + 200
    meter.steps(fit, AGAIN_AFTER + 1)
    meter.tried.clear()
    assert meter.steps(fit, 1) == [16] and meter.tried == [32, 32, 16]  # twice as many, in vain
    meter.capacity = math.inf
    assert set(meter.steps(fit, AGAIN_AFTER)) == {16}
    assert set(meter.steps(fit, AGAIN_AFTER)) == {32} and meter.steps(fit, 1) == [64]


@pytest.mark.parametrize(
    ("pattern", "rows"),  # of tries of 64 rows: whether they fail
    [((1, 0), [64, 64, *[32] * 28]), ((1, 0, 0), [64] * 30)],  # with a good one between it is chance
)
def test_a_first_try_that_fails_each_time_is_not_made_for_ever(meter, fit, pattern, rows):
    """Fragments, or a neighbour that comes and goes."""
    fails = itertools.cycle(pattern)

    def work(rows: int) -> int:
        meter.work(rows)
        if rows == BATCH and next(fails):
            raise MemoryError
        return rows

    assert [fit.run("learn", work, PassSize(BATCH)) for _ in range(30)] == rows
    assert len(meter.tried) <= 30 + 15 and (32 not in rows or meter.tried == [64] * 4 + [32] * 28)


# -------------------------------------------------------------------------------------- measuring


def test_a_pass_has_what_was_predicted_before_it_was_measured(meter):
    fit, meter.process, meter.base = meter.fit(), (150, 700), 8
    fit.keeps("learn", SimpleNamespace(nbytes=5, is_oversized=False))
    for grown in ([], [(1, 40), (9, 90)]):
        fit.run("learn", lambda rows: meter.work(rows, 3), PassSize(4, 3, 2), kv_growth=grown)
    first, second = fit.take_passes()
    assert first.predicted_bytes is None and second.predicted_bytes == pytest.approx(133, abs=1)
    line = second.as_dict()
    assert line.pop("seconds") >= 0 and line.pop("predicted_bytes")
    assert line == {
        "phase": "learn",
        "rows": 4,
        "tokens": 5,
        "added_bytes": 8 + 120 + 5,
        "process_bytes": 700,
        "retries": 0,
        "reason": None,
        "kv_growth": [(1, 40), (9, 90)],
    }
    assert (second.shared, second.computed) == (2, 0)
    with pytest.raises(ZeroDivisionError):  # nobody's business here
        fit.run("learn", lambda rows: rows // 0, PassSize(4))
    assert fit.take_passes() == []


def test_what_a_phase_keeps_is_room_for_it_and_for_no_other(meter):
    """640 bytes that stay are part of the 640 that 64 rows need: all of them fit once more."""
    meter.usable, kept = 150 + 700, SimpleNamespace(nbytes=0, is_oversized=False)
    fit = meter.fit(16, BATCH)
    fit.keeps("learn", kept)
    assert meter.steps(fit, 1) == [BATCH]
    kept.nbytes, meter.row = 640, 0  # the next passes add nothing to it
    meter.room_bytes = lambda: meter.usable - 150 - kept.nbytes
    assert meter.steps(fit, 3) == [BATCH] * 3
    assert fit.predict("learn", PassSize(BATCH)) == pytest.approx(640, rel=0.05)
    fit.see("score", PassSize(BATCH), 640)
    assert fit.plan("score", PassSize(BATCH)) < BATCH


def test_a_pass_in_a_part_of_what_is_kept_tells_nothing_of_its_size(meter):
    """A few rows for groups that are sampled again do not take what was kept for many."""
    fit, kept = meter.fit(16, BATCH), SimpleNamespace(nbytes=640, is_oversized=True)
    fit.keeps("learn", kept)
    assert fit.plan("learn", PassSize(400)) == 200  # more are tried later, and passes learned from until then
    meter.steps(fit, 3, batch=G)
    assert {each.added_bytes for each in fit.take_passes()} == {None}
    assert fit.predict("learn", PassSize(G)) == pytest.approx(40, rel=0.05)
    assert meter.steps(fit, 1) == [BATCH]


def test_what_is_measured_corrects_what_was_predicted_until_the_plan_is_settled(meter):
    meter.usable, fit = 150 + 660, meter.fit(G, 16)
    meter.row = 11
    assert meter.steps(fit, 3) == [64, 56, 56]  # 64 have taken 704 of 660
    assert fit.predict("learn", PassSize(BATCH)) == pytest.approx(704, rel=0.01)
    stored = fit.state()["learn"]["seen"]
    meter.row = 30  # of passes no larger than those before
    meter.steps(fit, 5)
    assert fit.state()["learn"]["seen"] == stored and fit.planned() == {"learn": 56}


def test_where_nothing_counts_tensors_the_process_tells_and_only_at_first(meter):
    """Later it may hold what is not this phase's."""
    fit, meter.counts = meter.fit(), False
    for meter.process in (150, 190), (150, 900):
        meter.steps(fit, 1)
        assert fit.predict("learn", PassSize(8)) == pytest.approx(80, rel=0.01)
    assert {each.added_bytes for each in fit.take_passes()} == {None}


def test_tensors_are_counted_in_a_phases_first_pass_and_where_they_are_learned_from(meter, fit):
    meter.steps(fit, 3)
    assert meter.asked_exact == [True, False, False]
    fit.run("learn", lambda rows: meter.work(rows, 2), PassSize(BATCH, 2))  # longer texts
    fit.run("learn", lambda rows: meter.work(rows, 2), PassSize(BATCH, 2))
    assert meter.asked_exact[3:] == [True, False]
    assert fit.predict("learn", PassSize(BATCH, 2)) == pytest.approx(1280, rel=0.01)
    growing = Meter()
    assert growing.steps(growing.fit(), 5) == [4, 8, 32, 64, 64]  # or they could not grow
    assert growing.asked_exact == [True, True, True, True, False]


def test_a_warm_up_takes_fewer_rows_where_so_many_do_not_fit(meter):
    fit, meter.capacity = meter.fit(), 150 + 25
    fit.run("learn", meter.work, PassSize(4), is_warmup=True)
    assert meter.tried == [4, 4, 2] and fit.plan("learn", PassSize(BATCH)) == 2
    assert meter.asked_exact == [True] * 3 and fit.take_passes()[0].retries == 2


def test_a_loop_of_ones_own_is_measured_planned_and_its_errors_go_their_way(meter):
    fit = meter.fit()

    def taken(count: int) -> list[int]:
        found = []
        for _ in range(count):
            with fit.rows("learn", PassSize(BATCH)) as rows:
                found.append(meter.work(rows))
        return found

    assert taken(5) == [4, 8, 32, 64, 64] and meter.asked_exact == [True, True, True, True, False]
    meter.capacity = 500
    with pytest.raises(torch.OutOfMemoryError):
        taken(1)
    meter.capacity = math.inf
    assert taken(AGAIN_AFTER + 1) == [*[32] * AGAIN_AFTER, 64]
    reasons = [each.reason for each in fit.take_passes() if each.reason]
    assert "64 -> 32: memory ran out" in reasons[-2] and reasons[-1].startswith("32 -> 64")
    with pytest.raises(KeyError), fit.rows("learn", PassSize(BATCH)):
        raise KeyError("another")


def two_megabytes_a_row(rank: int) -> tuple[list[Pass], float]:
    """Four passes, and what 64 rows are then said to need."""
    fit = Fit(Device(), group_size=4)
    for _ in range(4):
        fit.run("learn", lambda rows: torch.ones(rows, 2**18).add(1.0).sum(), PassSize(64))
    return fit.take_passes(), fit.needs("learn", PassSize(64))


def test_on_a_cpu_what_the_process_takes_beside_its_tensors_counts():
    """In a process of its own: what other tests freed and kept would play a part."""
    ((passes, needs),) = values(in_processes(1, two_megabytes_a_row))
    assert [each.rows for each in passes] == [4, 8, 32, 64]
    assert [each.added_bytes for each in passes] == [each.rows * 2 * MB for each in passes]
    assert 2 * 64 * MB <= 1.01 * needs < 3 * 64 * MB


def test_what_others_have_no_room_for_is_told_once_and_not_at_each_step(meter, logged):
    """All processes of a sharded model take the rows of the one with least room."""
    fit = meter.fit(16, BATCH, sync_rows=lambda rows: min(rows, 32))
    assert meter.steps(fit, 5) == [32] * 5
    assert len(changes(logged)) <= 1
