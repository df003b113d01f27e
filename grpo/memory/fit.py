"""How many rows of each phase are on the device at once: the only planner.

A run, a plan for a card that is not there, find-max and TRL's trainer share it. What a phase adds at its peak
is measured, or traced, and predicted by a `Formula`. Peaks bend upwards with rows, so that a formula from
small passes can be too low: no more than four times the tokens that have been seen are tried at once.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from loguru import logger

from grpo.memory.device import Device, Peak
from grpo.memory.formula import REMEMBERED, Formula
from grpo.memory.recovery import is_out_of_memory, survive
from grpo.memory.rows import Size, even_rows, largest_rows, positions, smaller_rows

T = TypeVar("T")
EXACT_RUNS, LONGER = 2, 1.1
"""Where the allocator keeps no statistics, tensors are counted one by one in a warm-up, in so many first
passes of a phase, and in passes so many times as large as any before.
"""
GROWTH = {True: 2, False: 4}
"""Times the most tokens or rows that were seen: what is tried at once, where all had as many rows or not."""
AGAIN_AFTER = 50
"""Passes in a row that went well, after which more rows than were cut down to are tried."""


@dataclass(frozen=True)
class Pass:
    """The largest of the passes that a phase of a step was done in. Bytes."""

    phase: str
    rows: int
    tokens: int
    """Of the longest row, the prompt's included."""
    predicted_bytes: int | None
    """Of `added_bytes`, made before this was measured; None: it was the first of its phase."""
    added_bytes: int | None
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
    def size(self) -> Size:
        return Size(self.rows, self.tokens - self.shared, self.shared, self.computed)

    @property
    def expected_bytes(self) -> int:
        """What tensors added, as far as that is known: it is not counted in every step."""
        return self.added_bytes or self.predicted_bytes or 0

    def as_dict(self) -> dict[str, Any]:
        """A line of memory.jsonl."""
        return {name: value for name, value in asdict(self).items() if name not in ("shared", "computed")}


_NOTHING = Size(0)


class Preallocated(Protocol):
    """What a phase has kept of an earlier pass, and begins the next one with."""

    @property
    def nbytes(self) -> int: ...

    @property
    def is_oversized(self) -> bool:
        """Whether the last pass used a part of it only: then its bytes are no measure of that pass."""
        ...


@dataclass
class _Phase:
    """What is known of a phase. A checkpoint has all but its batch, what it keeps, and why rows changed."""

    formula: Formula = field(default_factory=Formula)
    slack: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Tokens, and the share of its tensors that the process took beside them, where it grew."""
    rows: int | None = None
    """At once, as planned last."""
    most: int | None = None
    """Rows that may be taken, after more have run out of memory."""
    explores: bool = True
    """Whether more would have been taken, had as many been seen."""
    went_well: int = 0
    """Passes in a row since rows were cut down."""
    counted: int = 0
    """Of a run's own passes, those whose tensors were counted one by one."""
    unlucky: int = 0
    """Times in a row that memory ran out, and the same rows went well the second time."""
    batch: Size = _NOTHING
    """The largest that it was planned for."""
    kept: Preallocated | None = None
    """What is there before a pass begins; it is part of what the pass needs."""
    reason: str | None = None


_STORED = ("rows", "most", "explores", "went_well", "counted", "unlucky")


