"""A run's calls to the disk, watched in its own process: one of them fails, or is where a kill comes.

Python's audit events see files that are opened, renamed, linked, and folders that are made; flushes and
safetensors' own writes are wrapped. Left out: single writes to a file that is open.
"""

import errno
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WATCHED = ("open", "os.rename", "os.mkdir", "os.symlink")
"""Names of Python's audit events; os.replace is a rename."""
_active: Callable[[], None] | None = None
_folder = ""


@dataclass
class Calls:
    """Counts what is done to files below a folder; from `fail_at` on, or there alone, `act` is called."""

    fail_at: int | None = None
    act: Callable[[], None] | None = None
    on_and_on: bool = False
    made: int = 0

    def __call__(self) -> None:
        self.made += 1
        if self.act and (self.made == self.fail_at or (self.on_and_on and self.made > (self.fail_at or 0))):
            self.act()


def disk_is_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def calls_watched(folder: Path, calls: Calls) -> Iterator[None]:
    """Inside, `calls` is called before each that opens a file below `folder` to write, flushes or renames."""
    global _active, _folder
    if not getattr(sys, "_grpo_faults", False):  # an audit hook cannot be taken away again
        sys.addaudithook(_hook)
        sys._grpo_faults = True  # type: ignore[attr-defined]
    flush, save = os.fsync, _savers()
    _active, _folder = calls, str(folder.resolve())

    def counted_flush(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_folder):
            calls()
        flush(descriptor)

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def counted_write(tensors: Any, file: Any, *args: Any, **options: Any) -> Any:
            calls()  # safetensors opens files out of Python's sight
            return write(tensors, file, *args, **options)

        return counted_write

    os.fsync = counted_flush  # type: ignore[assignment]
    for owner, name, write in save:
        setattr(owner, name, counted(write))
    try:
        yield
    finally:
        _active, os.fsync = None, flush
        for owner, name, write in save:
            setattr(owner, name, write)


def _savers() -> list[tuple[Any, str, Callable[..., Any]]]:
    from transformers import modeling_utils

    from grpo.run import checkpoint

    return [
        (owner, name, getattr(owner, name))
        for owner, name in ((checkpoint, "save_file"), (modeling_utils, "safe_save_file"))
    ]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is None or event not in _WATCHED:
        return
    path = arguments[1] if event in ("os.rename", "os.symlink") else arguments[0]
    if not isinstance(path, str | os.PathLike) or not os.path.abspath(os.fspath(path)).startswith(_folder):
        return
    if event == "open":
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    _active()


def run_command(
    words: Sequence[str],
    said: Path,
    folder: Path,
    calls: Calls | None = None,
    counted: Path | None = None,
    *,
    kill_after_s: float = math.inf,
) -> int:
    """`train_lean.py` with these words in a process that is forked for it; how it ended.

    said: gets what it prints. folder: where it is typed. counted: gets the number of its calls below `runs`.
    kill_after_s: then it is killed, if it has not ended.
    """
    process, end = os.fork(), time.monotonic() + kill_after_s
    if not process:
        _become_the_command(words, said, folder, calls, counted)
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _become_the_command(
    words: Sequence[str], said: Path, folder: Path, calls: Calls | None, counted: Path | None
) -> None:
    """Does not come back."""
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        # pytest has put others in the place of Python's own.
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, "utf-8", "replace", closefd=False) for fd in (1, 2))
        os.chdir(folder)
        sys.argv = ["train_lean.py", *words]
        from grpo.commands import call

        with calls_watched(folder / "runs", calls or Calls()):
            status = call("train")
        if counted and calls:
            counted.write_text(str(calls.made))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
