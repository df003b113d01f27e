"""Runs a function in several processes that find each other as a launcher's do.

They are forked from one process that has the libraries loaded but has computed nothing: a fork of a
process that has once gone backward could not do so again.
"""

import dataclasses
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

import grpo.phases
from grpo.config import Config
from grpo.config.groups import OptimizerSettings
from grpo.data.reward_calls import RewardFailed
from grpo.distributed import World, open_world
from grpo.distributed.processes import Processes
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import GuardedOptimizer
from grpo.run.setup import open_run
from grpo.trainer import Trainer

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "sharded", "grpo.run.dry_run", "grpo.workbench.report", "tyro"])
PLACES = {
    "sample": "begin_rollout",
    "score": "score",
    "learn": "accumulate_grpo",
    "evaluation": "answer_heldout",
}
"""Functions that a phase calls in grpo.phases."""


class Ended(NamedTuple):
    """How a process ended: what its function returned, or its error; the exit code of one that was killed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = 0


def in_processes(size: int, work: Callable[..., Any], *args: Any) -> list[Ended]:
    """`work(rank, *args)` in each of so many processes. TimeoutError if one runs on for minutes."""
    return begin(size, work, *args)()


def begin(size: int, work: Callable[..., Any], *args: Any) -> Callable[[], list[Ended]]:
    """The same without waiting: what is returned waits for the ends."""
    port = _free_port()
    started = []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = fork(_run, theirs, rank, size, port, work, args)
        theirs.close()
        started.append((process, ours))
    return lambda: [_ended(process, pipe) for process, pipe in started]


def _ended(process: BaseProcess, pipe: Connection) -> Ended:
    try:
        if not pipe.poll(180):
            raise TimeoutError("a process hangs")
        ended = pickle.loads(pipe.recv_bytes())  # whole: torch would share tensors
    except EOFError:
        process.join(10)
        return Ended(exit_code=process.exitcode)
    process.join(60)
    if process.is_alive():
        process.kill()
        raise TimeoutError("a process hangs at its end")
    return ended


def values(ended: Sequence[Ended]) -> list[Any]:
    """Returns the values of processes that all came to their end."""
    assert [each.error for each in ended] == [None] * len(ended)
    return [each.value for each in ended]


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
        each = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(number) for name, number in each.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
    """Everything that a process saw: the gradient of each optimizer step, weights in the end, and the last
    step."""

    folder: Path
    gradients: list[torch.Tensor]
    weights: torch.Tensor
    finished: int
    fired: list[tuple[int, str]]
    """(step, phase) where this process ran out of memory on purpose."""
    credit: list[torch.Tensor]
    """The advantages of each step, of all its rows."""
    rows_learned: list[int]
    """Returns the gradient of each optimizer step in this process."""


def train(
    rank: int,
    config: Config,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    *,
    faults: Sequence[tuple[int, str, int]] = (),
    during: Callable[[World, int], None] = lambda world, step: None,
    stop_after: tuple[int, int] | None = None,
) -> Trained:
    """One process of a run.

    changes: settings of some ranks. faults: (step, phase, rank) whose first attempt runs out of memory.
    during(world, step): called before each step. stop_after: (rank, step) that is asked to stop.
    """
    torch.manual_seed(0)
    config = dataclasses.replace(config, **(changes or {}).get(rank, {}))
    gradients: list[torch.Tensor] = []
    fired: list[tuple[int, str]] = []
    credit: list[torch.Tensor] = []
    rows: list[int] = []
    with untraced(), open_run(config) as run:
        run.optimizer.register_step_pre_hook(lambda *_: gradients.append(_flat(run, "grad")))
        trainer = Trainer(run)
        sample, learn, accumulate = trainer.phases.sample_and_reward, trainer.learn, trainer.phases.accumulate

        def sample_and_more(step: int, prompts: Any) -> Any:
            during(run.world, step)
            return sample(step, prompts)

        def note_credit(step: int, batch: Any, *rest: Any) -> Any:
            credit.append(torch.zeros(0, 1) if batch is None else batch.padded(batch.credit))
            return learn(step, batch, *rest)

        def note_rows(batch: Any, *rest: Any) -> Any:
            rows.append(0 if batch is None else len(batch))
            return accumulate(batch, *rest)

        trainer.phases.sample_and_reward, trainer.learn = sample_and_more, note_credit  # type: ignore[method-assign]
        trainer.phases.accumulate = note_rows  # type: ignore[method-assign]
        due = {(step, phase) for step, phase, of in faults if of == rank}
        for phase, name in PLACES.items():
            failing = _failing(getattr(grpo.phases, name), phase, trainer, due, fired)
            mock.patch.object(grpo.phases, name, failing).start()
        for step in trainer:
            trainer.stop.requested |= stop_after == (rank, step.number)
        return Trained(run.folder, gradients, _flat(run, "data"), trainer.finished, fired, credit, rows)


def _flat(run: Any, what: str) -> torch.Tensor:
    trained = [p for p in run.policy.model.parameters() if p.requires_grad]
    return torch.cat([getattr(p, what).flatten().clone() for p in trained])


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


def train_in_python(rank: int, config: Config, broken: str) -> None:
    """A run by the Python API, of which something of the caller's breaks in the second process."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        if rank and broken == "reward" and columns["trainer_state"].global_step:
            raise ZeroDivisionError("the reward broke")
        return [float(len(text)) for text in completions]

    with untraced():
        if broken == "reward":
            try:
                Trainer(config, rewards=[reward]).train()
            except RewardFailed as error:
                raise error.__cause__ or error from None
        elif broken == "with":
            with Trainer(config, rewards=[reward]) as trainer:
                if rank:
                    raise ZeroDivisionError("the with broke")
                trainer.train()
        else:
            for _ in Trainer(config, rewards=[reward]):
                if rank:
                    raise ZeroDivisionError("the loop broke")


