"""Ctrl-C once: stop after the step in progress. Twice: stop at once."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from grpo.environment import launched_processes

_SAME_S = 1.0
"""A launcher passes on to its processes the Ctrl-C that the terminal has sent them already: so soon after."""


class StopRequest:
    """Whether the user has asked to stop, and whether there is a step that could be finished."""

    requested = False
    begun = False


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """While inside, the first SIGINT or SIGTERM only sets the flag; the second raises KeyboardInterrupt.

    In another thread than the main one, where Python sets no handlers, signals stay what they are.
    The first does where no step has begun. Of several processes, what comes within a second of the first is
    the first again.
    """
    stop, since = StopRequest(), math.inf
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    rank, size = launched_processes()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        again = stop.requested and (size == 1 or time.monotonic() - since >= _SAME_S)
        if again or not stop.begun:
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
