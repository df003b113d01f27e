"""How many rows of each phase are on the device at once: the only planner.

A run, a plan for a card that is not there, find-max and TRL's trainer share it. A phase is measured or
traced at a few sizes, a `Formula` predicts the bytes of others, and rows grow until the batch fits or memory
says how much of it does. From then on the plan is settled: a pass is learned from only if it is larger than
all before, and rows only go down, where memory runs out or there is less room.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from loguru import logger

from grpo.memory.device import Device, Peak
from grpo.memory.formula import Formula
from grpo.memory.recovery import is_out_of_memory, survive
from grpo.memory.rows import PassSize, even_rows, largest_rows, num_tokens, smaller_rows

T = TypeVar("T")
GROWTH = {True: 2, False: 4}
"""How many times the most tokens or rows seen so far are tried at once. Peaks bend upwards with rows, so a
formula from small passes may be too low; by whether all passes that were seen had about as many rows.
"""
LARGER = 1.1
"""A settled phase's tensors are counted again in a pass this many times as large as any before."""
AGAIN_AFTER = 50
"""Passes in a row that went well, after which more rows than were cut down to are tried."""


@dataclass(frozen=True)
class Pass:
    """The largest of the passes that a phase of a step was done in. Bytes."""

    phase: str
    rows: int
    tokens: int
    """Tokens of the longest row, the prompt's included."""
    predicted_bytes: int | None
    """A prediction of `added_bytes` that was made before the pass; None where nothing was known yet."""
    added_bytes: int | None
    """Bytes that tensors added at the peak; None in passes in which they were not counted."""
    process_bytes: int
    seconds: float
    retries: int
    reason: str | None
    """Why rows are not what they were the time before."""
    kv_growth: list[tuple[int, int]]
    """(tokens generated, bytes of keys and values) within a rollout."""
    shared: int = 0
    computed: int = 0

    @property
    def expected_bytes(self) -> int:
        """The bytes that tensors added, or were predicted to in a pass that did not count them."""
        return self.added_bytes or self.predicted_bytes or 0

    def as_dict(self) -> dict[str, Any]:
        """A line of memory.jsonl."""
        return {name: value for name, value in asdict(self).items() if name not in ("shared", "computed")}


_NOTHING = PassSize(0)


class Preallocated(Protocol):
    """Bytes that a phase has kept of an earlier pass, and begins the next one with."""

    @property
    def nbytes(self) -> int: ...

    @property
    def is_oversized(self) -> bool:
        """Whether the last pass used a part of it only: then its bytes are no measure of that pass."""
        ...


@dataclass
class _Phase:
    """Everything that is known of one phase; a checkpoint has the formula and the fields in `_STORED`."""

    formula: Formula = field(default_factory=Formula)
    is_borrowed: bool = False
    """Whether the formula is another phase's, and goes once this one has been seen itself."""
    rows: int | None = None
    """Rows at once, as planned last."""
    is_settled: bool = False
    """Whether the batch fits, or memory says how much of it does; until then rows grow."""
    oom_ceiling: int | None = None
    """Rows that may be taken at most, after more have run out of memory."""
    went_well: int = 0
    """Passes in a row since rows were cut down."""
    same_size_retries: int = 0
    """Times in a row that memory ran out, and the same rows went well the second time."""
    worst_case: PassSize = _NOTHING
    """The largest batch that it was planned for."""
    kept: Preallocated | None = None
    """Bytes that are there before a pass begins; they are part of what it needs."""
    reason: str | None = None
    """Why rows have changed; the next pass tells it."""
    reopened: str | None = None
    """Why rows may be more at once from now on, or fewer."""


_STORED = ("rows", "is_borrowed", "is_settled", "oom_ceiling", "went_well", "same_size_retries")


