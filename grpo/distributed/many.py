"""One of several processes: what it tells the others, and what it learns when one does not answer."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from grpo.distributed import heartbeat
from grpo.distributed.heartbeat import Heartbeat, Listener
from grpo.distributed.messages import pack, unpack
from grpo.distributed.one import ProcessLost, World
from grpo.distributed.store import Forged, Store, StoreLost

T = TypeVar("T")
BUCKET_BYTES, IN_FLIGHT = 16 * 2**20, 2
"""Gradients that are summed at once, and how many times: some are packed while others are on their way. What
a step holds beside them; a larger one goes by itself.
"""
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
        self._store = Store(rank, size, patience_s=heartbeat.PATIENCE_S)
        self._wait_s = wait_s
        self._traffic = {"processes/exchanged_bytes": 0.0, "processes/summed_bytes": 0.0}
        self._exchanges = 0
        self._last_bytes = 0
        self._heartbeat = Heartbeat(self._store, rank)
        self._listener = Listener(self._store)
        self.names = self.exchange("the start", name)
        """Of each process: its machine and device."""
        self.sharing = self.names.count(name)

    # ------------------------------------------------------------------------------ small things

    def exchange(self, what: str, value: T) -> list[T]:
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self.size)]
        message = pack((what, value))
        self._traffic["processes/exchanged_bytes"] += len(message)
        with self._naming_main():
            self._store.set(keys[self.rank], message)
            self._wait_for(keys, what)
            given = [
                (what, value) if rank == self.rank else unpack(self._store.get(key))
                for rank, key in enumerate(keys)
            ]
            if self._exchanges > 1:  # as all are here, all have read that
                self._store.forget(f"{self._exchanges - 1}/{self.rank}", self._last_bytes)
        self._last_bytes = len(message)
        for rank, (there, _) in enumerate(given):
            if there != what:
                text = f"{self._called(rank)} has come to {there} when this process came to {what}."
                raise ProcessLost(text, rank=rank)
        return [theirs for _, theirs in given]

    def _wait_for(self, keys: Sequence[str], what: str) -> None:
        def late() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self._store.has([key])]

        self._wait_until(lambda: self._store.has(list(keys)), what, late, longest_pause_s=_LONGEST_PAUSE_S)

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
        except StoreLost as error:
            text = f"{self._called(0)} is gone: its store does not answer ({error})."
            raise ProcessLost(text, rank=0) from error
        except Forged as error:
            text = (
                f"somebody else writes to the port at which this run's processes exchange: {error}. Nothing "
                "of it was used; keep others off the machine's ports."
            )
            raise ProcessLost(text, rank=self.rank) from error

    # ----------------------------------------------------------------------------- large things

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        on_their_way: deque[Callable[[], None]] = deque()
        for bucket in buckets(gradients):
            if len(on_their_way) == IN_FLIGHT:
                on_their_way.popleft()()
            on_their_way.append(self._begin_sum(bucket))
        for finish in on_their_way:
            finish()

    def _begin_sum(self, gradients: list[Tensor]) -> Callable[[], None]:
        """Send some gradients, and return what waits for their sums and puts them in place."""
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0].view(-1) if alone else torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._traffic["processes/summed_bytes"] += flat.nbytes
        sending = dist.all_reduce(flat, async_op=True)

        def finish() -> None:
            self._finish(sending, "the sum of gradients")
            if not alone:
                parts = flat.split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))

        return finish

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
        with suppress(StoreLost, Forged):
            self._heartbeat.stop(reason)
            if error is None:
                self._let_all_leave()

    def _let_all_leave(self) -> None:
        """The first process, which keeps the store, goes last: others may still read there."""
        self._store.set(f"left/{self.rank}", b"")
        until = time.monotonic() + self._listener.patience_s
        left = [f"left/{rank}" for rank in range(self.size)]
        while self.is_main and not self._store.has(left) and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE_S)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
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
