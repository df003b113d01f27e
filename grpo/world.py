"""The processes of a run: who they are, what they tell each other, how one that is lost shows.

The model is never wrapped. Each process samples, scores and learns its own groups, and retries by itself;
in between, small things (rewards, counts, metrics) are exchanged through a store, where whoever waits
can say for whom, and a step's gradients are summed once, in buckets, by torch.distributed. To have come to
an exchange is a process's vote that all before it went well.

Launchers (accelerate launch, torchrun, mpirun) start the processes; accelerate finds their places.
"""

import os
import pickle
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import get_int_from_env
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from grpo.before_torch import launched_processes
from grpo.heartbeat import Heartbeat, Listener

T = TypeVar("T")
_MESSAGE_BYTES = 4 * 2**20
"""Of one value in the store, which takes 8 MiB."""
BUCKET_BYTES = 32 * 2**20
"""Gradients that are summed at once; what a step holds beside them. A larger one goes by itself."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
"""Between looks at whether something has come."""
_LOOK_EVERY_S = 1.0
"""Between looks at whether those that are waited for still live."""


class ProcessLost(RuntimeError):
    """Another process failed, died, or did not come."""

    def __init__(self, text: str, *, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class World:
    """One process, which has nobody to wait for."""

    rank = 0
    size = 1
    sharing = 1
    """Processes on this process's device, itself included."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's folder and log."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Of so many groups, those of this process: neighbours, as even as can be, perhaps none."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def largest_share(self, count: int) -> int:
        """Groups of the process that has most of them."""
        return -(-count // self.size)

    def exchange(self, what: str, value: T) -> list[T]:
        """What every process gave, in the order of their ranks. ProcessLost if one does not come.

        what: named in the error. Whoever has come so far says with it that all went well.
        """
        return [value]

    def from_main(self, what: str, value: T) -> T:
        """What the first process gave."""
        return self.exchange(what, value)[0]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Make every `.grad` the sum over the processes; one that is missing here counts as zeros."""

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these tensors with the first process's."""


class Processes(World):
    """Several processes, and this one's place among them.

    torch's process group is there already. name: of machine and device. wait_s: how long processes wait
    for one another while all live.
    """

    def __init__(self, rank: int, size: int, *, name: str, wait_s: float) -> None:
        self.rank, self.size = rank, size
        self._kept = _Store(rank, size)
        self._store = self._kept.connect()
        self._wait_s = wait_s
        self._exchanges = 0
        self._heartbeat = Heartbeat(self._kept.connect(), rank)
        self._listener = Listener(self._kept.connect())
        self.names = self.exchange("the start", name)
        """Of each process: its machine and device."""
        self.sharing = self.names.count(name)

    # ------------------------------------------------------------------------------ small things

    def exchange(self, what: str, value: T) -> list[T]:
        self._exchanges += 1
        number = self._exchanges
        self._put(f"{number}/{self.rank}", pickle.dumps((what, value)))
        values = []
        for rank in range(self.size):
            there, theirs = what, value
            if rank != self.rank:
                there, theirs = pickle.loads(self._get(f"{number}/{rank}", rank, what))
            if there != what:
                text = (
                    f"{self._called(rank)} has come to {there}, this process to {what}: they are not in step."
                )
                raise ProcessLost(text, rank=rank)
            values.append(theirs)
        self._forget(f"{number - 1}/{self.rank}")  # as all have come here, nobody reads that any more
        return values

    def _put(self, key: str, content: bytes) -> None:
        content = zlib.compress(content, 1)
        parts = [content[i : i + _MESSAGE_BYTES] for i in range(0, len(content), _MESSAGE_BYTES)]
        with self._naming_main():
            for number, part in enumerate(parts):
                self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # bytes do
            self._store.set(key, str(len(parts)))

    def _get(self, key: str, rank: int, what: str) -> bytes:
        self._wait_for(key, rank, what)
        with self._naming_main():
            parts = int(self._store.get(key))
            return zlib.decompress(b"".join(self._store.get(f"{key}/{number}") for number in range(parts)))

    def _forget(self, key: str) -> None:
        with self._naming_main():
            if self._store.check([key]):
                for number in range(int(self._store.get(key))):
                    self._store.delete_key(f"{key}/{number}")
                self._store.delete_key(key)

    def _wait_for(self, key: str, rank: int, what: str) -> None:
        began = looked = time.monotonic()
        pause = _SHORTEST_PAUSE_S
        while not self._has(key):
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            if time.monotonic() - looked > _LOOK_EVERY_S:
                looked = time.monotonic()
                self._look(what, waiting_since=began, waits_for=[rank])

    def _has(self, key: str) -> bool:
        with self._naming_main():
            return self._store.check([key])

    def _look(self, what: str, *, waiting_since: float, waits_for: Sequence[int]) -> None:
        """ProcessLost if one of the others is gone, or has not come for too long."""
        with self._naming_main():
            others = [rank for rank in range(self.size) if rank != self.rank]
            if trouble := self._listener.trouble(others):
                rank, reason = trouble
                text = f"{self._called(rank)} {reason}; this process waited for it in {what}."
                raise ProcessLost(text, rank=rank)
        if time.monotonic() - waiting_since > self._wait_s:
            late = " and ".join(map(self._called, waits_for))
            raise ProcessLost(
                f"{late} lives but has not come to {what} for {self._wait_s / 60:.3g} minutes: it hangs, or "
                "is that much slower; --wait-minutes is how long processes wait for one another.",
                rank=waits_for[0],
            )

    def _called(self, rank: int) -> str:
        return f"process {rank} ({self.names[rank]})" if hasattr(self, "names") else f"process {rank}"

    @contextmanager
    def _naming_main(self) -> Iterator[None]:
        """The store is the first process's: where it does not answer, that one is gone."""
        try:
            yield
        except dist.DistNetworkError as error:
            raise self._main_is_gone(error) from error

    def _main_is_gone(self, error: Exception) -> ProcessLost:
        reason = str(error).splitlines()[0]
        return ProcessLost(f"{self._called(0)} is gone: its store does not answer ({reason}).", rank=0)

    # ----------------------------------------------------------------------------- large things

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._finish(dist.all_reduce(flat, async_op=True), "the sum of gradients")
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            self._finish(dist.broadcast(whole, src=0, async_op=True), "the copy of weights")
            tensor.copy_(whole)

    def _finish(self, work: Any, what: str) -> None:
        """Wait for a collective, but not for ever: who takes part in it may be lost on the way."""
        began = looked = time.monotonic()
        everyone = [rank for rank in range(self.size) if rank != self.rank]
        while not work.is_completed():
            time.sleep(_SHORTEST_PAUSE_S)
            if time.monotonic() - looked > _LOOK_EVERY_S:
                looked = time.monotonic()
                self._look(what, waiting_since=began, waits_for=everyone)
        try:
            work.wait()
        except RuntimeError as error:  # a connection has broken: whose, the others' hearts will tell
            for _ in range(int(2 * self._listener.patience_s / _LOOK_EVERY_S)):
                self._look(what, waiting_since=began, waits_for=everyone)
                time.sleep(_LOOK_EVERY_S)
            raise ProcessLost(f"{what} failed though all processes live: {error}", rank=self.rank) from error

    # ------------------------------------------------------------------------------------ the end

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this process ends, and why, if not because all is done."""
        reason = None
        if error is not None:
            reason = f"failed: {type(error).__name__}: {error}".strip().splitlines()[0][:500]
        with suppress(dist.DistError, RuntimeError):
            self._heartbeat.stop(reason)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, together no more than BUCKET_BYTES unless one alone is."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(other.nbytes for other in bucket) + tensor.nbytes > BUCKET_BYTES
        if bucket and (full or tensor.dtype != bucket[0].dtype or tensor.device != bucket[0].device):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@contextmanager
def open_world(device: str, *, wait_minutes: float) -> Iterator[tuple[World, str]]:
    """This run's processes, and the device of this one; (one process, `device`) without a launcher.

    ValueError where devices do not suffice. On an error the others are told before it goes on.
    """
    rank, size = launched_processes()
    if size == 1:
        yield World(), device
        return
    device = _device_of(device)
    state = PartialState(cpu=device == "cpu", timeout=timedelta(minutes=wait_minutes + 10))
    world = Processes(
        rank, size,
        name=f"{socket.gethostname()}, {device}", wait_s=60 * wait_minutes,
    )  # fmt: skip
    try:
        yield world, device
        world.exchange("the end", None)
    except BaseException as error:
        world.leave(error)
        if world.is_main:  # it keeps the store, from which the others read why
            time.sleep(2 * _LOOK_EVERY_S)
        raise
    world.leave(None)
    state.destroy_process_group()


def _device_of(device: str) -> str:
    """The device of this process among those of its machine."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise ValueError(f"device is {device!r}, but each process has its own: give auto, cuda or cpu.")
    place, cards = get_int_from_env(["LOCAL_RANK"], 0), torch.cuda.device_count()
    if place >= cards:
        raise ValueError(
            f"{place + 1} processes or more were started on a machine with {cards} CUDA devices: "
            "start one for each, or give --device cpu."
        )
    return f"cuda:{place}"


class _Store:
    """A store of our own, kept by the first process. torch's group tells the others its port."""

    def __init__(self, rank: int, size: int) -> None:
        self._size, self._timeout = size, timedelta(minutes=5)
        self._host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._kept = self._open(0, is_master=True) if rank == 0 else None
        port: list[Any] = [self._kept and self._kept.port]
        dist.broadcast_object_list(port, src=0)
        self._port = port[0]

    def connect(self) -> TCPStore:
        """A connection: one call at a time goes through it."""
        return self._open(self._port, is_master=False)

    def _open(self, port: int, *, is_master: bool) -> TCPStore:
        return TCPStore(
            self._host, port, self._size,
            is_master=is_master, timeout=self._timeout, wait_for_workers=False,
        )  # fmt: skip