class Fit:
    """Plans rows at once by phase, and does a phase again with fewer where memory runs out.

    Rows are sticky: they change for a reason, which is one log line. After they were cut down, more are tried
    after fifty passes that went well.
    """

    def __init__(
        self,
        device: Device,
        *,
        group_size: int = 1,
        fixed: Mapping[str, int] | None = None,
        replays: bool = True,
        sync_rows: Callable[[int], int] = lambda rows: rows,
        force_fixed_rows: bool = False,
    ) -> None:
        """fixed: rows that a person wants, by phase, and fewer only where they do not fit.

        force_fixed_rows: try them all the same, as a trial does. replays: whether `run` may do again what ran
        out of memory. sync_rows: makes of this process's rows those that all processes take, where they have
        to take as many.
        """
        self.device, self.group_size = device, group_size
        self.fixed = dict(fixed or {})
        self._replays, self._sync_rows, self._force_fixed_rows = replays, sync_rows, force_fixed_rows
        self._phases: defaultdict[str, _Phase] = defaultdict(_Phase)
        self._passes: list[Pass] = []
        self._counted = set[str]()
        """Phases of which a pass of the run itself, not a warm-up's, had its tensors counted."""

    # ------------------------------------------------------------------------------------ what is known

    def see(self, phase: str, size: PassSize, added_bytes: float) -> None:
        """Takes note of what a pass adds, measured or traced."""
        state = self._phases[phase]
        if state.is_borrowed:
            state.formula, state.is_borrowed = Formula(), False
        state.formula.see(size.rows, self.num_tokens(size), added_bytes)

    def borrow_formula(self, phase: str, source: str) -> None:
        """Plans a phase by what is known of another that does much the same, until it is seen itself."""
        state = self._phases[phase]
        state.formula, state.is_borrowed = deepcopy(self._phases[source].formula), True

    def knows(self, phase: str) -> bool:
        """Returns whether anything was seen of it."""
        return bool(self._phases[phase].formula.seen)

    def predict(self, phase: str, size: PassSize) -> float:
        """Returns the bytes that the tensors of such a pass add. ValueError before anything was seen."""
        return self._phases[phase].formula(size.rows, self.num_tokens(size))

    def needs(self, phase: str, size: PassSize) -> float:
        """Returns the same with what the process is taken to hold beside tensors."""
        return (1 + self.device.slack) * self.predict(phase, size)

    def room_bytes(self) -> int:
        """Returns what phases may add now."""
        return self.device.room_bytes()

    def keeps(self, phase: str, kept: Preallocated) -> None:
        """Tells that a phase keeps something from one pass to the next.

        It counts as room for that phase, which needs it anyway, and not for the others.
        """
        self._phases[phase].kept = kept

    def _kept_bytes(self, phase: str) -> int:
        kept = self._phases[phase].kept
        return kept.nbytes if kept is not None else 0

    def num_tokens(self, size: PassSize) -> int:
        """Returns the tokens that such a pass computes."""
        return num_tokens(size, self.group_size)

    # -------------------------------------------------------------------------------------------- plans

    def plan(self, phase: str, batch: PassSize) -> int:
        """Returns the rows that the next pass takes at once. batch: all rows, with the longest's tokens."""
        state = self._phases[phase]
        if batch.rows > state.worst_case.rows == state.rows:
            state.is_settled = False  # all of the largest batch so far have fitted
        state.worst_case = max(state.worst_case, batch)
        rows, why = self._plan(phase, batch)
        agreed = self._sync_rows(rows)
        if agreed < rows:  # until they have seen more, perhaps
            state.is_settled, why = False, "another process has room for no more"
        if why is not None:
            self._change(phase, agreed, state.reopened or why)
        state.reopened = None
        return agreed

    def _plan(self, phase: str, batch: PassSize) -> tuple[int, str | None]:
        """Returns rows as this process alone would take them, and why the plan changes, if it does."""
        state = self._phases[phase]
        most = min(batch.rows, self.fixed.get(phase, batch.rows))
        if self._force_fixed_rows and phase in self.fixed:
            state.rows = most
            return most, None
        if not self.knows(phase):
            return min(most, self.group_size, state.oom_ceiling or most), None
        room = self.device.room_bytes() + self._kept_bytes(phase)
        before, tries_more, kept = state.rows, state.went_well >= AGAIN_AFTER, 0
        if before is not None and state.is_settled:
            kept = self._kept_rows(phase, batch, min(before, most), room)
        rows = kept
        if not state.is_settled or before is None or tries_more:
            rows = max(kept, self._grown_rows(phase, batch, most, room, tries_more))
        if before is not None and rows == most and rows <= before:
            return rows, None  # a smaller batch leaves the plan as it is
        if before is None or rows <= before:
            return rows, f"longer texts, or less room, of {self.device.budget()}"
        return rows, "room for all" if rows == most else "room for more"

    def _kept_rows(self, phase: str, batch: PassSize, rows: int, room: int) -> int:
        """Returns these rows of a settled plan, or fewer where not even their tensors have room any more.

        What a process holds beside tensors goes up and down by itself, and is no reason to change a plan.
        """
        if self.predict(phase, batch._replace(rows=rows)) <= room:
            return rows
        return self._largest(lambda count: self.needs(phase, batch._replace(rows=count)) <= room, rows)

    def _grown_rows(self, phase: str, batch: PassSize, most: int, room: int, tries_more: bool) -> int:
        """Returns the most rows that fit, as far as passes that were seen tell, and settles the plan.

        tries_more: go beyond the rows to which memory that ran out has cut them down.
        """
        state, formula = self._phases[phase], self._phases[phase].formula
        growth = GROWTH[formula.has_one_size]

        def fits(rows: int) -> bool:
            return self.needs(phase, batch._replace(rows=rows)) <= room

        def in_reach(rows: int) -> bool:
            # By rows, too: where texts turn out shorter than they may be, so many tokens are never seen.
            tokens = self.num_tokens(batch._replace(rows=rows))
            return tokens <= growth * formula.most_tokens or rows <= growth * formula.most_rows

        ceiling = min(most, (1 + tries_more) * state.oom_ceiling) if state.oom_ceiling else most
        rows = self._largest(lambda count: in_reach(count) and fits(count), ceiling)
        more = rows + (self.group_size if rows >= self.group_size else 1)
        is_cut = rows < most and (rows >= ceiling or not fits(more))  # else too few were seen yet
        state.is_settled = is_cut or (rows == most and batch.rows == state.worst_case.rows)
        if rows < most:
            if formula.has_one_size and state.is_settled and rows > 1 and in_reach(2 * rows):
                # All bytes are taken to grow with the rows: half as many tell how much does.
                rows, state.is_settled = smaller_rows(rows, self.group_size) or 1, False
            else:
                rows = even_rows(rows, batch_size=batch.rows, group_size=self.group_size)
        if tries_more:
            state.went_well, state.oom_ceiling = 0, None if rows == most or not state.oom_ceiling else ceiling
        return rows

    def _largest(self, fits: Callable[[int], bool], at_most: int) -> int:
        return largest_rows(fits, batch_size=at_most, group_size=self.group_size) or 1

    def _change(self, phase: str, rows: int, why: str) -> None:
        state = self._phases[phase]
        before, state.rows = state.rows, rows
        if before is not None and rows != before:
            logger.info("plan: {} {} -> {} rows at once: {}", phase, before, rows, why)
            state.reason = f"{before} -> {rows}: {why}"
        if before is None or rows < before:
            state.went_well = 0

    def plan_again(self) -> dict[str, tuple[int, PassSize]]:
        """Returns, for each phase that was seen, the rows of its next pass, and of how large a batch."""
        known = {phase: state.worst_case for phase, state in self._phases.items() if self.knows(phase)}
        return {phase: (self.plan(phase, batch), batch) for phase, batch in known.items() if batch.rows}

    def discard_plan(self, phase: str) -> None:
        """Has a phase planned anew, from all that is known by now, before a run begins."""
        self._phases[phase].rows, self._phases[phase].is_settled = None, False

    def reopen(self, phase: str, why: str) -> None:
        """Has a phase planned anew within a run, as a row takes something else than it was planned for."""
        state = self._phases[phase]
        state.is_settled, state.oom_ceiling, state.worst_case, state.reopened = False, None, _NOTHING, why

    def planned(self) -> dict[str, int]:
        """Returns rows at once by phase, as planned last."""
        return {phase: state.rows for phase, state in self._phases.items() if state.rows is not None}

    # ------------------------------------------------------------------------------------------- passes

    def run(
        self,
        phase: str,
        work: Callable[[int], T],
        batch: PassSize,
        *,
        took: Callable[[int, T], PassSize] | None = None,
        rollback: Callable[[], None] = lambda: None,
        kv_growth: Sequence[tuple[int, int]] = (),
        is_warmup: bool = False,
    ) -> T:
        """Returns `work(rows)`, done again with fewer rows where memory runs out, see `survive`.

        batch: all rows, with the tokens of the longest. took: the largest pass that it was, where only the
        result tells; the batch then says the most that there may be. kv_growth: filled by `work`. is_warmup:
        try all of the batch at once, and learn from it.
        """
        state, errors = self._phases[phase], list[str]()
        planned = batch.rows if is_warmup else self.plan(phase, batch)

        def measured(rows: int) -> T:
            size = batch._replace(rows=min(rows, batch.rows))
            with self._measure(phase, size, is_warmup) as peak:
                result = work(rows)
            size = took(rows, result) if took else size
            self._note(phase, size, peak, is_warmup, retries=len(errors), kv_growth=kv_growth)
            return result

        result, rows = survive(
            measured,
            planned,
            phase=phase,
            group_size=self.group_size,
            rollback=rollback,
            on_retry=errors.append,
            replays=self._replays,
        )
        if not errors:
            state.same_size_retries, state.went_well = 0, state.went_well + 1
            return result
        state.same_size_retries = state.same_size_retries + 1 if rows == planned else 0
        if rows < planned or state.same_size_retries > 1:
            most = rows if rows < planned else smaller_rows(rows, self.group_size) or 1
            self._ran_out(phase, most, errors[-1])
        return result

    def _ran_out(self, phase: str, most: int, error: str) -> None:
        """Has no more than so many rows taken for a while."""
        state = self._phases[phase]
        self._change(phase, most, f"memory ran out ({error})")
        state.oom_ceiling, state.went_well, state.same_size_retries = most, 0, 0
        state.is_settled = True

    @contextmanager
    def rows(self, phase: str, batch: PassSize) -> Iterator[int]:
        """For a loop of one's own: gives the rows to take at once, and measures what is done inside.

        An error goes its way; one of memory is remembered, so that there are fewer rows the next time.
        """
        rows = self.plan(phase, batch)
        size = batch._replace(rows=rows)
        try:
            with self._measure(phase, size, is_warmup=False) as peak:
                yield rows
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out(phase, smaller_rows(rows, self.group_size) or 1, type(error).__name__)
            raise
        self._note(phase, size, peak, is_warmup=False)
        self._phases[phase].went_well += 1

    @contextmanager
    def _measure(self, phase: str, size: PassSize, is_warmup: bool) -> Iterator[Peak]:
        """Measures a pass; what the phase has kept is part of it."""
        state, kept_bytes = self._phases[phase], self._kept_bytes(phase)
        with self.device.measure(exact=is_warmup or self._counts(phase, size)) as peak:
            yield peak
        if peak.added_bytes is not None:
            is_typical = state.kept is None or not state.kept.is_oversized
            peak.added_bytes = peak.added_bytes + kept_bytes if is_typical else None
            if not is_warmup:
                self._counted.add(phase)

    def _counts(self, phase: str, size: PassSize) -> bool:
        """Returns whether tensors are counted one by one, where the allocator keeps no statistics.

        They are in a phase's first pass, to compare it with the plan, and in passes that are learned from.
        """
        return phase not in self._counted or self._teaches(phase, size)

    def _teaches(self, phase: str, size: PassSize) -> bool:
        """Returns whether a pass tells more than is known: until a plan is settled, and of larger ones."""
        state = self._phases[phase]
        return not state.is_settled or self.num_tokens(size) > LARGER * state.formula.most_tokens

    def _note(
        self,
        phase: str,
        size: PassSize,
        peak: Peak,
        is_warmup: bool,
        *,
        retries: int = 0,
        kv_growth: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Keeps what a pass was predicted and measured to add, and learns from it."""
        state, added = self._phases[phase], peak.added_bytes
        predicted = int(self.predict(phase, size)) if self.knows(phase) else None
        done = Pass(
            phase,
            size.rows,
            size.completion_tokens + size.prompt_tokens,
            predicted,
            added,
            peak.process_bytes,
            peak.seconds,
            retries,
            state.reason,
            list(kv_growth),
            size.prompt_tokens,
            size.computed,
        )
        self._passes.append(done)
        state.reason = None
        if added is None and predicted is None:  # more than its tensors took, but nothing else is known
            added = max(0, peak.process_bytes - peak.used_before_bytes)
        is_larger = self.num_tokens(size) > state.formula.most_tokens or size.rows > state.formula.most_rows
        if added is not None and (is_warmup or is_larger or state.is_borrowed or not state.is_settled):
            self.see(phase, size, added)

    def take_passes(self) -> list[Pass]:
        """Returns what was measured since this was last called."""
        passes, self._passes = self._passes, []
        return passes

    # -------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Returns what was seen, and rows, which are state: the parts of a step's sums depend on them."""
        return {
            phase: {
                "seen": [*map(list, state.formula.seen)],
                **{name: getattr(state, name) for name in _STORED},
            }
            for phase, state in self._phases.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on as a checkpoint has it, with its rows; a phase of an older version's is planned anew."""
        for phase, stored in state.items():
            if not stored.keys() >= {"seen", *_STORED}:
                continue
            known = self._phases[phase]
            if known.rows is not None and stored["rows"] not in (None, known.rows):
                logger.info(
                    "plan: {} {} rows at once, as before, instead of {}", phase, stored["rows"], known.rows
                )
            known.formula = Formula(stored["seen"])
            for name in _STORED:
                setattr(known, name, stored[name])
