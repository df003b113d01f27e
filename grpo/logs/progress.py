"""How much of a run is done, by whichever of its steps and its minutes is further: annealing goes by that."""

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which loads torch: a wrong setting need not wait for it
    from grpo.distributed import World

FORECAST_STEPS = 4
"""Steps after which it is said what will end the run; the first is slower than the others."""


class Progress:
    """Steps and minutes that are used up. Evaluations count as training, pauses between two starts do not.

    now: seconds, of a clock that only goes forward.
    """

    def __init__(
        self, steps: int, minutes: float | None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        if minutes is not None and math.isinf(minutes):
            minutes = None  # no limit
        self.steps, self._limit_s, self._now = steps, 60 * (minutes or 0), now
        self._began: float | None = None
        self._before_s = 0.0  # of earlier starts
        self._time_share = 0.0  # of the minutes, the same in all processes
        self._first: tuple[int, float] | None = None  # step of this start, and when it was done
        self.of_steps = "" if minutes else f" of {steps}"
        """The text behind a step's number: none where it may be the minutes that end the run."""

    def begin(self) -> None:
        """Training begins, or goes on."""
        self._began = self._now()

    @property
    def trained_s(self) -> float:
        return self._before_s + (0.0 if self._began is None else self._now() - self._began)

    def _share_of_time(self) -> float:
        return min(1.0, self.trained_s / self._limit_s) if self._limit_s else 0.0

    def is_over(self, finished: int, world: "World") -> bool:
        """Whether steps or minutes are used up, by the first process's clock; a collective."""
        if self._limit_s:
            self._time_share = world.from_main("the time", self._share_of_time())
        return finished >= self.steps or self._time_share >= 1

    def position(self, finished: int) -> float:
        """In steps: so many are finished, or as large a share of all as there was of the minutes."""
        return max(float(finished), self._time_share * self.steps)

    def share(self, finished: int) -> float:
        """Returns the share of the run that is done now, 1 at most."""
        return min(1.0, max(finished / self.steps, self._share_of_time()))

    def forecast(self, finished: int) -> str | None:
        """Once, some steps after the first that was seen: what will end the run. None without minutes."""
        self._first = self._first or (finished, self.trained_s)
        first, since = self._first
        if not self._limit_s or finished - first != FORECAST_STEPS - 1:
            return None
        step_s = (self.trained_s - since) / (finished - first)
        reached = finished + int((self._limit_s - self.trained_s) / step_s)
        if reached < self.steps:
            return f"minutes will end this run, after about {reached} of {self.steps} steps"
        left = (self.steps - finished) * step_s / 60
        return f"steps will end this run, in about {left:.1f} minutes; it has {self._limit_s / 60:g}"

    def ended(self, finished: int, rate: float) -> str:
        """Says how far the run has come, and where minutes are limited, what ended it and with which rate."""
        if not self._limit_s:
            return f"done after {finished} steps"
        by = "steps" if finished >= self.steps else "minutes"
        return f"ended by {by} after {finished} of {self.steps} steps, learning rate {rate:.2g}"

    def state(self, finished: int) -> dict[str, float]:
        """For a checkpoint."""
        return {"trained_s": self.trained_s, "progress": self.share(finished)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._before_s = state.get("trained_s", 0.0)  # which older checkpoints lack
        self._time_share = self._share_of_time()
