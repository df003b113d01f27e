"""How many rows of each phase are on the device at once: the only planner.

A run, a plan for a card that is not there, find-max and TRL's trainer share it. What a phase adds at its peak
is measured, or traced, and a formula fitted to it: for R rows, whose pass computes S tokens in all,

    bytes = a + b·R + c·S          none of them negative

gradients and what is there whatever the rows; what a row takes however long it is (a line of logits); and
what its tokens do (activations, keys and values). Peaks are the largest of several such formulas, one a
moment of the phase, hence convex in rows: no more than four times the tokens that have been seen are tried
at once.
"""

import copy
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from loguru import logger
from scipy.optimize import nnls

from grpo.memory.budget import Budget
from grpo.memory.recovery import Retry, is_out_of_memory, survive
from grpo.memory.rows import even_rows, largest_rows, positions, smaller_rows

T = TypeVar("T")
EXACT_RUNS, LONGER = 2, 1.1
"""Passes whose tensors are counted one by one where the allocator keeps no statistics: those of a warm-up,
the first of each phase, and those so many times the largest that was counted.
"""
GROWTH = {1: 2, 2: 4}
"""Times the most tokens or rows that were seen, by how many numbers of rows were: what is tried at once."""
AGAIN_AFTER = 50
"""Passes in a row that went well, after which more rows than were cut down to are tried."""
REMEMBERED = 5
"""Measurements of sizes alike, the newest; and shares of what a process held beside its tensors."""
_ALIKE = 1.25
"""Sizes are alike within this factor."""
_RELUCTANCE = 0.03
"""Of the fit to say that bytes are not the tokens': only if the measurements do."""


class Size(NamedTuple):
    """Of a pass: rows, the tokens that each computes, at most, and those computed once for a group's rows."""

    rows: int
    tokens: int = 1
    shared: int = 0


_NOTHING = Size(0)


@dataclass
class Peak:
    """What a pass was measured to hold at its peak, in bytes; filled in when it ends.

    added_bytes: by tensors, beyond those that were there; None where they were not counted.
    process_bytes: by the process, context and libraries included; process_before_bytes when it began.
    allocated_bytes, reserved_bytes: by torch's allocator (host: the resident set).
    """

    added_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    process_bytes: int = 0
    process_before_bytes: int = 0


class Meter(Protocol):
    """What a plan asks of a device, whether it is there (`Device`) or not (`grpo.plan.trace.Card`)."""

    slack: float
    """What is held beside tensors, as a share of them, before that is measured."""

    def budget(self) -> Budget:
        """What this process may hold now, beside whatever others do."""

    def used_bytes(self) -> int:
        """What is not free to whatever this process does next."""

    def measure(self, *, exact: bool) -> Any:
        """A context that gives a `Peak`. exact: count tensors one by one where nothing else does."""

    def neighbours(self) -> str:
        """Who else holds memory there, for an error message; empty if nobody is known to."""


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

    @property
    def size(self) -> Size:
        return Size(self.rows, self.tokens - self.shared, self.shared)

    def as_dict(self) -> dict[str, Any]:
        """A line of memory.jsonl."""
        return {name: value for name, value in asdict(self).items() if name != "shared"}


