"""The plan of a run as it goes on: by prediction, by budget, by what ran out; numbers by hand."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from grpo.memory import (
    AdaptiveMemory,
    Budget,
    DoesNotFit,
    MemoryMonitor,
    PhaseSpec,
    Predictor,
    ProcessMemory,
    Shape,
    predictor,
)
from grpo.memory.adaptive import COOLDOWN_STEPS
from grpo.memory.budget import GB, DeviceMemory
from grpo.memory.monitor import MemoryReading, PhaseReading
from grpo.memory.phase import KEPT, OUTSIDE, Footprint, Slack
from grpo.memory.process import NO_SLACK

G, BATCH = 4, 64
ROOMY = 10_000


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What predictions state before anything is measured: round numbers."""
    monkeypatch.setattr(predictor, "UNCALIBRATED_ERROR", 0.05)
    monkeypatch.setattr(predictor, "LEAST_ERROR_BYTES", 0.0)


class StubMonitor(MemoryMonitor):
    """Measures what it is told to."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.next, self.ours_bytes, self.gaps = PhaseReading(), 160, 0
        self.asked_exact: list[bool] = []

    @contextmanager
    def phase(self, *, exact: bool = False) -> Iterator[PhaseReading]:
        self.asked_exact.append(exact)
        yield self.next

    def read(self) -> MemoryReading:
        return MemoryReading("CPU", 7, 8, 9)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(10_000, 9_000, self.ours_bytes)

    def in_use_bytes(self) -> int:
        return 160

    def gap_bytes(self) -> int:
        return self.gaps

    def neighbours(self) -> str:
        return "process 17 uses 3.00 GB"


def learned(shape: Shape) -> float:
    """All rows at once: 10 bytes a row. In parts: 20 more, for the gradients of the parts before."""
    return 10.0 * shape.rows


def shrink(phase: str, missing_bytes: float) -> str:
    return f"Shrink {phase} by {missing_bytes:g}."


class Run:
    """A memory with one phase, "learn", and handles on its surroundings.

    100 bytes exist all along and 50 are not torch's, so the peak is 150 + 10 a row, or 170 + 10 a row
    in parts, where nothing was measured yet with 5 % of what the phase adds as error.
    """

    def __init__(
        self, *, rows: int | None = None, usable: int = ROOMY, bias: float = 1.0, slack: Slack = NO_SLACK
    ) -> None:
        self.monitor, self.usable, self.fits_at_most = StubMonitor(), usable, BATCH
        self.tried: list[int] = []
        self.undone = 0
        fits = {"learn": learned, "learn split": lambda shape: learned(shape) + 20}
        self.predictor = Predictor(fits, bias=bias)
        process = ProcessMemory(
            {"learn": PhaseSpec("learn", "learn split", rows)}, self.predictor, self.monitor,
            resident=lambda: {"weights": 100}, batch_size=BATCH, overhead_bytes=50, slack=lambda phase: slack,
        )  # fmt: skip
        self.memory = AdaptiveMemory(
            process, self.monitor, budget=lambda: Budget(self.usable, "test"), group_size=G, advice=shrink
        )

    def replan(self, steps: int = 1) -> int:
        for _ in range(steps):
            plan = self.memory.replan(30, 20)
        return plan["learn"].rows

    def work(self, rows: int) -> str:
        self.tried.append(rows)
        if rows > self.fits_at_most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows}.00 GiB.")
        return f"done by {rows}"

    def undo(self) -> None:
        self.undone += 1

    def step(self) -> int:
        """Plan and run a step; rows it was done with."""
        self.replan()
        result = self.memory.run(
            "learn", self.work, shapes=lambda rows, _: [Shape(rows, 30, 20)], undo=self.undo
        )
        assert result == f"done by {self.tried[-1]}"
        return self.tried[-1]


def test_parts_may_need_what_the_phase_is_planned_to_and_no_more():
    """All 64 at once need 640 bytes; parts need 20 besides their own."""
    run = Run()
    run.replan()
    assert run.memory.is_planned_for("learn", [Shape(8, 30, 20), Shape(56, 30, 20)])
    assert run.memory.is_planned_for("learn", [Shape(64, 30, 20)])
    assert not run.memory.is_planned_for("learn", [Shape(8, 30, 20), Shape(63, 30, 20)])


def changes(logged: list[str]) -> list[str]:
    return [line.removeprefix("INFO plan: ") for line in logged if line.startswith("INFO plan: ")]


# -------------------------------------------------------------------------------------- planning


@pytest.mark.parametrize(
    ("usable", "rows"),
    [
        (ROOMY, 64),
        (150 + 640 + 32, 64),  # 640 bytes and their error
        (150 + 640 + 31, 32),  # two parts
        (150 + 357, 32),  # (320 + 20) * 1.05, and 150
        (150 + 356, 24),  # 28 fit: three parts are as few with 24
        (150 + 63, 4),  # (40 + 20) * 1.05
        (150 + 62, 2),
        (150 + 32, 1),  # 31.5
    ],
)
def test_the_first_plan_by_hand(usable: int, rows: int):
    assert Run(usable=usable).replan() == rows


def test_what_an_allocator_keeps_is_planned_for_until_a_step_shows_how_much_it_is():
    """A quarter of the 640, give or take a tenth and 7 bytes; then the 96 that were seen, half as unsure."""
    run = Run(slack=Slack(0.25, 0.1, 7))
    footprint = run.memory.footprint("learn", Shape(64, 30, 20))
    assert (footprint.parts[KEPT], footprint.error_bytes) == (160, math.hypot(32, 64, 7))
    run.monitor.next = PhaseReading(process_bytes=150 + 640 + 96)
    run.step()
    run.replan()
    footprint = run.memory.footprint("learn", Shape(64, 30, 20))
    assert (footprint.parts[KEPT], footprint.error_bytes) == (pytest.approx(96), math.hypot(32, 32, 7))
    assert run.memory.process.footprint("learn", Shape(64, 30, 20), refined=False).parts[KEPT] == 160


def test_what_the_largest_phase_needed_stays_with_the_process():
    run = Run(slack=Slack(0.0, 0.0))
    small, large = (
        Footprint({"weights": 100.0, OUTSIDE: 50.0}, 5),
        Footprint({"weights": 100.0, KEPT: 200.0}, 1),
    )
    lasting = run.memory.process.lasting({"small": small, "large": large})
    assert lasting["small"] == Footprint({"weights": 100.0, OUTSIDE: 50.0, KEPT: 150.0}, 1)
    assert lasting["large"] == large


def test_between_what_others_added_some_is_kept():
    """A tenth of the 40 bytes that the smaller one adds comes to the larger, and lasts."""
    run = Run(slack=Slack(0.0, 0.0, 2, share_of_others=0.1))
    footprints = {
        "small": Footprint({"weights": 100.0, "cache": 40.0}),
        "learn": Footprint({"weights": 300.0}),
    }
    lasting = run.memory.process.lasting(footprints)
    assert [lasting[phase].peak_bytes for phase in ("small", "learn")] == [304, 304]


class Left:
    """What a phase leaves, as far as its memory minds it."""

    def __init__(self) -> None:
        self.nbytes, self.trimmed, self.released = 0, [], 0

    @property
    def largest_nbytes(self) -> int:
        return self.nbytes

    def trim(self, room: float) -> None:
        self.trimmed.append(room)

    def release(self) -> None:
        self.nbytes, self.released = 0, self.released + 1


@pytest.mark.parametrize(("usable", "left"), [(ROOMY, 64), (900, 0)])
def test_what_a_phase_leaves_stays_where_others_have_room_beside_it(usable: int, left: int):
    """A byte a row of sampling. Learning takes 150 + 640 + 5 % of the 640: 64 more are too much for 855."""
    kept, monitor = Left(), StubMonitor()
    phases = {
        "sample": PhaseSpec("sample", "sample", keeps=lambda shape: shape.rows),
        "learn": PhaseSpec("learn", "learn"),
    }
    predictor = Predictor({"sample": lambda shape: 2.0 * shape.rows, "learn": learned})
    process = ProcessMemory(
        phases, predictor, monitor, resident=lambda: {"weights": 100}, batch_size=BATCH, overhead_bytes=50
    )
    budget = Budget(usable if left else 855, "test")
    memory = AdaptiveMemory(process, monitor, budget=lambda: budget, group_size=G, advice=shrink, kept=kept)
    for _ in range(2):  # what is left changes nothing in the next plan
        plan = memory.replan(30, 20)
        assert [plan[phase].rows for phase in phases] == [64, 64] and process.left_bytes == left
        assert plan["learn"].footprint.peak_bytes == 150 + 640 + left
        assert plan["sample"].footprint.peak_bytes == 150 + 128 + left
    assert kept.released == (0 if left else 2)

    kept.nbytes = 28
    for phase in phases:
        monitor.next = PhaseReading(added_bytes=100)
        memory.run(phase, lambda rows: None, shapes=lambda rows, _: [Shape(rows, 30, 20)])
    assert [record.added_bytes for record in memory.take_records()] == [128, 100]
    assert kept.trimmed == [left]

    def fails(rows: int) -> None:
        if not kept.released > released:
            raise MemoryError

    released = kept.released
    memory.run("learn", fails, shapes=lambda rows, _: [Shape(rows, 30, 20)])
    assert kept.released == released + 1


def test_gaps_that_were_there_are_held_unless_the_phase_fills_them():
    run = Run()
    process = ProcessMemory(
        run.memory.phases, run.predictor, run.monitor, resident=lambda: {"weights": 100}, batch_size=BATCH,
        overhead_bytes=50, gap_bytes=300, slack=lambda phase: Slack(0.25, 0.0),
    )  # fmt: skip
    assert process.footprint("learn", Shape(8, 30, 20)).parts[KEPT] == 300 - 100  # 80, and 20 in parts
    assert process.footprint("learn", Shape(64, 30, 20)).parts[KEPT] == 160


def test_rows_stay_when_completions_get_shorter():
    """What a long step has left is not what a short one needs: 850 bytes are held for 80 that are added."""
    run = Run(usable=1000)
    for rows, before, held in ((BATCH, 160, 860), (6, 860, 860), (6, 860, 861), (2, 861, 861)):
        assert run.replan() == BATCH
        run.monitor.next = PhaseReading(process_before_bytes=before, process_bytes=held)
        run.memory.run("learn", lambda _: None, shapes=lambda _, __, rows=rows: [Shape(rows, 30, 20)])
    assert run.replan() == BATCH
    assert run.memory.plan["learn"].footprint.parts[KEPT] == pytest.approx(860 - 150 - 640)  # of the longest


def test_a_heap_of_fixed_size_counts_from_the_start_under_a_limit():
    """640 bytes for all rows: shapes that need less change nothing, and nothing is learned from it."""
    run = Run(slack=Slack(0.25, 0.1, 7))
    run.monitor.counts_private = True
    run.replan()
    assert run.memory.worst()["learn"].peak_bytes == 150 + 640 + 160
    asked: list[int] = []
    run.memory.reserve(asked.append)
    assert asked == [640]
    (expected,) = run.memory.expected({"learn": [Shape(8, 30, 20), Shape(16, 30, 20)]}).values()
    assert (expected.peak_bytes, expected.error_bytes) == (150 + 640, 7)
    run.monitor.next = PhaseReading(process_bytes=150 + 700)
    run.step()
    run.replan()
    assert run.memory.plan["learn"].footprint.parts[KEPT] == 160


def test_a_heap_of_fixed_size_counts_as_it_is_touched_where_only_that_counts():
    """1000 bytes with 360 in gaps, into which all fits or nothing; at worst nothing."""
    run = Run(slack=Slack(0.25, 0.1, 7))
    run.monitor.gaps = 1000 - 10  # 10 are held already
    run.replan()
    run.memory.reserve(lambda size: None)
    worst = run.memory.worst()["learn"]
    assert worst.upper_bytes == pytest.approx(150 + 640 + 160 + math.hypot(32, 64, 7) + 360)
    (expected,) = run.memory.expected({"learn": [Shape(16, 30, 20)]}).values()  # 180 bytes, and a quarter
    error = math.hypot(9, 18, 7)
    assert expected.peak_bytes - expected.error_bytes == pytest.approx(150 + 225 - error)
    assert expected.upper_bytes == pytest.approx(150 + 225 + error + 360)


def test_what_the_system_does_not_let_it_have_is_no_worst_case():
    run = Run(slack=Slack(0.25, 0.1, 7), usable=1030)
    run.monitor.counts_private, run.monitor.ours_bytes = True, 150 + 640 + 100
    run.replan()
    run.memory.reserve(lambda size: None)
    worst = run.memory.worst()["learn"]
    assert (worst.peak_bytes, worst.upper_bytes) == (150 + 640 + 160, 1030)


def test_a_record_has_what_was_said_beforehand_whatever_was_measured_since():
    """640 and a quarter at most; of the 16 rows that came 180 and 45. Fewer later are expected no less."""
    run = Run(slack=Slack(0.25, 0.1, 7))
    run.replan()
    run.memory.promise()
    for rows, measured in ((16, 900), (4, 905)):
        run.monitor.next = PhaseReading(process_bytes=measured, added_bytes=400)
        run.replan()
        run.memory.run("learn", lambda _: None, shapes=lambda _, __, rows=rows: [Shape(rows, 30, 20)])
    for record in run.memory.take_records():
        assert record.worst_bytes == int(150 + 640 + 160 + math.hypot(32, 64, 7))
        assert record.expected_bytes == 150 + 180 + 45
        assert record.expected_error_bytes == int(math.hypot(9, 18, 7))


def test_a_footprint_says_what_the_peak_consists_of():
    run = Run()
    parts = {"logits": 100, "gradients": 60}
    run.memory.phases["learn"] = PhaseSpec("learn", "learn split", parts=lambda shape: parts)
    whole = run.memory.footprint("learn", Shape(64, 30, 20))
    assert whole.parts == {
        "weights": 100,
        "logits": 100,
        "gradients": 60,
        "activations": 480,
        KEPT: 0,
        OUTSIDE: 50,
    }
    assert (whole.peak_bytes, whole.error_bytes) == (790, 32)
    small = run.memory.footprint("learn", Shape(6, 30, 20))  # adds 80, less than the closed forms say
    assert small.parts == {
        "weights": 100,
        "logits": 50,
        "gradients": 30,
        "activations": 0,
        KEPT: 0,
        OUTSIDE: 50,
    }


def test_what_is_not_torchs_is_measured_at_the_start_unless_it_is_known():
    process = ProcessMemory(
        {"learn": PhaseSpec("learn", "learn")}, Predictor({"learn": learned}), StubMonitor(),
        resident=lambda: {"weights": 100}, batch_size=BATCH,
    )  # fmt: skip
    assert process.footprint("learn", Shape(1, 1, 1)).parts[OUTSIDE] == 160 - 100


@pytest.mark.parametrize(("fixed", "rows"), [(8, 8), (7, 4), (3, 2), (1, 1), (48, 32), (64, 64), (999, 64)])
def test_rows_that_the_user_fixed_are_never_exceeded(fixed: int, rows: int):
    assert Run(rows=fixed).replan() == rows


def test_rows_that_the_user_fixed_give_way_to_the_budget():
    run = Run(rows=16, usable=150 + 63)
    assert run.step() == 4
    run.usable = ROOMY
    assert run.step() == 16


def test_the_largest_batch_in_one_piece_does_not_carry_gradients_of_parts_before():
    run = Run()

    def largest(usable: int, batch_size: int = 1000) -> int:
        return run.memory.largest_whole("learn", Budget(usable, "test"), batch_size, 30, 20)

    assert largest(ROOMY) == 936  # 150 + 9828; 940 would need 150 + 9870
    assert largest(150 + 42) == 4
    assert largest(150 + 41) == 0  # not a whole group
    assert largest(ROOMY, batch_size=50) == 48


def test_when_the_budget_changes_so_does_the_plan_with_one_line_each(logged: list[str]):
    """Another process takes memory, and gives it back."""
    run = Run()
    assert [run.step(), run.step()] == [64, 64]
    run.usable = 150 + 357
    assert [run.step(), run.step()] == [32, 32]
    run.usable = ROOMY
    assert run.step() == 64
    assert changes(logged) == [
        "learn 64 -> 32 rows at once: predictions with their error exceed: 0.00 GB (test)",
        "learn 32 -> 64 rows at once: room for more: 0.00 GB (test)",
    ]
    reasons = [record.reason for record in run.memory.take_records()]
    assert reasons[0] is reasons[1] is reasons[3] is None
    assert reasons[2].startswith("64 -> 32: ") and reasons[4].startswith("32 -> 64: ")


def test_longer_rows_are_planned_for_as_they_come():
    run = Run(usable=1000)
    run.predictor._fits["learn"] = lambda shape: shape.rows * shape.prompt_tokens / 3.0
    assert run.memory.replan(30, 20)["learn"].rows == 64
    assert run.memory.replan(60, 20)["learn"].rows == 32


def test_when_not_one_row_fits_the_message_has_the_neighbours_and_the_advice():
    with pytest.raises(DoesNotFit) as error:
        Run(usable=100).replan()  # of 170, and 10 for the row
    assert str(error.value) == (
        "learn does not fit: one row needs 0 MB (weights 0 MB, activations 0 MB, not torch 0 MB), "
        "and there are 0.00 GB (test). On the card: process 17 uses 3.00 GB. Shrink learn by 81.5. "
        "As it is, 0.01 GB have to be there."
    )


@pytest.mark.parametrize(
    "usable, reason, ends",
    [
        (100, "--memory-limit", "Shrink learn by 81.5. As it is, --memory-limit has to be at least 0.01GB."),
        (
            50,
            "--memory-limit",
            "GB. This process alone takes 0 MB: --memory-limit has to be at least 0.01GB.",
        ),
        (50, "test", "GB. This process alone takes 0 MB: 0.01 GB have to be there."),
    ],
)
def test_where_a_limit_or_the_process_itself_is_in_the_way_the_message_says_so(usable, reason, ends):
    run = Run()
    with pytest.raises(DoesNotFit) as error:
        run.memory.plan_one("learn", Budget(usable, reason), BATCH, 30, 20)
    assert str(error.value).endswith(ends)


# ------------------------------------------------------------------------------- running out of memory


def test_out_of_memory_shrinks_the_plan_with_one_line_and_its_reason(logged: list[str]):
    run = Run()
    run.fits_at_most = 20
    assert run.step() == 16
    assert run.tried == [64, 64, 32, 16] and run.undone == 3
    assert run.step() == 16 and run.tried[4:] == [16]
    reason = "out of memory, replayed (OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB.)"
    assert changes(logged) == [f"learn 64 -> 16 rows at once: {reason}"]
    first, second = run.memory.take_records()
    assert (first.rows, first.retries, first.reason) == (16, 3, f"64 -> 16: {reason}")
    assert (second.rows, second.retries, second.reason) == (16, 0, None)


def test_what_passes_at_the_same_size_changes_no_plan(logged: list[str]):
    run = Run()
    run.fits_at_most = 0

    def fails_once(rows: int) -> str:
        try:
            return run.work(rows)
        finally:
            run.fits_at_most = 64

    run.replan()
    run.memory.run("learn", fails_once, shapes=lambda rows, _: [Shape(rows, 30, 20)])
    assert run.tried == [64, 64] and run.memory.take_records()[0].retries == 1
    assert run.replan() == 64 and not changes(logged)


def test_after_a_cooldown_more_rows_are_tried_and_it_doubles_when_that_fails(logged: list[str]):
    run = Run()
    run.fits_at_most = 32
    assert run.step() == 32  # step 1
    for _ in range(COOLDOWN_STEPS - 1):
        assert run.step() == 32
    run.tried.clear()
    assert run.step() == 32 and run.tried == [64, 64, 32]  # step 21: tried again, in vain
    for _ in range(2 * COOLDOWN_STEPS - 1):
        assert run.step() == 32
    run.fits_at_most = 64
    assert run.step() == 64
    assert run.step() == 64
    assert [line.split(" rows")[0] for line in changes(logged)] == [
        "learn 64 -> 32", "learn 32 -> 64", "learn 64 -> 32", "learn 32 -> 64",
    ]  # fmt: skip
    assert "room for more" in changes(logged)[-1]


def test_while_it_rests_a_tighter_budget_still_counts():
    run = Run()
    run.fits_at_most = 32
    run.step()
    run.usable = 150 + 63
    assert run.step() == 4
    run.usable = ROOMY
    assert run.step() == 32  # and what ran out of memory is not tried again yet


def test_where_rows_are_not_to_blame_few_of_them_show_and_the_plan_is_halved():
    """As many bytes are asked for with fewer rows: a group is tried at once, and half the next time."""
    run = Run()

    def work(rows: int) -> None:
        run.tried.append(rows)
        if rows > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for tried in ([64, 64, 32, 4], [16, 16, 8]):
        run.replan()
        run.tried.clear()
        run.memory.run("learn", work, shapes=lambda rows, _: [Shape(rows, 30, 20)])
        assert run.tried == tried


def test_when_even_one_row_runs_out_of_memory_the_message_says_what_to_do():
    run = Run()
    run.fits_at_most = 0
    with pytest.raises(DoesNotFit) as error:
        run.step()
    assert run.tried == [64, 64, 32, 16, 8, 4, 2, 1]
    said = str(error.value)
    assert said.startswith("learn does not fit: memory ran out with 64, 64, 32, 16, 8, 4, 2, 1 rows at once")
    assert said.endswith("On the card: process 17 uses 3.00 GB.")


def test_any_other_error_is_nobodys_business_here():
    run = Run()
    run.replan()

    def broken(rows: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.memory.run("learn", broken, shapes=lambda rows, _: [])
    assert run.memory.take_records() == []


# ------------------------------------------------------------------------------- measuring


def test_a_record_holds_what_was_planned_and_what_was_measured():
    run = Run(usable=150 + 357)
    run.monitor.next = PhaseReading(
        added_bytes=300, peak_bytes=500, reserved_bytes=520, process_bytes=540, process_before_bytes=10
    )
    run.replan()
    kv_growth: list[tuple[int, int]] = []

    def work(rows: int) -> None:
        kv_growth.extend([(1, 40), (9, 90), (17, 60)])

    shapes = [Shape(24, 30, 20), Shape(32, 25, 18), Shape(8, 30, 20)]
    run.memory.run("learn", work, shapes=lambda rows, _: shapes, kv_growth=kv_growth)
    (record,) = run.memory.take_records()
    assert json.loads(json.dumps(record.as_dict())) == {
        "phase": "learn", "rows": 32, "prompt_tokens": 25, "new_tokens": 18,  # the largest of the parts
        "worst_bytes": 150 + 357, "expected_bytes": 150 + 340, "expected_error_bytes": 17,
        "predicted_bytes": 150 + 340, "predicted_added_bytes": 340, "process_before_bytes": 10,
        "added_bytes": 300, "peak_bytes": 500, "reserved_bytes": 520,
        "device_used_bytes": 540, "allocated_bytes": 7, "kv_bytes": 90,
        "kv_growth": [[1, 40], [9, 90], [17, 60]], "retries": 0, "reason": None,
    }  # fmt: skip
    assert run.memory.take_records() == []


def test_where_the_allocator_gave_nothing_back_the_prediction_is_what_was_held_before():
    run = Run()
    run.monitor.next = PhaseReading(process_before_bytes=5000)
    run.step()
    assert run.memory.take_records()[0].predicted_bytes == 5000


@pytest.mark.parametrize(("rows", "counted"), [(BATCH, True), (BATCH // 4, True), (BATCH // 8, False)])
def test_tensors_are_counted_in_the_first_two_runs_of_a_phase_unless_it_is_done_in_many_parts(rows, counted):
    run = Run(rows=rows)
    for _ in range(4):
        run.step()
    assert run.monitor.asked_exact == [counted, counted, False, False]


def test_what_was_measured_corrects_the_next_plan():
    """Half of what was predicted, so twice the rows fit."""
    run = Run(usable=150 + 357)
    run.monitor.next = PhaseReading(added_bytes=170)
    assert [run.step(), run.step()] == [32, 32]  # whole it was not measured: 640 predicted
    run.monitor.next = PhaseReading(added_bytes=None)
    run.usable = 150 + 150
    assert run.step() == 24  # (240 + 20) / 2, and the error is 1.7 % with two measurements
    assert run.memory.footprint("learn", Shape(24, 30, 20)).error_bytes == pytest.approx(130 * 0.05 / 3)


def test_a_prediction_far_too_low_is_mended_by_what_is_measured(logged: list[str]):
    run = Run(usable=150 + 357, bias=0.5)
    assert run.replan() == 64  # 320 predicted
    run.fits_at_most = 32
    run.monitor.next = PhaseReading(added_bytes=340)
    assert run.step() == 32
    run.monitor.next = PhaseReading(added_bytes=None)
    assert run.step() == 32
    assert run.memory.footprint("learn", Shape(32, 30, 20)).peak_bytes == pytest.approx(150 + 340)


def test_what_the_process_holds_beyond_tensors_counts_from_the_next_step_on():
    """As measured where tensors were most; it is never believed to shrink."""
    run = Run()
    for process in (150 + 640, 150 + 640 + 70, 150 + 640):
        run.monitor.next = PhaseReading(process_bytes=process)
        run.step()
    run.replan()
    assert run.memory.plan["learn"].footprint.parts[KEPT] == pytest.approx(70)


def test_a_phase_that_is_only_watched_is_recorded_too():
    run = Run()
    run.replan()
    run.monitor.next = PhaseReading(process_bytes=123)
    with run.memory.watch("learn"):
        pass
    (record,) = run.memory.take_records()
    assert (record.phase, record.rows, record.device_used_bytes) == ("learn", 64, 123)
    with pytest.raises(ZeroDivisionError), run.memory.watch("learn"):
        raise ZeroDivisionError
    assert run.memory.take_records() == []


# -------------------------------------------------------------------------------------- checkpoints


def stored(run: Run) -> dict:
    return json.loads(json.dumps(run.memory.state()))


def test_what_was_measured_goes_on_after_a_checkpoint():
    run, other = Run(usable=150 + 357), Run(usable=150 + 357)
    run.monitor.next = PhaseReading(added_bytes=306)
    for _ in range(3):
        run.step()
    other.replan()
    other.memory.restore(stored(run))
    shape = Shape(32, 30, 20)
    assert other.memory.footprint("learn", shape) == run.memory.footprint("learn", shape)
    other.step()
    assert other.monitor.asked_exact == [False]  # counted often enough, before


def test_a_plan_that_is_another_after_a_checkpoint_is_one_line(logged: list[str]):
    run, other = Run(), Run(usable=150 + 357)
    run.replan()
    other.replan()
    other.memory.restore(stored(run))
    assert changes(logged) == ["learn 64 -> 32 rows at once: resumed with a budget of 0.00 GB (test)"]
    same = Run()
    same.replan()
    same.memory.restore(stored(run))
    assert len(changes(logged)) == 1


def test_a_budget_reads_in_gb():
    assert str(Budget(3 * GB // 2, "85% of 1.76 GB")) == "1.50 GB (85% of 1.76 GB)"


def test_a_phase_needs_no_settings_but_its_names():
    spec = PhaseSpec("learn", "learn split")
    parts: Callable[[Shape], object] = spec.parts
    assert spec.rows is None and parts(Shape(1, 1, 1)) == {}
