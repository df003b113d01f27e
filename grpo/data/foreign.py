"""What code of the user's may change of this process, and is put back: it may do anything."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Afterwards folder, umask, `sys.path`, signal handlers, timer and torch's defaults are as they were.

    Code that is run to be judged goes into folders of its own, and ends what takes too long by signals.
    """
    path, mask, folder = list(sys.path), os.umask(0o077), -1
    os.umask(mask)
    with suppress(OSError):  # of a folder that is gone, or may not be read
        folder = os.open(".", os.O_RDONLY)
    handlers, timer, defaults = _handlers(), signal.getitimer(signal.ITIMER_REAL), _torch_defaults()
    try:
        yield
    finally:
        if folder >= 0:
            os.fchdir(folder)
            os.close(folder)
        os.umask(mask)
        sys.path[:] = path
        signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in _handlers().items():
            if handler is not handlers.get(number, handler):
                signal.signal(number, handlers[number])
        if (now := _torch_defaults()) != defaults:
            torch = sys.modules["torch"]
            torch.set_default_dtype(defaults[0] or torch.float32)
            torch.set_num_threads(defaults[1] or now[1])


def _handlers() -> dict[int, Any]:
    """By signal, those that Python knows, where they can be set: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    known = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in known.items() if handler is not None}


def _torch_defaults() -> tuple[Any, int]:
    """The default dtype and the number of threads; nothing and 0 where torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    return (torch.get_default_dtype(), torch.get_num_threads()) if torch else (None, 0)
