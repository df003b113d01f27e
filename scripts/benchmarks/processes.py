"""Commands that may hang, or leave something behind."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_RUNNING: set[subprocess.Popen[bytes]] = set()


def run_to_end(command: Sequence[str], said: Path, timeout_s: float, **options: Any) -> int | None:
    """The exit status, None if it had to be ended; what is left of its processes is killed.

    said: what it prints. options: as of Popen.
    """
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, **options
        )
        _RUNNING.add(process)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def end_all() -> None:
    """Those that run, in whichever thread."""
    for process in [*_RUNNING]:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _RUNNING.discard(process)
