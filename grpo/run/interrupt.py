"""Ctrl-C once: stop after the step in progress. Twice: stop at once."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from grpo.environment import launched_processes

_SAME_S = 1.0


class StopRequest:
    """Whether the user has asked to stop."""

    requested = False
    begun = False
    """Whether there is a step that could be finished: before, one Ctrl-C ends all at once."""


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """While inside, the first SIGINT or SIGTERM only sets the flag; the second raises KeyboardInterrupt.

    The first does where nothing has begun.

    Of several processes, what comes within a second of the first is the first again: a launcher passes on
    to its processes the Ctrl-C that the terminal has sent them already.
    """
    stop = StopRequest()
    since = math.inf
    rank, size = launched_processes()
    same_s = _SAME_S if size > 1 else 0.0

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        if not stop.begun or (stop.requested and time.monotonic() - since >= same_s):
            raise KeyboardInterrupt
        if stop.requested:
            return
        stop.requested, since = True, time.monotonic()
        if rank == 0:
            with suppress(OSError):  # not through loguru, which may be at work on a line just now
                os.write(2, b"stopping after this step; once more to stop at once\n")

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
