"""One of several processes: what it tells the others, and what it learns when one does not answer."""

import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from grpo.distributed.heartbeat import Heartbeat, Listener
from grpo.distributed.one import ProcessLost, World

T = TypeVar("T")
_MESSAGE_BYTES = 4 * 2**20
"""Of one value in the store, which takes 8 MiB."""
BUCKET_BYTES = 32 * 2**20
"""Gradients that are summed at once; what a step holds beside them. A larger one goes by itself."""
_WHOLE, _IN_PARTS = b"w", b"p"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
"""Between looks at whether something has come."""
_LOOK_EVERY_S = 1.0
"""Between looks at whether those that are waited for still live."""


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
        self._traffic = {"processes/exchanged_bytes": 0.0, "processes/summed_bytes": 0.0}
        self._exchanges = 0
        self._parts_put: dict[str, int] = {}
        self._heartbeat = Heartbeat(self._kept.connect(), rank)
        self._listener = Listener(self._kept.connect())
        self.names = self.exchange("the start", name)
        """Of each process: its machine and device."""
        self.sharing = self.names.count(name)

    # ------------------------------------------------------------------------------ small things

    def exchange(self, what: str, value: T) -> list[T]:
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self.size)]
        with self._naming_main():
            self._put(keys[self.rank], zlib.compress(pickle.dumps((what, value)), 1))
            self._wait_for(keys, what)
            contents = self._store.multi_get(keys)
            given = [
                (what, value) if rank == self.rank else self._read(keys[rank], contents[rank])
                for rank in range(self.size)
            ]
            self._forget(f"{self._exchanges - 1}/{self.rank}")  # as all are here, all have read that
        for rank, (there, _) in enumerate(given):
            if there != what:
                text = f"{self._called(rank)} has come to {there} when this process came to {what}."
                raise ProcessLost(text, rank=rank)
        return [theirs for _, theirs in given]

    def _put(self, key: str, content: bytes) -> None:
        """What is too large for one value goes in parts, and `key` says how many."""
        self._traffic["processes/exchanged_bytes"] += len(content)
        if len(content) > _MESSAGE_BYTES:
            parts = [content[i : i + _MESSAGE_BYTES] for i in range(0, len(content), _MESSAGE_BYTES)]
            for number, part in enumerate(parts):
                self._set(f"{key}/{number}", part)
            self._parts_put[key] = len(parts)
            self._set(key, _IN_PARTS + str(len(parts)).encode())
        else:
            self._set(key, _WHOLE + content)

    def _set(self, key: str, content: bytes) -> None:
        self._store.set(key, content)  # type: ignore[arg-type]  # declared as text, but bytes do

    def _read(self, key: str, content: bytes) -> Any:
        kind, content = content[:1], content[1:]
        if kind == _IN_PARTS:
            content = b"".join(self._store.get(f"{key}/{number}") for number in range(int(content)))
        return pickle.loads(zlib.decompress(content))

    def _forget(self, key: str) -> None:
        for number in range(self._parts_put.pop(key, 0)):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)

    def _wait_for(self, keys: Sequence[str], what: str) -> None:
        def late() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

        self._wait_until(lambda: self._store.check(list(keys)), what, late, longest_pause_s=_LONGEST_PAUSE_S)

    def _wait_until(
        self,
        done: Callable[[], bool],
        what: str,
        late: Callable[[], Sequence[int]],
        *,
        longest_pause_s: float,
    ) -> None:
        """But not for ever: whoever is waited for may be lost on the way."""
        began = looked = time.monotonic()
        pause = _SHORTEST_PAUSE_S
        while not done():
            time.sleep(pause)
            pause = min(1.5 * pause, longest_pause_s)
            if time.monotonic() - looked > _LOOK_EVERY_S:
                looked = time.monotonic()
                self._look(what, waiting_since=began, waits_for=late())

    def _look(self, what: str, *, waiting_since: float, waits_for: Sequence[int]) -> None:
        """ProcessLost if one of the others is gone, or has not come for too long."""
        with self._naming_main():
            others = [rank for rank in range(self.size) if rank != self.rank]
            if trouble := self._listener.trouble(others):
                rank, reason = trouble
                text = f"{self._called(rank)} {reason}; this process waited for it in {what}."
                raise ProcessLost(text, rank=rank)
        if waits_for and time.monotonic() - waiting_since > self._wait_s:
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
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].view(-1) if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._traffic["processes/summed_bytes"] += flat.nbytes
            self._finish(dist.all_reduce(flat, async_op=True), "the sum of gradients")
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                if not alone:
                    gradient.copy_(part.view_as(gradient))

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            self._finish(dist.broadcast(whole, src=0, async_op=True), "the copy of weights")
            tensor.copy_(whole)

    def _finish(self, work: Any, what: str) -> None:
        """Wait for a collective."""
        began = time.monotonic()
        everyone = [rank for rank in range(self.size) if rank != self.rank]
        self._wait_until(work.is_completed, what, lambda: everyone, longest_pause_s=_SHORTEST_PAUSE_S)
        try:
            work.wait()
        except RuntimeError as error:  # a connection has broken: whose, the others' hearts will tell
            for _ in range(int(2 * self._listener.patience_s / _LOOK_EVERY_S)):
                self._look(what, waiting_since=began, waits_for=everyone)
                time.sleep(_LOOK_EVERY_S)
            raise ProcessLost(f"{what} failed though all processes live: {error}", rank=self.rank) from error

    def take_traffic(self) -> dict[str, float]:
        taken = dict(self._traffic)
        self._traffic = dict.fromkeys(taken, 0.0)
        return taken

    # ------------------------------------------------------------------------------------ the end

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this process ends, and why, if not because all is done."""
        reason = None
        if error is not None:
            reason = f"failed: {type(error).__name__}: {error}".strip().splitlines()[0][:500]
        with suppress(dist.DistError, RuntimeError):
            self._heartbeat.stop(reason)
            if error is None:
                self._let_all_leave()

    def _let_all_leave(self) -> None:
        """The first process, which keeps the store, goes last: others may still read there."""
        self._store.set(f"left/{self.rank}", "")
        until = time.monotonic() + self._listener.patience_s
        left = [f"left/{rank}" for rank in range(self.size)]
        while self.is_main and not self._store.check(left) and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE_S)


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