class Fit:
    """Rows at once by phase: measured, planned, and after running out of memory done again with fewer.

    Rows are sticky: they change for a reason, which is one log line. Once a batch fits they grow no more; cut
    down, by memory that ran out, longer texts or neighbours, they are tried again after fifty passes.
    """

    def __init__(
        self,
        device: Device,
        *,
        group_size: int = 1,
        fixed: Mapping[str, int] | None = None,
        replays: bool = True,
        agree: Callable[[int], int] = lambda rows: rows,
        obeys: bool = False,
    ) -> None:
        """fixed: rows that a person wants, by phase, and fewer only where they do not fit.

        obeys: whether they are to be tried all the same.
        replays: whether `run` may do again what ran out of memory. agree: the rows that all processes take,
        of what this one would, where they have to take as many.
        """
        self.device, self.group_size = device, group_size
        self.fixed = dict(fixed or {})
        self._replays, self._agree, self._obeys = replays, agree, obeys
        self._phases: defaultdict[str, _Phase] = defaultdict(_Phase)
        self._passes: list[Pass] = []

    # ------------------------------------------------------------------------------------ what is known

    def see(self, phase: str, size: Size, added_bytes: float) -> None:
        """What a pass adds, measured or traced."""
        self._phases[phase].formula.see(size.rows, self.positions(size), added_bytes)

    def formula(self, phase: str) -> Callable[[Size], float]:
        """As it is now: bytes that the tensors of a pass add, by what was seen so far."""
        formula = copy.deepcopy(self._phases[phase].formula)
        return lambda size: formula(size.rows, self.positions(size))

    def knows(self, phase: str) -> bool:
        """Whether anything was seen of it."""
        return bool(self._phases[phase].formula.seen)

    def predict(self, phase: str, size: Size) -> float:
        """Bytes that the tensors of such a pass add. ValueError before anything was seen of the phase."""
        return self._phases[phase].formula(size.rows, self.positions(size))

    def needs(self, phase: str, size: Size) -> float:
        """The same with what the process holds beside tensors."""
        return (1 + self.slack(phase)) * self.predict(phase, size)

    def slack(self, phase: str) -> float:
        """What the process holds beside the phase's tensors, as a share; 0 where utilization covers it."""
        if not self.device.slack:
            return 0.0
        state = self._phases[phase]
        shares = [share for tokens, share in state.slack if 2 * tokens >= state.formula.most_tokens]
        return max(shares, default=self.device.slack)

    def room_bytes(self) -> int:
        """What phases may add now."""
        return self.device.room_bytes()

    def keeps(self, phase: str, kept: Preallocated) -> None:
        """From here on a phase keeps something from one pass to the next.

        It counts as room for that phase, which needs it anyway, and not for the others.
        """
        self._phases[phase].kept = kept

    def _kept_bytes(self, phase: str) -> int:
        kept = self._phases[phase].kept
        return kept.nbytes if kept is not None else 0

    def positions(self, size: Size) -> int:
        """Tokens that such a pass computes."""
        return positions(size, self.group_size)

    # -------------------------------------------------------------------------------------------- plans

    def plan(self, phase: str, batch: Size, *, like: str = "") -> int:
        """The rows that the next pass takes at once. batch: all rows, with the tokens of the longest.

        like: a phase whose formula serves, too, until this one has its own.
        """
        state = self._phases[phase]
        state.batch = max(state.batch, batch)
        rows, why = self._plan(phase, batch, like)
        agreed = self._agree(rows)
        if agreed < rows:
            why = "another process has room for no more"
        if why is not None:
            self._change(phase, agreed, why)
        return agreed

    def _plan(self, phase: str, batch: Size, like: str) -> tuple[int, str | None]:
        """Rows as this process alone would take them, and why the plan changes to them, if it does."""
        state = self._phases[phase]
        batch_size = min(batch.rows, self.fixed.get(phase, batch.rows))
        if self._obeys and phase in self.fixed:
            state.rows = batch_size
            return batch_size, None
        known = phase if self.knows(phase) or not like else like
        if not self.knows(known):
            return min(batch_size, self.group_size, state.most or batch_size), None
        formula, room = self._phases[known].formula, self.device.room_bytes() + self._kept_bytes(phase)
        growth = GROWTH[formula.has_one_size]

        def largest(fits: Callable[[int], bool], at_most: int) -> int:
            return largest_rows(fits, batch_size=at_most, group_size=self.group_size) or 1

        def fits(rows: int) -> bool:
            return self.needs(known, batch._replace(rows=rows)) <= room

        def in_reach(rows: int) -> bool:
            # By rows, too: where texts turn out shorter than they may be, so many tokens are never seen.
            tokens = self.positions(batch._replace(rows=rows))
            return tokens <= growth * formula.most_tokens or rows <= growth * formula.most_rows

        before, again = state.rows, state.went_well >= AGAIN_AFTER
        if before is not None and not state.explores and not again:
            rows = largest(fits, min(before, batch_size))
        else:
            most = min(batch_size, (1 + again) * state.most) if state.most else batch_size
            rows = largest(lambda rows: in_reach(rows) and fits(rows), most)
            more = rows + (self.group_size if rows >= self.group_size else 1)
            state.explores = rows == batch_size or (rows < most and fits(more))  # only not seen yet
            if formula.has_one_size and not state.explores and rows > 1 and in_reach(2 * rows):
                # All of it is taken to grow with the rows: half as many tell how much does.
                rows, state.explores = smaller_rows(rows, self.group_size) or 1, True
            elif rows < batch_size:
                rows = even_rows(rows, batch_size=batch.rows, group_size=self.group_size)
            if again:
                state.went_well, state.most = 0, None if rows == batch_size or not state.most else most
        if before is None or rows != batch_size or rows > before:  # a smaller batch leaves the plan as it is
            why = f"longer texts, or less room, of {self.device.budget()}"
            if before is not None and rows > before:
                why = "room for all" if rows == batch_size else "room for more"
            return rows, why
        return rows, None

    def _change(self, phase: str, rows: int, why: str) -> None:
        state = self._phases[phase]
        before, state.rows = state.rows, rows
        if before is not None and rows != before:
            logger.info("plan: {} {} -> {} rows at once: {}", phase, before, rows, why)
            state.reason = f"{before} -> {rows}: {why}"
        if before is None or rows < before:
            state.went_well = 0

    def plan_again(self) -> dict[str, tuple[int, Size]]:
        """Of each phase that was seen, the rows that its next pass takes, and of how large a batch."""
        known = {phase: state.batch for phase, state in self._phases.items() if self.knows(phase)}
        return {phase: (self.plan(phase, batch), batch) for phase, batch in known.items() if batch.rows}

    def reconsider(self, phase: str) -> None:
        """Plan anew what was planned from less, before a run begins."""
        self._phases[phase].rows, self._phases[phase].explores = None, True

    def planned(self) -> dict[str, int]:
        """Rows at once by phase, as planned last."""
        return {phase: state.rows for phase, state in self._phases.items() if state.rows is not None}

    # ------------------------------------------------------------------------------------------- passes

    def run(
        self,
        phase: str,
        work: Callable[[int], T],
        batch: Size,
        *,
        like: str = "",
        took: Callable[[int, T], Size] | None = None,
        discard: Callable[[], None] = lambda: None,
        kv_growth: Sequence[tuple[int, int]] = (),
        warms: bool = False,
    ) -> T:
        """`work(rows)`, and where memory runs out once more with fewer rows, as of `survive`.

        batch: all rows, with the tokens of the longest. took: the largest pass that it was, where only the
        result tells; the batch then says the most that there may be. kv_growth: filled by `work`. warms:
        whether all of the batch is to be tried at once, and counted exactly, to learn from it.
        """
        state, errors = self._phases[phase], list[str]()
        planned = batch.rows if warms else self.plan(phase, batch, like=like)

        def measured(rows: int) -> T:
            size, left = batch._replace(rows=min(rows, batch.rows)), self._kept_bytes(phase)
            with self.device.measure(exact=warms or self._counts(phase, size, batch.rows)) as peak:
                result = work(rows)
            if peak.added_bytes is not None:
                is_typical = state.kept is None or not state.kept.is_oversized
                peak.added_bytes = peak.added_bytes + left if is_typical else None
                state.counted += not warms
            size = took(rows, result) if took else size
            self._note(phase, size, peak, retries=len(errors), kv_growth=kv_growth)
            return result

        result, rows = survive(
            measured, planned, phase=phase, group_size=self.group_size, discard=discard,
            on_retry=errors.append, replays=self._replays,
        )  # fmt: skip
        if not errors:
            state.unlucky, state.went_well = 0, state.went_well + 1
            return result
        state.unlucky = state.unlucky + 1 if rows == planned else 0
        if rows < planned or state.unlucky > 1:
            most = rows if rows < planned else smaller_rows(rows, self.group_size) or 1
            self._ran_out(phase, most, errors[-1])
        return result

    def _ran_out(self, phase: str, most: int, error: str) -> None:
        """No more than so many rows are taken for a while."""
        state = self._phases[phase]
        self._change(phase, most, f"memory ran out ({error})")
        state.most, state.went_well, state.unlucky, state.explores = most, 0, 0, False

    @contextmanager
    def rows(self, phase: str, batch: Size) -> Iterator[int]:
        """For a loop of one's own: gives the rows to take at once, and measures what is done inside."""
        rows = self.plan(phase, batch)
        with self.watch(phase, batch._replace(rows=rows)):
            yield rows

    @contextmanager
    def watch(self, phase: str, size: Size) -> Iterator[None]:
        """Measure what is done in one piece and not again, such as the optimizer's step.

        An error goes its way; one of memory is remembered, so that there are fewer rows the next time.
        """
        state = self._phases[phase]
        try:
            with self.device.measure(exact=self._counts(phase, size, size.rows)) as peak:
                yield
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out(phase, smaller_rows(size.rows, self.group_size) or 1, type(error).__name__)
            raise
        state.counted += peak.added_bytes is not None
        self._note(phase, size, peak)
        state.went_well += 1

    def _counts(self, phase: str, size: Size, batch_size: int) -> bool:
        """Whether tensors are counted one by one: it takes as long in a pass of one row as in a hundred."""
        state = self._phases[phase]
        new = state.counted < EXACT_RUNS and batch_size <= 4 * size.rows
        return new or self.positions(size) > LONGER * state.formula.most_tokens

    def _note(
        self,
        phase: str,
        size: Size,
        peak: Peak,
        *,
        retries: int = 0,
        kv_growth: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Keep what a pass was predicted and measured to add, and learn from it."""
        state, added = self._phases[phase], peak.added_bytes
        predicted = int(self.predict(phase, size)) if self.knows(phase) else None
        done = Pass(
            phase, size.rows, size.tokens + size.shared, predicted, added, peak.process_bytes, peak.seconds,
            retries, state.reason, list(kv_growth), size.shared, size.computed,
        )  # fmt: skip
        self._passes.append(done)
        state.reason = None
        if added is None and predicted is None:  # more than its tensors took, but nothing else is known
            added = max(0, peak.process_bytes - peak.used_before_bytes)
        if added is not None:
            self.see(phase, size, added)
        tensors = self.predict(phase, size) if added is None else added
        if peak.process_bytes > peak.process_before_bytes:
            # What was there before, such as what others have freed, is none of this phase's.
            beyond = peak.process_bytes - max(peak.process_before_bytes, peak.used_before_bytes + tensors)
            state.slack.append((self.positions(size), max(0.0, beyond) / max(1.0, tensors)))

    def take_passes(self) -> list[Pass]:
        """What was measured since they were last taken."""
        passes, self._passes = self._passes, []
        return passes

    # -------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """What was seen, and rows, which are state: the parts of a step's sums depend on them."""
        return {
            phase: {
                "seen": [*map(list, state.formula.seen)],
                "slack": [*map(list, state.slack)],
                **{name: getattr(state, name) for name in _STORED},
            }
            for phase, state in self._phases.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as a checkpoint has it, with its rows; one of an older version has none."""
        for phase, stored in state.items():
            if "seen" not in stored:
                continue
            known = self._phases[phase]
            if known.rows is not None and stored["rows"] not in (None, known.rows):
                logger.info(
                    "plan: {} {} rows at once, as before, instead of {}", phase, stored["rows"], known.rows
                )
            known.formula = Formula(stored["seen"])
            known.slack = deque(((int(tokens), share) for tokens, share in stored["slack"]), REMEMBERED)
            for name in _STORED:
                setattr(known, name, stored[name])
