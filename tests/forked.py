"""Workers of the workbench as forks of a process that has the libraries, not as Pythons of their own."""

import os
import runpy
import signal
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
from several_processes import fork


class ForkedPython:
    """As much of `subprocess.Popen` as `run_task` uses: `python -m module words`, printing into one file."""

    def __init__(self, words: Sequence[str], stdout: IO[str], stderr: IO[str]) -> None:
        assert tuple(words[:2]) == (sys.executable, "-m") and stdout is stderr
        with Connection(os.dup(stdout.fileno()), readable=False) as said:
            self._process = fork(_run, words[2:], dict(os.environ), Path.cwd(), said)

    def poll(self) -> int | None:
        """Its exit status, the number of a signal negative; None while it runs."""
        return None if self._process.is_alive() else self.wait()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()


def _run(words: Sequence[str], environment: Mapping[str, str], cwd: Path, said: Connection) -> None:
    for number in (1, 2):
        os.dup2(said.fileno(), number)
    said.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def server() -> dict[str, str]:
    """The place where this process's server listens: for forks, which would each start one of their own."""
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
    with mock.patch("grpo.workbench.trial.subprocess", SimpleNamespace(Popen=ForkedPython)):
        yield
