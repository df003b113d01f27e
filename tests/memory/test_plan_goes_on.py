"""The plan of a run as it goes on: by prediction, by budget, by what ran out; numbers by hand."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from grpo.memory import AdaptiveMemory, Budget, DoesNotFit, MemoryMonitor, Predictor, Shape, predictor
from grpo.memory.adaptive import COOLDOWN_STEPS
from grpo.memory.budget import DeviceMemory
from grpo.memory.monitor import MemoryReading, PhaseReading
from grpo.memory.phase import KEPT, OUTSIDE, Footprint, PhaseSpec, Slack
from grpo.memory.process import NO_SLACK, ProcessMemory

G, BATCH, ROOMY = 4, 64, 10_000
SLACK = Slack(0.25, 0.1, 7)
LONG = Shape(BATCH, 30, 20)


pytestmark = pytest.mark.usefixtures("frozen")


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
        self.read = lambda: MemoryReading("CPU", 7, 8, 9)
        self.memory = lambda: DeviceMemory(10_000, 9_000, self.ours_bytes)
        self.in_use_bytes, self.gap_bytes = lambda: 160, lambda: self.gaps
        self.neighbours = lambda: "process 17 uses 3.00 GB"

    @contextmanager
    def phase(self, *, exact: bool = False) -> Iterator[PhaseReading]:
        self.asked_exact.append(exact)
        yield self.next


def learned(shape: Shape) -> float:
    """All rows at once: 10 bytes a row. In parts: 20 more, for the gradients of the parts before."""
    return 10.0 * shape.rows


class Run:
    """A memory with one phase, "learn", and handles on its surroundings.

    100 bytes exist all along and 50 are not torch's, so the peak is 150 + 10 a row, or 170 + 10 a row
    in parts, where nothing was measured yet with 5 % of what the phase adds as error.
    """

    def __init__(self, *, rows: int | None = None, usable: int = ROOMY, slack: Slack = NO_SLACK) -> None:
        self.monitor, self.usable, self.fits_at_most = StubMonitor(), usable, BATCH
        self.tried: list[int] = []
        self.undo = mock.Mock()
        fits = {"learn": learned, "learn split": lambda shape: learned(shape) + 20}
        self.predictor = Predictor(fits)
        self.process = ProcessMemory(
            {"learn": PhaseSpec("learn", "learn split", rows)}, self.predictor, self.monitor,
            resident=lambda: {"weights": 100}, batch_size=BATCH, overhead_bytes=50, slack=lambda phase: slack,
        )  # fmt: skip
        self.memory = AdaptiveMemory(
            self.process, self.monitor, budget=lambda: Budget(self.usable, "test"), group_size=G,
            advice=lambda phase, missing_bytes: f"Shrink {phase} by {missing_bytes:g}.",
        )  # fmt: skip

    def replan(self) -> int:
        return self.memory.replan(30, 20)["learn"].rows

    def work(self, rows: int, asked: int | None = None) -> None:
        self.tried.append(rows)
        if rows > self.fits_at_most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked or rows}.00 GiB.")

    def step(self, shape: Shape | None = None, **measured: int | None) -> int:
        """Plan and run a step; rows it was done with. shape: of the longest part that comes."""
        if measured:
            self.monitor.next = PhaseReading(**measured)  # type: ignore[arg-type]
        self.replan()
        self.memory.run(
            "learn", self.work, shapes=lambda rows, _: [shape or Shape(rows, 30, 20)], undo=self.undo
        )
        return self.tried[-1]

    def footprint(self, rows: int = BATCH) -> Footprint:
        return self.memory.footprint("learn", Shape(rows, 30, 20))


def changes(logged: list[str]) -> list[str]:
    return [line.removeprefix("INFO plan: ") for line in logged if line.startswith("INFO plan: ")]


# -------------------------------------------------------------------------------------- planning


@pytest.mark.parametrize(
    ("usable", "fixed", "rows"),
    [
        (ROOMY, None, 64),
        (150 + 640 + 32, None, 64),  # 640 bytes and their error
        (150 + 640 + 31, None, 32),  # two parts
        (150 + 357, None, 32),  # (320 + 20) * 1.05, and 150
        (150 + 356, None, 24),  # 28 fit: three parts are as few with 24
        (150 + 63, None, 4), (150 + 62, None, 2),  # (40 + 20) * 1.05
        (150 + 32, None, 1),  # 31.5
        # rows that the user fixed are never exceeded, and give way to the budget
        (ROOMY, 7, 4), (ROOMY, 3, 2), (ROOMY, 48, 32), (ROOMY, 999, 64), (150 + 63, 16, 4),
    ],
)  # fmt: skip
def test_the_first_plan_by_hand(usable: int, fixed: int | None, rows: int):
    assert Run(usable=usable, rows=fixed).replan() == rows


def test_parts_may_need_what_the_phase_is_planned_to_and_whole_batches_carry_no_gradients():
    """All 64 at once need 640 bytes; parts need 20 besides their own."""
    run = Run()
    run.replan()
    for rows, planned in ([8, 56], True), ([BATCH], True), ([8, 63], False):
        assert run.memory.is_planned_for("learn", [Shape(each, 30, 20) for each in rows]) == planned
    for usable, batch_size, largest in (
        (ROOMY, 1000, 936),  # 150 + 9828; 940 would need 150 + 9870
        (150 + 42, 1000, 4), (150 + 41, 1000, 0),  # not a whole group
        (ROOMY, 50, 48),
    ):  # fmt: skip
        assert run.memory.largest_whole("learn", Budget(usable, "test"), batch_size, 30, 20) == largest


def test_when_budget_or_length_change_so_does_the_plan_with_one_line_each(logged: list[str]):
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
    run.usable, run.predictor._fits["learn"] = 1000, lambda shape: shape.rows * shape.prompt_tokens / 3.0
    assert [run.memory.replan(prompt, 20)["learn"].rows for prompt in (30, 60)] == [64, 32]


def test_a_footprint_says_what_the_peak_consists_of_and_what_is_not_torchs_is_measured():
    run = Run()
    run.memory.phases["learn"] = PhaseSpec(
        "learn", "learn split", parts=lambda _: {"logits": 100, "gradients": 60}
    )
    always = {"weights": 100, KEPT: 0, OUTSIDE: 50}
    assert run.footprint().parts == always | {"logits": 100, "gradients": 60, "activations": 480}
    assert (run.footprint().peak_bytes, run.footprint().error_bytes) == (790, 32)
    small = run.footprint(6)  # adds 80, less than the closed forms say
    assert small.parts == always | {"logits": 50, "gradients": 30, "activations": 0}
    process = ProcessMemory(
        run.memory.phases, run.predictor, run.monitor, resident=lambda: {"weights": 100}, batch_size=BATCH
    )
    assert process.footprint("learn", LONG).parts[OUTSIDE] == 160 - 100


def test_when_not_one_row_fits_the_message_has_the_neighbours_and_the_advice():
    """170 and 10 the row, and 5 % of 30. How much would do is said by `larger_budget`."""
    with pytest.raises(DoesNotFit, match=r"^learn does not fit: one row .*card: process 17") as error:
        Run().memory.plan_one("learn", Budget(100, "test"), BATCH, 30, 20)
    assert str(error.value).endswith("Shrink learn by 81.5. As it is, 0.01 GB have to be there.")


# ----------------------------------------------------------------------- what an allocator keeps


def test_what_an_allocator_keeps_is_planned_for_until_a_step_shows_how_much_it_is():
    """A quarter of the 640, give or take a tenth and 7 bytes; then the 96 that were seen, half as unsure."""
    run = Run(slack=SLACK)
    footprint = run.footprint()
    assert (footprint.parts[KEPT], footprint.error_bytes) == (160, math.hypot(32, 64, 7))
    run.step(process_bytes=150 + 640 + 96)
    run.step(process_bytes=150 + 640)  # it is never believed to shrink
    run.replan()
    footprint = run.footprint()
    assert (footprint.parts[KEPT], footprint.error_bytes) == (pytest.approx(96), math.hypot(32, 32, 7))
    assert run.process.footprint("learn", LONG, refined=False).parts[KEPT] == 160
    run = Run(usable=1000)  # 850 bytes of a long step are held for 80 that a short one adds
    for rows, before, held in ((BATCH, 160, 860), (6, 860, 860), (6, 860, 861), (2, 861, 861)):
        shape = Shape(rows, 30, 20)
        assert run.step(shape, process_before_bytes=before, process_bytes=held) == BATCH
    assert run.replan() == BATCH and run.footprint().parts[KEPT] == pytest.approx(860 - 150 - 640)
    run = Run(slack=Slack(0.25, 0.0))  # gaps that were there are held unless the phase fills them
    run.process._gaps = 300
    assert run.footprint(8).parts[KEPT] == 300 - 100 and run.footprint().parts[KEPT] == 160
    # What the largest phase needed stays, and a tenth of what a smaller one adds comes between.
    run = Run(slack=Slack(0.0, 0.0, 2, share_of_others=0.1))
    both = {"small": Footprint({"weights": 100.0, "cache": 40.0}), "learn": Footprint({"weights": 300.0})}
    assert [each.peak_bytes for each in run.process.lasting(both).values()] == [304, 304]


def test_a_heap_of_fixed_size_counts_as_a_whole_under_a_limit_and_elsewhere_as_it_is_touched():
    """640 bytes for all rows: shapes that need less change nothing, and nothing is learned from it."""
    run, asked = Run(slack=SLACK, usable=1030), []
    run.monitor.counts_private = True
    run.replan()
    run.memory.reserve(asked.append)
    assert asked == [640] and run.memory.worst()["learn"].peak_bytes == 150 + 640 + 160
    (expected,) = run.memory.expected({"learn": [Shape(8, 30, 20), Shape(16, 30, 20)]}).values()
    assert (expected.peak_bytes, expected.error_bytes) == (150 + 640, 7)
    run.step(process_bytes=150 + 700)
    run.replan()
    assert run.memory.plan["learn"].footprint.parts[KEPT] == 160
    run.monitor.ours_bytes = 150 + 640 + 100
    run.memory.reserve(asked.append)  # what the system does not let it have is no worst case
    assert run.memory.worst()["learn"].upper_bytes == 1030
    run = Run(slack=SLACK)
    run.monitor.gaps = 640 + 360 - 10  # into which all fits or nothing; 10 are held already
    run.replan()
    run.memory.reserve(asked.append)
    upper = 150 + 640 + 160 + math.hypot(32, 64, 7) + 360
    assert run.memory.worst()["learn"].upper_bytes == pytest.approx(upper)


@pytest.mark.parametrize(("usable", "left"), [(ROOMY, 64), (855, 0)])
def test_what_a_phase_leaves_stays_where_others_have_room_beside_it(usable: int, left: int):
    """A byte a row of sampling. Learning takes 150 + 640 + 5 % of the 640: 64 more are too much for 855."""
    kept, monitor = mock.Mock(largest_nbytes=28), StubMonitor()
    phases = {
        "sample": PhaseSpec("sample", "sample", keeps=lambda shape: shape.rows),
        "learn": PhaseSpec("learn", "learn"),
    }
    predictor = Predictor({"sample": lambda shape: 2.0 * shape.rows, "learn": learned})
    process = ProcessMemory(
        phases, predictor, monitor, resident=lambda: {"weights": 100}, batch_size=BATCH, overhead_bytes=50
    )
    memory = AdaptiveMemory(process, monitor, budget=lambda: Budget(usable, ""), group_size=G, kept=kept)
    for _ in range(2):  # what is left changes nothing in the next plan
        plan = memory.replan(30, 20)
        assert [plan[phase].rows for phase in phases] == [64, 64] and process.left_bytes == left
        peaks = [plan[phase].footprint.peak_bytes for phase in phases]
        assert peaks == [150 + 128 + left, 150 + 640 + left]
    assert kept.release.call_count == (0 if left else 2)
    kept.release.reset_mock()
    for phase, ends in (("sample", [None]), ("learn", [MemoryError(), None])):
        monitor.next = PhaseReading(added_bytes=100)
        memory.run(phase, mock.Mock(side_effect=ends), shapes=lambda rows, _: [LONG])
    assert kept.release.call_count == 1  # before it is tried again
    assert [record.added_bytes for record in memory.take_records()] == [128, 100]
    kept.trim.assert_called_once_with(left)


# ------------------------------------------------------------------------------- running out of memory


def test_out_of_memory_shrinks_the_plan_with_one_line_and_its_reason(logged: list[str]):
    run = Run()
    run.fits_at_most = 20
    assert run.step() == 16
    assert run.tried == [64, 64, 32, 16] and run.undo.call_count == 3
    assert run.step() == 16 and run.tried[4:] == [16]
    reason = "out of memory, replayed (OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB.)"
    assert changes(logged) == [f"learn 64 -> 16 rows at once: {reason}"]
    first, second = run.memory.take_records()
    assert (first.rows, first.retries, first.reason) == (16, 3, f"64 -> 16: {reason}")
    assert (second.rows, second.retries, second.reason) == (16, 0, None)
    run.usable = 150 + 63  # while it rests a tighter budget still counts
    assert run.step() == 4
    run.usable = ROOMY
    assert run.step() == 16  # and what ran out of memory is not tried again yet
    logged.clear()
    run = Run()
    fails_once = mock.Mock(side_effect=[MemoryError(), None])
    run.replan()
    run.memory.run("learn", fails_once, shapes=lambda rows, _: [LONG])
    assert run.memory.take_records()[0].retries == 1  # what passes at the same size changes no plan
    assert run.replan() == 64 and not changes(logged)


def test_after_a_cooldown_more_rows_are_tried_and_it_doubles_when_that_fails():
    run = Run()
    run.fits_at_most = 32
    assert [run.step() for _ in range(COOLDOWN_STEPS)] == [32] * COOLDOWN_STEPS
    run.tried.clear()
    assert run.step() == 32 and run.tried == [64, 64, 32]  # step 21: tried again, in vain
    assert {run.step() for _ in range(2 * COOLDOWN_STEPS - 1)} == {32}
    run.fits_at_most = 64
    assert [run.step(), run.step()] == [64, 64]
    reasons = [each.reason.split(":")[0] for each in run.memory.take_records() if each.reason]
    assert reasons == ["64 -> 32", "64 -> 32", "32 -> 64"]


def test_where_rows_are_not_to_blame_few_of_them_show_and_the_plan_is_halved():
    """As many bytes are asked for with fewer rows: a group is tried at once, and half the next time."""
    run = Run()
    run.fits_at_most = 12
    for tried in ([64, 64, 32, 4], [16, 16, 8]):
        run.replan()
        run.tried.clear()
        run.memory.run("learn", lambda rows: run.work(rows, 2), shapes=lambda rows, _: [Shape(rows, 30, 20)])
        assert run.tried == tried
    run = Run()
    run.fits_at_most = 0  # not even one row: the message says who else is there
    with pytest.raises(DoesNotFit, match=r"^learn does not fit: memory ran out with 64, 64,") as error:
        run.step()
    assert run.tried == [64, 64, 32, 16, 8, 4, 2, 1]
    assert str(error.value).endswith("On the card: process 17 uses 3.00 GB.")


# ------------------------------------------------------------------------------- measuring


def test_a_record_holds_what_was_planned_and_what_was_measured():
    run = Run(usable=150 + 357)
    run.monitor.next = PhaseReading(
        added_bytes=300, peak_bytes=500, reserved_bytes=520, process_bytes=540, process_before_bytes=10
    )
    run.replan()
    kv_growth: list[tuple[int, int]] = []
    shapes = [Shape(24, 30, 20), Shape(32, 25, 18), Shape(8, 30, 20)]
    run.memory.run(
        "learn", lambda rows: kv_growth.extend([(1, 40), (9, 90), (17, 60)]),
        shapes=lambda rows, _: shapes, kv_growth=kv_growth,
    )  # fmt: skip
    (record,) = run.memory.take_records()
    assert json.loads(json.dumps(record.as_dict())) == {
        "phase": "learn", "rows": 32, "prompt_tokens": 25, "new_tokens": 18,  # the largest of the parts
        "worst_bytes": 150 + 357, "expected_bytes": 150 + 340, "expected_error_bytes": 17,
        "predicted_bytes": 150 + 340, "predicted_added_bytes": 340, "process_before_bytes": 10,
        "added_bytes": 300, "peak_bytes": 500, "reserved_bytes": 520,
        "device_used_bytes": 540, "allocated_bytes": 7, "kv_bytes": 90,
        "kv_growth": [[1, 40], [9, 90], [17, 60]], "retries": 0, "reason": None,
    }  # fmt: skip
    run.step(process_before_bytes=5000)  # the allocator gave nothing back
    assert run.memory.take_records()[0].predicted_bytes == 5000 and run.memory.take_records() == []
    with run.memory.watch("learn"):  # a phase that is only watched is recorded too
        run.monitor.next.process_bytes = 123
    (record,) = run.memory.take_records()
    assert (record.phase, record.rows, record.device_used_bytes) == ("learn", 32, 123)
    with pytest.raises(ZeroDivisionError), run.memory.watch("learn"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):  # nobody's business here
        run.memory.run("learn", lambda rows: rows // 0, shapes=lambda rows, _: [])
    assert run.memory.take_records() == []

    # It has what was said beforehand, whatever was measured since: 640 and a quarter at most; of the 16
    # rows that came 180 and 45, and fewer later are expected no less.
    run = Run(slack=SLACK)
    run.replan()
    run.memory.promise()
    for rows, measured in ((16, 900), (4, 905)):
        run.step(Shape(rows, 30, 20), process_bytes=measured, added_bytes=400)
    for record in run.memory.take_records():
        assert record.worst_bytes == int(150 + 640 + 160 + math.hypot(32, 64, 7))
        said = 150 + 180 + 45, int(math.hypot(9, 18, 7))
        assert (record.expected_bytes, record.expected_error_bytes) == said


def test_tensors_are_counted_in_the_first_two_runs_of_a_phase_unless_it_is_done_in_many_parts():
    for rows, counted in (BATCH, True), (BATCH // 4, True), (BATCH // 8, False):
        run = Run(rows=rows)
        for _ in range(4):
            run.step()
        assert run.monitor.asked_exact == [counted, counted, False, False]


def test_what_was_measured_corrects_the_next_plan():
    """Half of what was predicted, so that more rows fit than were believed to."""
    run = Run(usable=150 + 357)
    assert [run.step(added_bytes=170), run.step()] == [32, 32]  # whole it was not measured: 640 predicted
    run.usable = 150 + 150
    assert run.step(added_bytes=None) == 24  # (240 + 20) / 2; the error is 1.7 % with two measurements
    assert run.footprint(24).error_bytes == pytest.approx(130 * 0.05 / 3)


def test_what_was_measured_goes_on_after_a_checkpoint_and_a_plan_that_is_another_is_one_line(logged):
    def stored(run: Run) -> dict:
        return json.loads(json.dumps(run.memory.state()))

    run, other, roomy = Run(usable=150 + 357), Run(usable=150 + 357), Run()
    for _ in range(3):
        run.step(added_bytes=306)
    other.replan()
    other.memory.restore(stored(run))
    assert other.footprint(32) == run.footprint(32)
    other.step()
    assert other.monitor.asked_exact == [False]  # counted often enough, before
    assert not changes(logged)
    roomy.replan()
    other.memory.restore(stored(roomy))
    assert changes(logged) == ["learn 64 -> 32 rows at once: resumed with a budget of 0.00 GB (test)"]
