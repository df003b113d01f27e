"""Rows that fit, in a loop that nothing is known about: no trace, only what its passes have held."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from grpo.memory.budget import make_budget
from grpo.memory.monitor import MemoryMonitor
from grpo.memory.planner import even_rows, largest_rows, smaller_rows
from grpo.memory.recovery import is_out_of_memory, survive

T = TypeVar("T")
MARGIN = 1.1
"""Times what a row has taken: what the next may, which is longer perhaps."""
REMEMBERED = 20
"""Passes a phase is judged by, the newest."""
AGAIN_AFTER = 50
"""Passes in a row that went well, after which more rows than once ran out of memory are tried."""


@dataclass
class _Phase:
    seen: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Rows, and the bytes that they added to the process."""
    most: int | None = None
    """Rows that may be taken, after more have run out of memory."""
    went_well: int = 0
    """Times in a row since."""


class Fit:
    """How many rows of each phase to take at once: one group first, then more, as long as they fit.

    All that a phase added is taken to grow with its rows, which is rather too much than too little; no
    more than twice the rows that have been seen are tried at once.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        group_size: int = 1,
        utilization: float = 0.85,
        limit_bytes: int | None = None,
    ) -> None:
        """utilization: share of the device that may be held. limit_bytes: the most, which is not enforced."""
        self._monitor = MemoryMonitor(torch.device(device))
        self._group_size, self._utilization = group_size, utilization
        self._limit_bytes = limit_bytes
        self._phases: defaultdict[str, _Phase] = defaultdict(_Phase)

    @contextmanager
    def rows(self, phase: str, batch_size: int) -> Iterator[int]:
        """Inside, what `phase` holds is measured; gives the rows to take at once, at most `batch_size`.

        Whole groups, or a divisor of one. An error goes its way; one of memory is remembered, so that the
        next time there are fewer.
        """
        rows = self.plan(phase, batch_size)
        with self._measured(phase, rows):
            yield rows

    def run(
        self,
        phase: str,
        work: Callable[[int], T],
        batch_size: int,
        *,
        discard: Callable[[], None] = lambda: None,
    ) -> T:
        """`work(rows)`, and where memory runs out once more with fewer rows, as of `survive`."""

        def measured(rows: int) -> T:
            with self._measured(phase, rows):
                return work(rows)

        rows = self.plan(phase, batch_size)
        result, _ = survive(measured, rows, phase=phase, group_size=self._group_size, discard=discard)
        return result

    def plan(self, phase: str, batch_size: int) -> int:
        """The rows that the next pass of a phase takes at once."""
        state = self._phases[phase]
        most = min(batch_size, batch_size if state.most is None else state.most)
        if not state.seen:
            return min(most, self._group_size)
        largest = max(rows for rows, _ in state.seen)
        telling = [(rows, added) for rows, added in state.seen if 2 * rows >= largest]
        row_bytes = MARGIN * max(added / rows for rows, added in telling)
        room = self.usable_bytes() - self._monitor.in_use_bytes()
        found = largest_rows(
            lambda rows: rows <= 2 * largest and rows * row_bytes <= room,
            batch_size=most, group_size=self._group_size,
        )  # fmt: skip
        rows = min(most, 1 if found is None else found)
        return even_rows(rows, batch_size=batch_size, group_size=self._group_size)

    def usable_bytes(self) -> int:
        """What this process may hold now, beside whatever others do."""
        memory = self._monitor.memory()
        return make_budget(memory, utilization=self._utilization, limit_bytes=self._limit_bytes).usable_bytes

    @contextmanager
    def _measured(self, phase: str, rows: int) -> Iterator[None]:
        state = self._phases[phase]
        before = self._monitor.in_use_bytes()
        try:
            with self._monitor.phase() as reading:
                yield
        except Exception as error:
            if is_out_of_memory(error):
                state.most, state.went_well = smaller_rows(rows, self._group_size) or 1, 0
            raise
        state.seen.append((rows, max(0, reading.process_bytes - before)))
        state.went_well += 1
        if state.most is not None and state.went_well >= AGAIN_AFTER:
            state.most, state.went_well = 2 * state.most, 0
