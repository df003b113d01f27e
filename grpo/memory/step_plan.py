"""The plan of each step of a run: rows at once by phase, and what the process holds with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loguru import logger

from grpo.memory.budget import Budget, larger_budget
from grpo.memory.monitor import MemoryMonitor
from grpo.memory.phase import Footprint, Kept
from grpo.memory.planner import DoesNotFit, PhasePlan, largest_multiple, plan_phase
from grpo.memory.process import ProcessMemory
from grpo.memory.shape import Shape


@dataclass
class Ceiling:
    """Rows that are not exceeded until a step, as memory ran out above them."""

    rows: int
    until: int
    cooldown: int


class StepPlan:
    """Made anew before each step, by what is known then.

    process: what it holds in each phase. budget: asked before every plan, as what others hold changes.
    advice: settings that would save a phase the bytes that not one row of it fits for want of. kept: what a
    phase has left for its next time.
    """

    def __init__(
        self,
        process: ProcessMemory,
        monitor: MemoryMonitor,
        *,
        budget: Callable[[], Budget],
        group_size: int,
        advice: Callable[[str, float], str] = lambda phase, missing_bytes: "",
        kept: Kept | None = None,
    ) -> None:
        self.process = process
        self.phases = process.phases
        self.kept = kept
        self.plan: dict[str, PhasePlan] = {}
        self.promised: Mapping[str, Footprint] = {}
        """The worst case by phase, as it was told before the first step."""
        self.expected_bytes = 0.0
        """Of the largest phase, as `expected` last said; 0: unknown."""
        self._monitor = monitor
        self._budget = budget
        self._group_size = group_size
        self._advice = advice
        self._ceilings: dict[str, Ceiling] = {}
        self._reasons: dict[str, str] = {}
        self._step = 0
        self._longest = 0, 0

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
