"""Rows that fit, in a loop that nothing is known about: no trace, only what its passes have held."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from loguru import logger

from grpo.memory.budget import Budget, make_budget
from grpo.memory.monitor import MemoryMonitor
from grpo.memory.observed import Observed
from grpo.memory.planner import even_rows, largest_rows, smaller_rows
from grpo.memory.recovery import Retry, is_out_of_memory, survive

T = TypeVar("T")
FIRST_SLACK = 0.1
"""What a process is taken to hold beside its tensors, as a share of theirs, before it was measured."""
REMEMBERED = 5
"""Such shares that were measured, the newest; the largest counts."""
EXACT_PASSES, LONGER = 3, 1.1
"""Passes whose tensors are counted one by one where the allocator keeps no statistics: the first, and those
so many times the largest that was counted.
"""
GROWTH = {1: 2, 2: 4}
"""Times the most rows that were seen, by how many numbers of rows were: what is tried at once."""
AGAIN_AFTER = 50
"""Passes in a row that went well, after which more rows than once ran out of memory are tried."""


@dataclass(frozen=True)
class Pass:
    """Rows that were done at once, and what the process held then. Bytes."""

    phase: str
    rows: int
    tokens: int
    """Of the longest row."""
    predicted_bytes: int | None
    """None: it was the first of its phase."""
    error_bytes: int
    peak_bytes: int
    retries: int


@dataclass
class _Phase:
    observed: Observed = field(default_factory=Observed)
    slack: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Rows times tokens, and the share of its tensors that the process took beside them, where it grew."""
    most: int | None = None
    """Rows that may be taken, after more have run out of memory."""
    went_well: int = 0
    """Times in a row since."""

    def ran_out(self, most: int) -> None:
        """No more than so many rows are taken for a while."""
        self.most, self.went_well = most, 0

    def learn(self, rows: int, tokens: int, added: int | None, grown: int, expected: float) -> None:
        """From a pass that went well. Bytes.

        added: by its tensors, None where they were not counted. grown: by the process, 0 where it has not.
        """
        if added is None and grown > expected:
            added = grown  # more than its tensors took, but it is what counts
        if grown and self.observed:  # the first time libraries are loaded and kernels compiled
            tensors = added or self.observed.predict(rows, tokens)[0]
            self.slack.append((rows * tokens, grown / max(1.0, tensors) - 1))
        if added is not None:
            self.observed.add(rows, tokens, added)
        self.went_well += 1

    def predict(self, rows: int, tokens: int, *, on_host: bool) -> tuple[float, float]:
        """What such a pass adds to the process, and the error to count with.

        on_host: memory is the process's, which holds more than its tensors.
        """
        added, error = self.observed.predict(rows, tokens)
        shares = [share for size, share in self.slack if 2 * size >= self.observed.most_tokens]
        return (1 + (max(shares, default=FIRST_SLACK) if on_host else 0.0)) * added, error