PATIENCE_S = 6.0
"""How long a process waits for one that is stuck or stopped, once that has happened."""


def accident(kind: str, world: World, step: int) -> None:
    """An accident of the second process of two in its second step.

    killed: without a word, in the third step; first-killed: the first of them. stuck: until the other has
    given it up. stopped: the first, which keeps torch's own store; it goes on when the other has ended.
    """
    assert isinstance(world, Processes)
    pids = world.exchange("their numbers", os.getpid())
    when = {"killed": (1, 3), "first-killed": (0, 3), "stopped": (0, 2)}.get(kind, (1, 2))
    if step == when[1] and kind in ("stuck", "stopped"):
        world._wait_s = PATIENCE_S
    if (world.rank, step) != when:
        return
    heard(world)
    if kind in ("killed", "first-killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "broken":
        raise ValueError("the reward broke")
    elif kind == "stuck":
        while not world._lost:
            time.sleep(0.01)
    else:
        assert kind == "stopped"
        stop_until_gone(pids[1])


def heard(world: World) -> None:
    """Wait until all that this process has said is on its way: what is only queued dies with it."""
    assert isinstance(world, Processes)
    for send in world._sends:
        send.wait()


def stop_until_gone(pid: int) -> None:
    """Stop this process for as long as another lives."""
    goes_on = f"while kill -0 {pid}; do sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", goes_on], stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def kept_together(rank: int, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and a moment after processes were `apart` from each other, and have compared themselves."""
    with open_world("cpu", wait_minutes=1) as (world, _):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = make_optimizer(model, OptimizerSettings())
        with torch.no_grad():
            model.weight += apart * rank
            optimizer.state[model.weight]["exp_avg"] += rank
        GuardedOptimizer(model, optimizer, 1.0).keep_together(world)
        return model.weight.detach(), optimizer.state[model.weight]["exp_avg"]
