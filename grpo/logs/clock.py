"""Measures a step's time, part by part."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by phase since the last `lap`; a phase within another is no part of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of phases that ended within the one that runs
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what happens inside towards `phase`, up to the accelerator's last kernel.

        After an error nothing is waited for: a sum over processes one of which has died never ends.
        """
        start, outer_inner = time.perf_counter(), self._inner
        self._inner = 0.0
        try:
            yield
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
        finally:
            seconds = time.perf_counter() - start
            self._seconds[phase] += seconds - self._inner
            self._inner = outer_inner + seconds

    def lap(self) -> dict[str, float]:
        """Seconds of each phase, of what lay outside them, and in all (`step_time`); starts anew."""
        start, self._start = self._start, time.perf_counter()
        seconds, self._seconds = self._seconds, defaultdict(float)
        total = self._start - start
        split = {f"timing/{phase}_s": value for phase, value in seconds.items()}
        return {**split, "timing/other_s": total - sum(seconds.values()), "step_time": total}