class Formula:
    """Bytes that a phase adds, from what was seen of it; better after each `see`."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}
        self.most = self.most_rows = 0
        """Tokens, and rows, of the largest passes that were seen."""
        self._found: np.ndarray | None = None
        """What tokens, rows and 1 are multiplied by."""
        self._sizes = self._off = np.zeros(0)
        """Of each that was seen: tokens and rows, and what was measured as a share of what is found."""

    def __len__(self) -> int:
        return sum(map(len, self._seen.values()))

    @property
    def sizes(self) -> int:
        """Numbers of rows that were seen, those alike counted once."""
        return len({rows for rows, _ in self._seen})

    def see(self, rows: int, tokens: int, num_bytes: float) -> None:
        """A pass over `rows`, of `tokens` in all, has added so much at its peak."""
        alike = int(math.log(rows) / math.log(_ALIKE)), int(math.log(max(1, tokens)) / math.log(_ALIKE))
        seen = self._seen.setdefault(alike, deque(maxlen=REMEMBERED))
        seen.append((float(tokens), float(rows), float(num_bytes)))
        self.most, self.most_rows, self._found = max(self.most, tokens), max(self.most_rows, rows), None

    def __call__(self, rows: int, tokens: int) -> float:
        """Bytes that such a pass adds. ValueError before anything was seen."""
        if not self._seen:
            raise ValueError("nothing was measured yet.")
        if self._found is None:
            seen = np.array([each for alike in self._seen.values() for each in alike])
            sizes, measured = np.c_[seen[:, :2], np.ones(len(seen))], seen[:, 2]
            scale, most = sizes.max(0), max(1.0, measured.max())
            # Where rows had one length, either of the first two columns explains the bytes: let tokens do.
            reluctance = _RELUCTANCE * np.diag([0.0, 1.0, 1.0])[1:]
            found, _ = nnls(np.r_[sizes / scale, reluctance], np.r_[measured / most, 0.0, 0.0])
            self._found = most * found / scale
            self._sizes, self._off = sizes[:, :2], measured / (sizes @ self._found).clip(min=1.0)
        return float(self._found @ (tokens, rows, 1.0)) * self._correction(rows, tokens)

    def _correction(self, rows: int, tokens: int) -> float:
        """By how much the formula, of peaks that bend, was off at sizes like this one."""
        far = np.abs(np.log(self._sizes / np.maximum(1, (tokens, rows)))).max(1)
        near = far < math.log(_ALIKE) if far.min() > 0 else far == 0  # what was seen itself is known
        return float(self._off[near].mean().clip(1 / _ALIKE, _ALIKE)) if near.any() else 1.0

    def state(self) -> list[list[float]]:
        """What was seen."""
        return [list(each) for alike in self._seen.values() for each in alike]

    @classmethod
    def of(cls, state: Sequence[Sequence[float]]) -> "Formula":
        """One that has seen the same."""
        formula = cls()
        for tokens, rows, num_bytes in state:
            formula.see(int(rows), int(tokens), num_bytes)
        return formula


@dataclass
class _Phase:
    formula: Formula = field(default_factory=Formula)
    rows: int | None = None
    """At once, as planned last."""
    batch: Size = _NOTHING
    """The largest that it was planned for."""
    explores: bool = True
    """Whether more would have been taken, had as many been seen."""
    most: int | None = None
    """Rows that may be taken, after more have run out of memory."""
    went_well: int = 0
    """Passes in a row since rows were cut down."""
    counted: int = 0
    """Of a run's own passes, those whose tensors were counted one by one."""
    unlucky: int = 0
    """Times in a row that memory ran out, and the same rows went well the second time."""
    slack: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Tokens, and the share of its tensors that the process took beside them, where it grew."""
    reason: str | None = None


class Fit:
    """Rows at once by phase: measured, planned, and after running out of memory done again with fewer.

    Rows are sticky: they change for a reason, which is one log line. Once a batch fits they grow no more; cut
    down, by memory that ran out, longer texts or neighbours, they are tried again after fifty passes.
    """

    def __init__(
        self,
        device: Meter,
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
        found = copy.deepcopy(self._phases[phase].formula)
        return lambda size: found(size.rows, self.positions(size))

    def knows(self, phase: str) -> bool:
        """Whether anything was seen of it."""
        return len(self._phases[phase].formula) > 0

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
        shares = [share for tokens, share in state.slack if 2 * tokens >= state.formula.most]
        return max(shares, default=self.device.slack)

    def room_bytes(self) -> int:
        """What phases may add now."""
        return self.device.budget().usable_bytes - self.device.used_bytes()

    # -------------------------------------------------------------------------------------------- plans

    def plan(self, phase: str, batch: Size, *, like: str = "") -> int:
        """The rows that the next pass takes at once. batch: all rows, with the tokens of the longest.

        like: a phase whose formula serves, too, until this one has its own.
        """
        state = self._phases[phase]
        state.batch = max(state.batch, batch)
        rows = self._plan(phase, batch, like)
        agreed = self._agree(rows)
        if agreed < rows:
            state.rows = agreed
        return agreed

    def plan_again(self) -> dict[str, tuple[int, Size]]:
        """Of each phase that was seen, the rows that its next pass takes, and of how large a batch."""
        known = {phase: state.batch for phase, state in self._phases.items() if self.knows(phase)}
        return {phase: (self.plan(phase, batch), batch) for phase, batch in known.items() if batch.rows}

    def _plan(self, phase: str, batch: Size, like: str) -> int:
        state = self._phases[phase]
        batch_size = min(batch.rows, self.fixed.get(phase, batch.rows))
        if self._obeys and phase in self.fixed:
            state.rows = batch_size
            return batch_size
        known = phase if self.knows(phase) or not like else like
        if not self.knows(known):
            return min(batch_size, self.group_size, state.most or batch_size)
        room, formula = self.room_bytes(), self._phases[known].formula
        growth = GROWTH[min(2, formula.sizes)]

        def fits(rows: int) -> bool:
            return self.needs(known, batch._replace(rows=rows)) <= room

        def was_seen(rows: int) -> bool:
            # By rows, too: where texts turn out shorter than they may be, so many tokens are never seen.
            tokens = self.positions(batch._replace(rows=rows))
            return tokens <= growth * formula.most or rows <= growth * formula.most_rows

        held, again = state.rows, state.went_well >= AGAIN_AFTER
        if held is not None and not state.explores and not again:
            wanted = min(held, batch_size)
            if fits(wanted):
                return wanted
            rows = self._largest(fits, wanted) or 1
        else:
            most = min(batch_size, (1 + again) * state.most) if state.most else batch_size
            rows = self._largest(lambda rows: was_seen(rows) and fits(rows), most) or 1
            more = rows + (self.group_size if rows >= self.group_size else 1)
            state.explores = rows == batch_size or (rows < most and fits(more))  # only not seen yet
            if formula.sizes == 1 and not state.explores and rows > 1 and was_seen(2 * rows):
                # All of it is taken to grow with the rows: half as many tell how much does.
                rows, state.explores = smaller_rows(rows, self.group_size) or 1, True
            elif rows < batch_size:
                rows = even_rows(rows, batch_size=batch.rows, group_size=self.group_size)
            if again:
                state.went_well, state.most = 0, None if rows == batch_size or not state.most else most
        if held is not None and rows != held and rows != batch_size:
            why = f"longer texts, or less room, of {self.device.budget()}" if rows < held else "room for more"
            self._change(phase, rows, why)
        elif held is not None and rows > held:
            self._change(phase, rows, "room for all")
        if held is None or rows != batch_size or rows > held:
            state.rows = rows
        return rows

    def _largest(self, fits: Callable[[int], bool], at_most: int) -> int | None:
        return largest_rows(fits, batch_size=at_most, group_size=self.group_size)

    def _change(self, phase: str, rows: int, why: str) -> None:
        state = self._phases[phase]
        if state.rows is not None and rows != state.rows:
            logger.info("plan: {} {} -> {} rows at once: {}", phase, state.rows, rows, why)
            state.reason = f"{state.rows} -> {rows}: {why}"
        if state.rows is None or rows < state.rows:
            state.went_well = 0

    def reconsider(self, phase: str) -> None:
        """Plan anew what was planned from less, before a run begins."""
        state = self._phases[phase]
        state.rows, state.explores = None, True

    def planned(self) -> dict[str, int]:
        """Rows at once by phase, as planned last."""
        return {phase: each.rows for phase, each in self._phases.items() if each.rows is not None}

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
        reused: Callable[[], int] = lambda: 0,
    ) -> T:
        """`work(rows)`, and where memory runs out once more with fewer rows, as of `survive`.

        batch: all rows, with the tokens of the longest. took: the largest pass that it was, where only the
        result tells; the batch then says the most that there may be. kv_growth: filled by `work`. reused:
        bytes that an earlier time has left, with which this one begins.
        """
        rows = self.plan(phase, batch, like=like)
        return self._survive(
            phase, work, rows, batch, took=took, discard=discard, kv_growth=kv_growth, reused=reused
        )

    def _survive(
        self,
        phase: str,
        work: Callable[[int], T],
        rows: int,
        batch: Size,
        *,
        took: Callable[[int, T], Size] | None = None,
        discard: Callable[[], None] = lambda: None,
        kv_growth: Sequence[tuple[int, int]] = (),
        reused: Callable[[], int] = lambda: 0,
        warms: bool = False,
    ) -> T:
        state, planned = self._phases[phase], rows
        retries: list[Retry] = []

        def measured(rows: int) -> T:
            largest = batch._replace(rows=min(rows, batch.rows))
            used, left = self.device.used_bytes(), reused()
            exact = warms or self._counts(phase, largest, batch.rows)
            start = time.perf_counter()
            with self.device.measure(exact=exact) as peak:
                result = work(rows)
            seconds = time.perf_counter() - start
            largest = took(rows, result) if took else largest
            added = None if peak.added_bytes is None else peak.added_bytes + left
            state.counted += added is not None and not warms
            self._note(phase, largest, added, used, peak, seconds, retries=len(retries), kv_growth=kv_growth)
            return result

        result, rows = survive(
            measured, rows, phase=phase, group_size=self.group_size, discard=discard,
            on_retry=retries.append, replays=self._replays,
        )  # fmt: skip
        state.reason = None
        if not retries:
            state.unlucky, state.went_well = 0, state.went_well + 1
            return result
        state.unlucky = state.unlucky + 1 if rows == planned else 0
        if rows < planned or state.unlucky > 1:
            most = rows if rows < planned else smaller_rows(rows, self.group_size) or 1
            self.ran_out(phase, most, retries[-1].error)
        return result

    def ran_out(self, phase: str, most: int, error: str) -> None:
        """No more than so many rows are taken for a while."""
        state = self._phases[phase]
        self._change(phase, most, f"memory ran out ({error})")
        state.rows = state.most = most
        state.went_well, state.unlucky, state.explores = 0, 0, False

    def warm(
        self, work: Callable[[str, Size], None], phase: str, size: Size, *, discard: Callable[[], None]
    ) -> None:
        """Learn from a pass of this size that `work` makes, or from one of fewer rows if it does not fit."""
        self._survive(
            phase, lambda rows: work(phase, size._replace(rows=rows)), size.rows, size,
            discard=discard, warms=True,
        )  # fmt: skip

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
        state, start = self._phases[phase], time.perf_counter()
        used, exact = self.device.used_bytes(), self._counts(phase, size, size.rows)
        try:
            with self.device.measure(exact=exact) as peak:
                yield
        except Exception as error:
            if is_out_of_memory(error):
                self.ran_out(phase, smaller_rows(size.rows, self.group_size) or 1, type(error).__name__)
            raise
        seconds = time.perf_counter() - start
        state.counted += peak.added_bytes is not None
        self._note(phase, size, peak.added_bytes, used, peak, seconds)
        state.reason, state.went_well = None, state.went_well + 1

    def _counts(self, phase: str, size: Size, batch_size: int) -> bool:
        """Whether tensors are counted one by one: it takes as long in a pass of one row as in a hundred."""
        state = self._phases[phase]
        new = state.counted < EXACT_RUNS and batch_size <= 4 * size.rows
        return new or self.positions(size) > LONGER * state.formula.most

    def _note(
        self,
        phase: str,
        size: Size,
        added: int | None,
        used: int,
        peak: Peak,
        seconds: float,
        *,
        retries: int = 0,
        kv_growth: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Keep what a pass was predicted and measured to add, and learn from it. used: bytes, before it."""
        predicted = int(self.predict(phase, size)) if self.knows(phase) else None
        done = Pass(
            phase, size.rows, size.tokens + size.shared, predicted, added, peak.process_bytes, seconds,
            retries, self._phases[phase].reason, list(kv_growth), size.shared,
        )  # fmt: skip
        self._passes.append(done)
        self._learn(phase, size, added, used, peak)

    def _learn(self, phase: str, size: Size, added: int | None, used: int, peak: Peak) -> None:
        if added is None and not self.knows(phase):
            added = max(0, peak.process_bytes - used)  # more than its tensors took, but nothing else is known
        if added is not None:
            self.see(phase, size, added)
        tensors = self.predict(phase, size) if added is None else added
        if peak.process_bytes > peak.process_before_bytes:
            # What was there before, such as what others have freed, is none of this phase's.
            beyond = peak.process_bytes - max(peak.process_before_bytes, used + tensors)
            slack = self._phases[phase].slack
            slack.append((self.positions(size), max(0.0, beyond) / max(1.0, tensors)))

    def take_passes(self) -> list[Pass]:
        """What was measured since they were last taken."""
        passes, self._passes = self._passes, []
        return passes

    def positions(self, size: Size) -> int:
        """Tokens that such a pass computes."""
        return positions(size.rows, size.tokens, size.shared, self.group_size)

    # -------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """What was seen, and rows, which are state: the parts of a step's sums depend on them."""
        return {
            phase: {
                "seen": each.formula.state(), "rows": each.rows, "most": each.most, "explores": each.explores,
                "went_well": each.went_well, "unlucky": each.unlucky, "counted": each.counted,
                "slack": [list(one) for one in each.slack],
            }
            for phase, each in self._phases.items()
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as a checkpoint has it, with its rows; one of an older version has none."""
        for phase, known in state.items():
            if "seen" not in known:
                continue
            own = self._phases[phase]
            own.formula = Formula.of(known["seen"])
            for name in ("most", "explores", "went_well", "unlucky", "counted"):
                setattr(own, name, known[name])
            own.slack = deque(((int(tokens), share) for tokens, share in known["slack"]), maxlen=REMEMBERED)
            if own.rows is not None and known["rows"] not in (None, own.rows):
                logger.info(
                    "plan: {} {} rows at once, as before, instead of {}", phase, known["rows"], own.rows
                )
            own.rows = known["rows"]