class Fit:
    """How many rows of each phase to take at once: one group first, then more, as long as they fit.

    What a phase adds is measured, and a formula of its rows and their tokens fitted to it (observed.py); a
    plan counts with the formula's error. No more than twice, later four times the rows that have been seen
    are tried at once.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        group_size: int = 1,
        utilization: float = 0.85,
        limit_bytes: int | None = None,
        replays: bool = True,
        agree: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        """utilization: share of the device that may be held. limit_bytes: the most, which is not enforced.

        replays: whether `run` may do again what ran out of memory, see `survive`. agree: the rows that all
        processes take, of what this one would, where they have to take as many.
        """
        self._monitor = MemoryMonitor(torch.device(device))
        self._group_size, self._utilization = group_size, utilization
        self._limit_bytes = limit_bytes
        self._replays, self._agree = replays, agree
        self._phases: defaultdict[str, _Phase] = defaultdict(_Phase)
        self._passes: list[Pass] = []

    @contextmanager
    def rows(self, phase: str, batch_size: int, *, tokens: int = 1) -> Iterator[int]:
        """Inside, what `phase` holds is measured; gives the rows to take at once, at most `batch_size`.

        Whole groups, or a divisor of one. tokens: of the longest row, where rows differ. An error goes its
        way; one of memory is remembered, so that the next time there are fewer.
        """
        rows = self._agree(self.plan(phase, batch_size, tokens=tokens))
        try:
            with self._measured(phase, rows, tokens) as took:
                yield rows
                took(tokens, 0)
        except Exception as error:
            if is_out_of_memory(error):
                self._phases[phase].ran_out(smaller_rows(rows, self._group_size) or 1)
            raise

    def run(
        self,
        phase: str,
        work: Callable[[int], T],
        batch_size: int,
        *,
        tokens: int = 1,
        took: Callable[[T], int] | None = None,
        discard: Callable[[], None] = lambda: None,
    ) -> T:
        """`work(rows)`, and where memory runs out once more with fewer rows, as of `survive`.

        took: tokens of the longest row, where only the result tells; `tokens` is then the most there may be.
        """
        retries: list[Retry] = []

        def retried(retry: Retry) -> None:
            retries.append(retry)
            if retry.next_rows < retry.rows:  # it was not for once
                self._phases[phase].ran_out(retry.next_rows)

        def measured(rows: int) -> T:
            with self._measured(phase, rows, tokens) as done:
                result = work(rows)
                done(tokens if took is None else took(result), len(retries))
            return result

        rows = self._agree(self.plan(phase, batch_size, tokens=tokens))
        result, _ = survive(
            measured, rows, phase=phase, group_size=self._group_size, discard=discard,
            on_retry=retried, replays=self._replays,
        )  # fmt: skip
        return result

    def plan(self, phase: str, batch_size: int, *, tokens: int = 1) -> int:
        """The rows that the next pass of a phase takes at once."""
        state = self._phases[phase]
        most = min(batch_size, batch_size if state.most is None else state.most)
        observed = state.observed
        if not observed:
            return min(most, self._group_size)
        tried = GROWTH[min(2, observed.sizes)] * observed.most_rows
        room = self.budget().usable_bytes - self._monitor.used_bytes()

        def fits(rows: int) -> bool:
            added, error = self._predict(phase, rows, tokens)
            return rows <= tried and added + error <= room

        if fits(most):
            return most
        found = largest_rows(fits, batch_size=most, group_size=self._group_size) or 1
        if observed.sizes == 1 and 1 < found <= observed.most_rows:
            # All of it is taken to grow with the rows: half as many tell how much does.
            return smaller_rows(found, self._group_size) or 1
        return even_rows(found, batch_size=batch_size, group_size=self._group_size)

    def predict(self, phase: str, rows: int, *, tokens: int = 1) -> tuple[float, float]:
        """Bytes that the process will hold at the peak of such a pass, and their error.

        ValueError before the phase was measured.
        """
        added, error = self._predict(phase, rows, tokens)
        return self._monitor.used_bytes() + added, error

    def ran_out(self, phase: str) -> bool:
        """Whether its rows are fewer than would fit, as memory has run out."""
        return self._phases[phase].most is not None

    def budget(self) -> Budget:
        """What this process may hold now, beside whatever others do."""
        memory = self._monitor.memory()
        return make_budget(memory, utilization=self._utilization, limit_bytes=self._limit_bytes)

    def take_passes(self) -> list[Pass]:
        """What was measured since they were last taken."""
        passes, self._passes = self._passes, []
        return passes

    def _predict(self, phase: str, rows: int, tokens: int) -> tuple[float, float]:
        on_host = self._monitor.device.type in ("cpu", "mps")  # elsewhere `utilization` leaves room
        return self._phases[phase].predict(rows, tokens, on_host=on_host)

    @contextmanager
    def _measured(self, phase: str, rows: int, tokens: int) -> Iterator[Callable[[int, int], None]]:
        """Gives what takes the tokens that it were and the retries, when all went well."""
        state, monitor = self._phases[phase], self._monitor
        observed, used = state.observed, monitor.used_bytes()
        expected = self._predict(phase, rows, tokens) if observed else None
        exact = len(observed) < EXACT_PASSES or rows * tokens > LONGER * observed.most_tokens
        done: list[tuple[int, int]] = []
        with monitor.phase(exact=exact) as reading:
            yield lambda tokens, retries: done.append((tokens, retries))
        ((tokens, retries),) = done
        held = reading.process_before_bytes
        predicted, unsure = (max(held, int(used + expected[0])), int(expected[1])) if expected else (None, 0)
        self._passes.append(Pass(phase, rows, tokens, predicted, unsure, reading.process_bytes, retries))
        grown = reading.process_bytes - used if reading.process_bytes > held else 0
        state.learn(rows, tokens, reading.added_bytes, grown, sum(expected or (0.0, 0.0)))
        if state.most is not None and state.went_well >= AGAIN_AFTER:
            logger.info("{}: more than {} rows are tried again", phase, state.most)
            state.most, state.went_well = 2 * state.most, 0
