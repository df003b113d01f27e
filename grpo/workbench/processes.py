"""Work in a process of its own: what it finds comes back line by line, and its death is a result.

A worker is a module that is run with one argument, its task as JSON, and prints JSON lines. Running out
of memory spoils nothing but its own process, whether that raises, or the system ends it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from grpo.memory import is_out_of_memory

Status = Literal["ok", "out of memory", "diverged", "failed"]
_TAIL_LINES = 3
_THREADS_NEED_MEMORY = ("Thread creation failed", "can't start new thread", "std::bad_alloc")


@dataclass(frozen=True)
class Ended:
    """How a worker ended, and in its own words why, if it did not end well."""

    status: Status
    message: str | None = None


def run_worker(
    module: str,
    task: Mapping[str, Any],
    on_record: Callable[[dict[str, Any]], None],
    *,
    limited: bool = False,
) -> Ended:
    """Run `python -m module TASK`, and hand on each record it prints.

    limited: under a limit of memory, where a death by signal is taken for running out of it.
    Ctrl-C ends the worker as well.
    """
    ended: Ended | None = None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(task)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                record = json.loads(line)
                if "ended" in record:
                    ended = Ended(record["ended"], record["message"])
                else:
                    on_record(record)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        text = errors.read()
    if ended is not None:
        return ended
    return Ended(*_death(code, text, limited))


def _death(code: int, errors: str, limited: bool) -> tuple[Status, str]:
    """What the end of a process says that did not say it itself."""
    last = "; ".join(errors.strip().splitlines()[-_TAIL_LINES:])
    if code == -signal.SIGKILL:
        return "out of memory", "the system ended the process (SIGKILL), as it does when memory runs out"
    if limited and (code < 0 or any(words in errors for words in _THREADS_NEED_MEMORY)):
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return "out of memory", f"ended under its limit of memory ({name}) {last}".strip()
    return "failed", last or f"exit status {code}"


@contextmanager
def worker() -> Iterator[tuple[dict[str, Any], Callable[[Mapping[str, Any]], None]]]:
    """For a worker's main: its task, and what prints a record. Says how it ended, if it can.

    Everything else that is printed, by libraries in C as well, goes to stderr.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(record: Mapping[str, Any]) -> None:
        print(json.dumps(record), file=out, flush=True)

    def end(status: Status, message: str | None = None) -> None:
        say({"ended": status, "message": message})

    try:
        yield json.loads(sys.argv[1]), say
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        if is_out_of_memory(error):
            end("out of memory", reason)
        elif isinstance(error, FloatingPointError):
            end("diverged", reason)
        else:
            end("failed", f"{type(error).__name__}: {reason}")
            raise
    else:
        end("ok")
