"""Workers of the workbench as forks of a process that has the libraries, not as Pythons of their own."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest import mock

import several_processes
from several_processes import CONTEXT, fork


class ForkedPython:
    """As much of `subprocess.Popen` as `run_worker` uses: `python -m module words`."""

    def __init__(self, words: Sequence[str], stdout: int, stderr: IO[str], text: bool) -> None:
        assert tuple(words[:2]) == (sys.executable, "-m") and stdout == subprocess.PIPE and text
        ours, theirs = CONTEXT.Pipe(duplex=False)
        errors = Connection(os.dup(stderr.fileno()), readable=False)
        with ours, theirs, errors:
            self._process = fork(_run, words[2:], dict(os.environ), Path.cwd(), theirs, errors)
            self.stdout = os.fdopen(os.dup(ours.fileno()))

    def wait(self) -> int:
        """Its exit status; the number of a signal, negative."""
        self._process.join()
        self.stdout.close()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()


def _run(
    words: Sequence[str], environment: Mapping[str, str], cwd: Path, out: Connection, errors: Connection
) -> None:
    for number, stream in ((1, out), (2, errors)):
        os.dup2(stream.fileno(), number)
        stream.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def server() -> dict[str, str]:
    """Where this process's server listens: for forks, which would each start one of their own."""
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # as in `fork`
        forkserver.ensure_running()
    names = ("_forkserver_address", "_forkserver_authkey")  # the key: from Python 3.14 on
    return {name: value for name in names if (value := getattr(forkserver._forkserver, name, None))}


@contextmanager
def forked_workers(of: Mapping[str, str] | None = None) -> Iterator[None]:
    """While inside, the workbench's workers begin at once. of: another process's `server`."""
    if of is not None:
        vars(forkserver._forkserver).update(of, ensure_running=resource_tracker.ensure_running)
        several_processes.ensure_running = resource_tracker.ensure_running
    forking = SimpleNamespace(Popen=ForkedPython, PIPE=subprocess.PIPE)
    with mock.patch("grpo.workbench.processes.subprocess", forking):
        yield
