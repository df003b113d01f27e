"""Runs a function in several processes that find each other as a launcher's do.

They are forked from one process that has the libraries loaded but has computed nothing: a fork of a
process that has once gone backward could not do so again.
"""

import dataclasses
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from conftest import untraced
from torch._C._distributed_c10d import TCPStore

import grpo.distributed.heartbeat
import grpo.phases
from grpo.config import Config
from grpo.config.groups import OptimizerSettings
from grpo.distributed import open_world
from grpo.distributed.store import Store
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import Stepper
from grpo.run.setup import open_run
from grpo.trainer import Trainer

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "sharded", "grpo.run.dry_run", "grpo.workbench.report", "tyro"])
PATIENCE_S = 60.0
"""With a silent process, unless a test is about one: a busy machine may keep one waiting for long."""
PLACES = {
    "sample": (grpo.phases, "rollout"),
    "score": (grpo.phases, "score"),
    "learn": (grpo.phases, "accumulate_grpo"),
    "evaluation": (grpo.phases, "score_heldout"),
}


class Ended(NamedTuple):
    """How a process ended: what its function returned, or its error; the exit code of one that was killed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = 0


def in_processes(size: int, work: Callable[..., Any], *args: Any) -> list[Ended]:
    """`work(rank, *args)` in each of so many processes. TimeoutError if one runs on for minutes."""
    port = _free_port()
    started = []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = fork(_run, theirs, rank, size, port, work, args)
        theirs.close()
        started.append((process, ours))
    ended = []
    for process, pipe in started:
        try:
            if not pipe.poll(180):
                raise TimeoutError("a process hangs")
            ended.append(pickle.loads(pipe.recv_bytes()))  # whole: torch would share tensors
        except EOFError:
            process.join(10)
            ended.append(Ended(exit_code=process.exitcode))
    for process, _ in started:
        process.join(60)
        if process.is_alive():
            process.kill()
            raise TimeoutError("a process hangs at its end")
    return ended


def fork(work: Callable[..., Any], *args: Any) -> BaseProcess:
    """`work(*args)` in a process that has the libraries loaded."""
    # Python 3.11's server does not take over this process's path, on which pytest has put the tests.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        ensure_running()
    process = CONTEXT.Process(target=work, args=args)
    process.start()
    return process


def _run(
    pipe: Connection, rank: int, size: int, port: int, work: Callable[..., Any], args: Sequence[Any]
) -> None:
    if size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    torch.set_num_threads(1)
    try:
        ended = Ended(work(rank, *args))
    except Exception as error:
        ended = Ended(error=f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(ended))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a process saw: the gradient of each optimizer step, weights in the end, and the last step."""

    folder: Path
    gradients: list[torch.Tensor]
    weights: torch.Tensor
    finished: int
    fired: list[tuple[int, str]]
    """(step, phase) where this process ran out of memory on purpose."""
    rows_learned: int


def train(
    rank: int,
    config: Config,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    faults: Sequence[tuple[int, str, int]] = (),
    during: Callable[[int, int], None] | None = None,
    stop_after: tuple[int, int] | None = None,
    patience_s: float = PATIENCE_S,
) -> Trained:
    """One process of a run.

    changes: settings of some ranks. faults: (step, phase, rank) whose first attempt runs out of memory.
    during(rank, step): called when rewards are due. stop_after: (rank, step) that is asked to stop.
    """
    torch.manual_seed(0)
    config = dataclasses.replace(config, **(changes or {}).get(rank, {}))
    gradients: list[torch.Tensor] = []
    fired: list[tuple[int, str]] = []
    with (
        untraced(),
        mock.patch.object(grpo.distributed.heartbeat, "PATIENCE_S", patience_s),
        open_run(config) as run,
    ):
        run.optimizer.register_step_pre_hook(lambda *_: gradients.append(_flat(run, "grad")))
        rows = []

        trainer = Trainer(run)
        accumulate = trainer.phases.accumulate

        def accumulate_and_count(batch: Any, settings: Any, **options: Any) -> Any:
            rows.append(len(batch.advantages))
            return accumulate(batch, settings, **options)

        trainer.phases.accumulate = accumulate_and_count  # type: ignore[method-assign]
        due = {(step, phase) for step, phase, of in faults if of == rank}
        patches = [
            mock.patch.object(module, name, _failing(getattr(module, name), phase, trainer, due, fired))
            for phase, (module, name) in PLACES.items()
        ]
        for patch in patches:
            patch.start()
        if during is not None:
            reward = run.rewards.__class__.__call__
            mock.patch.object(
                run.rewards.__class__, "__call__",
                lambda self, made: (during(rank, trainer.finished + 1), reward(self, made))[1],
            ).start()  # fmt: skip
        for step in trainer:
            trainer.stop.requested |= stop_after == (rank, step.number)
        weights = _flat(run, "data")
    return Trained(run.folder, gradients, weights, trainer.finished, fired, sum(rows))


def _flat(run: Any, what: str) -> torch.Tensor:
    return torch.cat([getattr(p, what).flatten().clone() for p in run.policy.model.parameters()])


def _failing(work: Any, phase: str, trainer: Trainer, due: set[tuple[int, str]], fired: list[Any]) -> Any:
    def work_or_fail(*args: Any, **options: Any) -> Any:
        result = work(*args, **options)
        # An evaluation comes after its step.
        place = trainer.finished + (phase != "evaluation"), phase
        if place in due:
            due.remove(place)
            fired.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    return work_or_fail


def killed_at_step_three(rank: int, step: int) -> None:
    """The second process of two dies without a word."""
    if (rank, step) == (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)


def stuck_at_step_two(rank: int, step: int) -> None:
    if (rank, step) == (1, 2):
        time.sleep(10)


def stopped_at_step_two(rank: int, step: int) -> None:
    """The first process, which keeps the store, is stopped for longer than the others are patient."""
    if (rank, step) == (0, 2):
        subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def attacked_at_step_two(rank: int, step: int, told: Path) -> None:
    """A stranger who knows the port writes pickles that leave a trace where one is opened."""
    if (rank, step) != (1, 2):
        return
    (port,) = (each._client.port for each in gc.get_objects() if type(each) is Store)
    garbage = (b"\x80\x04", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096))
    for content in garbage:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(content)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    payload = pickle.dumps(Trap(told))
    for number in range(1, 60):
        store.set(f"{number}/1", b"\0\0\0\1" + payload)


class Trap:
    """Code that runs where it is unpickled."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.told),)


def broken_at_step_two(rank: int, step: int) -> None:
    if (rank, step) == (1, 2):
        raise ValueError("the reward broke")


def kept_together(rank: int, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and a moment after processes were `apart` from each other, and have compared themselves."""
    with open_world("cpu", wait_minutes=1) as (world, _):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = make_optimizer(model, OptimizerSettings())
        with torch.no_grad():
            model.weight += apart * rank
            optimizer.state[model.weight]["exp_avg"] += rank
        Stepper(model, optimizer, 1.0).keep_together(world)
        return model.weight.detach(), optimizer.state[model.weight]["exp_avg"]
