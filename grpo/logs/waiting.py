"""Progress of long work: a bar, where somebody watches, or a log line that says what it is.

Only entry points say where (`show_on`), as with logging. A bar goes away when it is full.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SLOW_S = 2.0
"""From when on it is said what is being done."""
Done = Callable[[float], None]
"""Told what share of the work is done."""

_console: Console | None = None


def show_on(console: Console | None) -> None:
    """Chooses the console for bars, if that is a terminal; None: no bars."""
    global _console
    _console = console if console is not None and console.is_terminal else None


@contextmanager
def log_if_slow(what: str) -> Iterator[None]:
    """A log line, "loading the model …", where that takes longer than `SLOW_S` seconds."""
    timer = threading.Timer(SLOW_S, logger.info, ("{} …", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_bar(what: str) -> Iterator[Done]:
    """For the time of a task that says how far it is, from 0 to 1."""
    columns = TextColumn(what), BarColumn(20), TimeRemainingColumn()
    with Progress(*columns, console=_console, transient=True, disable=_console is None) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, completed=min(1, share))
