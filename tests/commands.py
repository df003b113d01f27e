"""Scripts as they are typed, in processes of their own that need not load the libraries first.

They are forked, see several_processes.py; all else is as if Python had been started. Where even that counts,
they are started (`fresh`); that each script finds what it imports is a test of its own. What needs no process
of its own is done in this one (`here`). Workers of the workbench are forked, too.
"""

import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from conftest import untraced
from forked import forked_workers, server
from loguru import logger
from several_processes import fork

from grpo import commands
from grpo.logs import waiting

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
Ended = subprocess.CompletedProcess[str]


class Command:
    """`python script arguments`, typed in `cwd`.

    traced: its memory plan is what is tested, and not made up. environment: variables that differ.
    """

    def __init__(
        self, script: str | Path, *arguments: object, cwd: Path, traced: bool = False, **environment: str
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._words = [str(ROOT / script), *map(str, arguments)]
        self._streams = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        everything = {**os.environ, **ENVIRONMENT, **environment}
        self._process = fork(_run, self._words, cwd, everything, self._streams, traced, server())

    def wait_for(self, words: str, timeout_s: float = 120) -> None:
        """Until it has said that on stderr. AssertionError if it ends before; one that does not is killed."""
        end = time.monotonic() + timeout_s
        while words not in self._said("stderr"):
            if not self._process.is_alive() or time.monotonic() > end:
                self._process.kill()
                raise AssertionError(self._said("stderr"))
            time.sleep(0.02)

    def interrupt(self, signum: int = signal.SIGINT) -> None:
        """Ctrl-C, or another signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signum)

    def finish(self, timeout_s: float = 240) -> Ended:
        """How it ended, and all it said. One that does not end is killed."""
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            raise TimeoutError(self._said("stderr"))
        assert self._process.exitcode is not None
        ended = Ended(self._words, self._process.exitcode, self._said("stdout"), self._said("stderr"))
        self._folder.cleanup()
        return ended

    def _said(self, stream: str) -> str:
        file = Path(self._folder.name) / stream
        return file.read_text() if file.exists() else ""


def run(script: str | Path, *arguments: object, cwd: Path, traced: bool = False, **environment: str) -> Ended:
    """A command, from its start to its end."""
    return Command(script, *arguments, cwd=cwd, traced=traced, **environment).finish()


def fresh(script: str | Path, *arguments: object, cwd: Path, **environment: str) -> Ended:
    """The same in a Python that has just been started."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )


def here(command: str, *words: object) -> Ended:
    """`grpo-lean command words` in this process; memory plans are made up where the test says so."""
    typed, out, err = [f"grpo-lean {command}", *map(str, words)], io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.argv", typed):
        try:
            status = commands.call(command)
        except SystemExit as ended:
            status = ended.code
    logger.remove()  # what the command has set for itself
    waiting.show_on(None)
    gc.unfreeze()
    return Ended(typed, status, out.getvalue(), err.getvalue())


def _run(
    words: list[str],
    cwd: Path,
    environment: dict[str, str],
    streams: list[Path],
    traced: bool,
    forks_from: dict[str, str],
) -> None:
    for number, file in enumerate(streams, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    with nullcontext() if traced else untraced(), forked_workers(forks_from):
        runpy.run_path(words[0], run_name="__main__")
