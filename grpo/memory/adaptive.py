"""Runs phases in as many rows at once as fit: predict, plan, measure, recover, plan better.

    memory = AdaptiveMemory(...)
    memory.replan(prompt_tokens, new_tokens)                 # before a step
    result = memory.run("learn", work, shapes=..., undo=...) # work(rows) does all rows, that many at once
    records = memory.take_records()                          # one a phase, for a log

`work` must be a transaction: run again with fewer rows, from the same inputs, it gives the same result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from loguru import logger

from grpo.memory.budget import Budget, larger_budget
from grpo.memory.monitor import MemoryMonitor, PhaseReading
from grpo.memory.phase import Footprint, Kept, PhaseRecord
from grpo.memory.planner import DoesNotFit, PhasePlan, largest_multiple, plan_phase, smaller_rows
from grpo.memory.process import ProcessMemory
from grpo.memory.recovery import Retry, survive
from grpo.memory.shape import Shape

T = TypeVar("T")
EXACT_STEPS, EXACT_PASSES = 2, 4
"""First runs of a phase whose tensors are counted one by one where the allocator keeps no statistics.

Not in more passes than that: counting costs as much in one of a single row as in one of hundreds.
"""
COOLDOWN_STEPS = 20
"""Steps after running out of memory before more rows are tried again; twice as many each time."""


@dataclass
class _Ceiling:
    """Rows that are not exceeded until a step, as memory ran out above them."""

    rows: int
    until: int
    cooldown: int


class AdaptiveMemory:
    """The plan of a run on one device, and the phases run by it.

    process: what it holds in each phase. budget: asked before every plan, as what others hold changes.
    advice: settings that would save a phase the bytes that not one row of it fits for want of.
    replays: whether a phase that ran out of memory may be done again, see `survive`. kept: what one has left
    for its next time.
    """

    def __init__(
        self,
        process: ProcessMemory,
        monitor: MemoryMonitor,
        *,
        budget: Callable[[], Budget],
        group_size: int,
        advice: Callable[[str, float], str] = lambda phase, missing_bytes: "",
        replays: bool = True,
        kept: Kept | None = None,
    ) -> None:
        self.process = process
        self.phases = process.phases
        self._monitor = monitor
        self._budget = budget
        self._group_size = group_size
        self._advice = advice
        self._replays = replays
        self.kept = kept
        self.promised: Mapping[str, Footprint] = {}
        """The worst case by phase, as it was told before the first step."""
        self._highest: dict[str, Footprint] = {}
        """Of each phase, what was expected for the shapes that came."""
        self.expected_bytes = 0.0
        """Of the largest phase, as `expected` last said; 0: unknown."""
        self._ceilings: dict[str, _Ceiling] = {}
        self._runs = dict.fromkeys(self.phases, 0)
        self._step = 0
        self._records: list[PhaseRecord] = []
        self._reasons: dict[str, str] = {}
        self.plan: dict[str, PhasePlan] = {}
        self._longest = 0, 0

    # -------------------------------------------------------------------------------- planning

    def replan(self, prompt_tokens: int, new_tokens: int) -> dict[str, PhasePlan]:
        """The plan of the next step, whose rows are at most this long. DoesNotFit if one row is too much.

        A change from the plan before is one log line with its reason.
        """
        self._step += 1
        self._longest = prompt_tokens, new_tokens
        self.process.learn_slack()
        self.process.left_bytes = 0.0
        budget = self._budget()
        for phase in self.phases:
            new = self.plan_one(phase, budget, self.process.batch_size, prompt_tokens, new_tokens)
            old = self.plan.get(phase)
            if old is not None and new.rows != old.rows:
                what = "room for more" if new.rows > old.rows else "predictions with their error exceed"
                self._change(phase, old.rows, new.rows, f"{what}: {budget}")
            self.plan[phase] = new
        self._leave_something(budget)
        return self.plan

    def _leave_something(self, budget: Budget) -> None:
        """What a phase leaves for its next time may stay where all have room beside it."""
        if self.kept is None:
            return
        shapes = {phase: Shape(plan.rows, *self._longest) for phase, plan in self.plan.items()}
        left = sum(spec.keeps(shapes[phase]) for phase, spec in self.phases.items() if spec.keeps)
        if left + max(plan.footprint.upper_bytes for plan in self.plan.values()) > budget.usable_bytes:
            self.kept.release()
            return
        self.process.left_bytes = left
        for phase, plan in self.plan.items():
            self.plan[phase] = PhasePlan(plan.rows, self.footprint(phase, shapes[phase]))

    def lower(self, rows: Mapping[str, int]) -> None:
        """Plan with no more than so many rows a phase: those of the process that holds least."""
        for phase, plan in self.plan.items():
            if rows[phase] < plan.rows:
                footprint = self.footprint(phase, Shape(rows[phase], *self._longest))
                self.plan[phase] = PhasePlan(rows[phase], footprint)

    def plan_one(
        self, phase: str, budget: Budget, batch_size: int, prompt_tokens: int, new_tokens: int
    ) -> PhasePlan:
        """The plan of one phase for any batch size."""
        limits = [self.phases[phase].rows]
        if self._resting(phase):
            limits.append(self._ceilings[phase].rows)

        def footprint(rows: int, phase: str = phase) -> Footprint:
            return self.footprint(phase, Shape(rows, prompt_tokens, new_tokens), batch_size)

        try:
            return plan_phase(
                footprint, budget, phase=phase, batch_size=batch_size, group_size=self._group_size,
                at_most=min((limit for limit in limits if limit is not None), default=None),
            )  # fmt: skip
        except DoesNotFit as error:
            missing = footprint(1).upper_bytes - budget.usable_bytes
            outside = self.process.overhead_bytes
            settings = self._advice(phase, missing) if outside < budget.usable_bytes else ""
            needed = max(footprint(1, each).upper_bytes for each in self.phases)
            larger = larger_budget(budget, needed, outside)
            raise DoesNotFit(self._explain(error, settings, larger)) from error

    def largest_whole(
        self, phase: str, budget: Budget, batch_size: int, prompt_tokens: int, new_tokens: int
    ) -> int:
        """The largest batch up to `batch_size` that the phase does all at once; 0 if not one group."""

        def fits(rows: int) -> bool:
            shape = Shape(rows, prompt_tokens, new_tokens)
            return self.footprint(phase, shape, batch_size=rows).upper_bytes <= budget.usable_bytes

        return largest_multiple(fits, at_most=batch_size, multiple=self._group_size)

    def rows_within(self, most: float, phase: str, at_most: int, prompt_tokens: int, new_tokens: int) -> int:
        """Rows that the phase could do at once and hold no more than `most` bytes; 0 if not one group."""
        budget = self._budget()
        if most < budget.usable_bytes:
            budget = Budget(int(most), "what other phases need")
        return self.largest_whole(phase, budget, at_most, prompt_tokens, new_tokens)

    def is_planned_for(self, phase: str, shapes: Sequence[Shape]) -> bool:
        """Whether parts of these shapes need no more than the phase is planned to."""
        most = self.plan[phase].footprint.peak_bytes
        return all(self.footprint(phase, shape).peak_bytes <= most for shape in shapes)

    def _explain(self, error: DoesNotFit, *remedies: str) -> str:
        others = self._monitor.neighbours()
        return " ".join(filter(None, [str(error), others and f"On the card: {others}.", *remedies]))

    def footprint(self, phase: str, shape: Shape, batch_size: int | None = None) -> Footprint:
        """What the process holds at the phase's peak, by component."""
        return self.process.footprint(phase, shape, batch_size)

    def reserve(self, bound: Callable[[int], None]) -> None:
        """Bound a heap to what the largest phase adds."""
        most = max((plan.footprint for plan in self.plan.values()), key=lambda each: each.tensor_bytes)
        budget = self._budget()
        self.process.reserve(most, bound, budget.usable_bytes / budget.share)

    def worst(self) -> dict[str, Footprint]:
        """What the process holds in each phase once all have run, were all texts as long as they can be."""
        return self.process.lasting({phase: plan.footprint for phase, plan in self.plan.items()})

    def promise(self) -> None:
        """Hold what is measured from here on against the worst case as it is now."""
        self.promised = self.worst()

    def expected(self, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Footprint]:
        """The same for texts of these shapes, by what is known before the first step."""
        each = {
            phase: max(
                (self.process.footprint(phase, shape, refined=False) for shape in shapes[phase]),
                key=lambda footprint: footprint.peak_bytes,
            )
            for phase in self.plan
        }
        expected = self.process.lasting(each)
        self.expected_bytes = max(footprint.upper_bytes for footprint in expected.values())
        return expected

    def _resting(self, phase: str) -> bool:
        ceiling = self._ceilings.get(phase)
        return ceiling is not None and self._step < ceiling.until

    def _change(self, phase: str, old: int, new: int, reason: str) -> None:
        logger.info("plan: {} {} -> {} rows at once: {}", phase, old, new, reason)
        self._reasons[phase] = f"{old} -> {new}: {reason}"

    # --------------------------------------------------------------------------------- running

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
        self._ceilings[phase] = _Ceiling(rows, self._step + cooldown, cooldown)
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
            phase, shape, added_bytes=reading.added_bytes, process_bytes=reading.process_bytes
        )
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
