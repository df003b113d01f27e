"""Runs phases in as many rows at once as fit: predict, plan, measure, recover, plan better.

    memory = AdaptiveMemory(...)
    memory.replan(prompt_tokens, new_tokens)                 # before a step
    result = memory.run("learn", work, shapes=..., undo=...) # work(rows) does all rows, that many at once
    records = memory.take_records()                          # one a phase, for a log

`work` must be a transaction: run again with fewer rows, from the same inputs, it gives the same result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from grpo.memory.monitor import MemoryMonitor, PhaseReading
from grpo.memory.phase import Footprint, PhaseRecord
from grpo.memory.planner import DoesNotFit, PhasePlan, smaller_rows
from grpo.memory.process import ProcessMemory
from grpo.memory.recovery import Retry, survive
from grpo.memory.shape import Shape
from grpo.memory.step_plan import Ceiling, StepPlan

T = TypeVar("T")
EXACT_STEPS, EXACT_PASSES = 2, 4
"""First runs of a phase whose tensors are counted one by one where the allocator keeps no statistics.

Not in more passes than that: counting costs as much in one of a single row as in one of hundreds.
"""
COOLDOWN_STEPS = 20
"""Steps after running out of memory before more rows are tried again; twice as many each time."""


class AdaptiveMemory(StepPlan):
    """The plan of a run on one device, and the phases run by it.

    replays: whether a phase that ran out of memory may be done again, see `survive`. The rest as `StepPlan`.
    """

    def __init__(
        self, process: ProcessMemory, monitor: MemoryMonitor, *, replays: bool = True, **plan: Any
    ) -> None:
        super().__init__(process, monitor, **plan)
        self._replays = replays
        self._highest: dict[str, Footprint] = {}
        """Of each phase, what was expected for the shapes that came."""
        self._runs = dict.fromkeys(self.phases, 0)
        self._records: list[PhaseRecord] = []

    def run(
        self,
        phase: str,
        work: Callable[[int], T],
        *,
        shapes: Callable[[int, T], Sequence[Shape]],
        undo: Callable[[], None] = lambda: None,
        kv_growth: Sequence[tuple[int, int]] = (),
    ) -> T:
        """`work(rows)` by the plan; after running out of memory again, with fewer rows.

        shapes: of the parts that `work` was done in. undo: drops what a failed try left behind.
        kv_growth: filled by `work`: tokens generated, and bytes that keys and values take up then.
        DoesNotFit when one row is too much.
        """
        retries: list[Retry] = []
        keeps = self.kept if self.phases[phase].keeps else None

        def measured(rows: int) -> tuple[T, PhaseReading]:
            held = keeps.largest_nbytes if keeps else 0
            few = self.process.batch_size <= EXACT_PASSES * rows
            exact = few and self._runs[phase] < EXACT_STEPS
            with self._monitor.phase(exact=exact) as reading:
                result = work(rows)
            if reading.added_bytes is not None:
                reading.added_bytes += held
            return result, reading

        def discard() -> None:
            undo()
            if self.kept is not None:
                self.kept.release()

        try:
            (result, reading), rows = survive(
                measured, self.plan[phase].rows, phase=phase, group_size=self._group_size,
                discard=discard, on_retry=retries.append, replays=self._replays,
            )  # fmt: skip
        except DoesNotFit as error:
            raise DoesNotFit(self._explain(error)) from error  # in few words: nothing is left to work with
        if keeps:
            keeps.trim(self.process.left_bytes)
        self._runs[phase] += 1
        if rows < self.plan[phase].rows:
            self._shrink(phase, retries)
        largest = max(shapes(rows, result), key=lambda shape: self.footprint(phase, shape).peak_bytes)
        self._observe(phase, largest, reading, len(retries), kv_growth)
        return result

    def _shrink(self, phase: str, retries: Sequence[Retry]) -> None:
        """Plan with the next size after the last that failed; a far smaller one may have been tried."""
        before, old = self._ceilings.get(phase), self.plan[phase]
        rows = smaller_rows(retries[-1].rows, self._group_size) or 1
        cooldown = 2 * before.cooldown if before else COOLDOWN_STEPS
        self._ceilings[phase] = Ceiling(rows, self._step + cooldown, cooldown)
        self._change(phase, old.rows, rows, f"out of memory, replayed ({retries[-1].error})")
        self.plan[phase] = PhasePlan(rows, old.footprint)

    def _observe(
        self,
        phase: str,
        shape: Shape,
        reading: PhaseReading,
        retries: int,
        kv_growth: Sequence[tuple[int, int]],
    ) -> None:
        footprint = self.footprint(phase, shape)
        beforehand = self.process.footprint(phase, shape, refined=False)
        highest = max(beforehand, self._highest.get(phase, beforehand), key=lambda each: each.upper_bytes)
        self._highest[phase] = highest
        expected = self.process.lasting(self._highest)[phase]
        self.process.observe(
            phase, shape, added_bytes=reading.added_bytes, process_bytes=reading.process_bytes,
            before_bytes=reading.process_before_bytes,
        )  # fmt: skip
        now = self._monitor.read()
        worst = self.promised.get(phase, footprint)
        self._records.append(
            PhaseRecord(
                phase, shape.rows, shape.prompt_tokens, shape.new_tokens,
                worst_bytes=int(worst.upper_bytes),
                expected_bytes=int(expected.peak_bytes), expected_error_bytes=int(expected.error_bytes),
                # An allocator does not give back what an earlier phase needed more of.
                predicted_bytes=max(int(footprint.peak_bytes), reading.process_before_bytes),
                predicted_added_bytes=int(self.process.added_bytes(footprint)),
                process_before_bytes=reading.process_before_bytes,
                allocated_bytes=now.allocated_bytes,
                reserved_bytes=reading.reserved_bytes, peak_bytes=reading.peak_bytes,
                device_used_bytes=reading.process_bytes, added_bytes=reading.added_bytes,
                kv_bytes=max((size for _, size in kv_growth), default=None), kv_growth=list(kv_growth),
                retries=retries, reason=self._reasons.pop(phase, None),
            )
        )  # fmt: skip

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """Measure a phase that is done in one piece and not retried, such as the optimizer's step."""
        with self._monitor.phase() as reading:
            yield
        self._observe(phase, Shape(self.plan[phase].rows, 0, 0), reading, 0, ())

    def take_records(self) -> list[PhaseRecord]:
        """What was measured since they were last taken."""
        records, self._records = self._records, []
        return records

    # ----------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Calibration and plan, for a checkpoint."""
        rows = {phase: plan.rows for phase, plan in self.plan.items()}
        return {"predictor": self.process.predictor.state(), "runs": dict(self._runs), "rows": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what was measured; a plan that differs from the one before is one log line."""
        self.process.predictor.restore(state["predictor"])
        self._runs |= {phase: runs for phase, runs in state["runs"].items() if phase in self._runs}
        for phase, rows in state["rows"].items():
            if phase in self.plan and self.plan[phase].rows != rows:
                self._change(phase, rows, self.plan[phase].rows, f"resumed with a budget of {self._budget()}")
