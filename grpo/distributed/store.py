"""Where processes leave messages for each other: a store that the first of them keeps.

It is torch's `TCPStore`, with three things of our own. It listens where the launcher says (`MASTER_ADDR`, or
this machine alone if all processes are here), as torch's would on every interface. What is put there is
sealed with a secret of the run (HMAC-SHA256 over key and content), so that what a stranger writes to the
port is refused before it is looked at. And a first process that is stopped shows: no call waits for long.
"""

import hashlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from accelerate.utils import get_int_from_env
from loguru import logger
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
PART_BYTES = 4 * 2**20
"""Of one value in the store, which takes 8 MiB."""
_SECRET_BYTES, _SEAL_BYTES, _PORT_BYTES = 32, 32, 2
_LOCAL = "127.0.0.1"
_PROCESSES_HERE = [
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
]  # fmt: skip
"""What launchers call the number of processes on a machine."""


class StoreLost(RuntimeError):
    """The store, and so the process that keeps it, does not answer."""


class Forged(RuntimeError):
    """Something in the store is not what a process of this run has put there."""


class Store:
    """One connection to the run's store, for all threads of a process: calls go through one by one.

    torch's process group is there already; through it the first process tells the others the port and the
    secret. patience_s: without an answer for so long the store counts as lost.
    """

    def __init__(self, rank: int, size: int, *, patience_s: float) -> None:
        self._size, self._patience_s = size, patience_s
        everyone_is_here = get_int_from_env(_PROCESSES_HERE, 0) == size
        self._host = _LOCAL if everyone_is_here else os.environ.get("MASTER_ADDR", _LOCAL)
        self._kept: TCPStore | None = None
        told = bytes(_PORT_BYTES + _SECRET_BYTES)
        if rank == 0:
            listening = _listen(self._host, everyone_is_here=everyone_is_here)
            port = listening.getsockname()[1]
            self._kept = self._open(port, listen_fd=listening.detach())
            told = port.to_bytes(_PORT_BYTES, "big") + secrets.token_bytes(_SECRET_BYTES)
        told = _from_first(told)
        self._secret = told[_PORT_BYTES:]
        self._client = self._open(int.from_bytes(told[:_PORT_BYTES], "big"))
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        self._lost: StoreLost | None = None
        threading.Thread(target=self._work, name="store", daemon=True).start()

    def set(self, key: str, content: bytes) -> None:
        """What is too large for one value goes in parts."""
        sealed = self._seal(key, content) + content
        parts = [sealed[start : start + PART_BYTES] for start in range(0, len(sealed), PART_BYTES)]
        for number, part in enumerate(parts[1:], start=1):
            self._put(f"{key}/{number}", part)
        self._put(key, len(parts).to_bytes(4, "big") + parts[0])  # last: now it is whole

    def get(self, key: str) -> bytes:
        """What was put there; to be asked for once it is (`has`). Forged if no process of this run put it."""
        first = self._part(key)
        others = range(1, int.from_bytes(first[:4], "big"))
        if not self.has([f"{key}/{number}" for number in others[-1:]]):
            raise Forged(f"{key!r} names parts that are not there")
        rest = [self._part(f"{key}/{number}") for number in others]
        sealed = first[4:] + b"".join(rest)
        seal, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, content)):
            raise Forged(f"{key!r} has not this run's seal")
        return content

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return not keys or self._call(lambda: self._client.check(list(keys)))

    def forget(self, key: str, content_bytes: int) -> None:
        """Remove what this process has put there."""
        for number in range(1, -(-(content_bytes + _SEAL_BYTES) // PART_BYTES)):
            self._delete(f"{key}/{number}")
        self._delete(key)

    # -------------------------------------------------------------------------------- how it is done

    def _seal(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, hashlib.sha256(key.encode()).digest() + content, "sha256")

    def _put(self, key: str, content: bytes) -> None:
        self._call(lambda: self._client.set(key, content))  # type: ignore[arg-type]  # declared as text

    def _part(self, key: str) -> bytes:
        return self._call(lambda: self._client.get(key))

    def _delete(self, key: str) -> None:
        self._call(lambda: self._client.delete_key(key))

    def _call(self, work: Callable[[], T]) -> T:
        """In the store's thread: a call to a process that is stopped would never come back."""
        if self._lost is not None:
            raise self._lost
        answered: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()
        self._calls.put((work, answered))
        for _ in range(max(1, round(self._patience_s))):  # by seconds: this process may be stopped as well
            try:
                value, error = answered.get(timeout=1.0)
                break
            except Empty:
                continue
        else:
            error = TimeoutError(f"no answer for {self._patience_s:.0f} seconds")
        if error is not None:
            self._lost = StoreLost(str(error).splitlines()[0])
            raise self._lost from error
        return value  # type: ignore[return-value]

    def _work(self) -> None:
        while True:
            work, answered = self._calls.get()
            try:
                answered.put((work(), None))
            except Exception as error:
                answered.put((None, error))

    def _open(self, port: int, *, listen_fd: int | None = None) -> TCPStore:
        return TCPStore(
            self._host, port, self._size, is_master=listen_fd is not None,
            timeout=timedelta(seconds=max(30.0, self._patience_s)), wait_for_workers=False,
            master_listen_fd=listen_fd,
        )  # fmt: skip


def _listen(host: str, *, everyone_is_here: bool) -> socket.socket:
    """A socket at the address that the others know this process by, at a free port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if everyone_is_here or not _is_loopback(str(address[0])):
            return socket.create_server((address[0], 0), family=family, backlog=512)
        reason = "this machine's name for itself"
    except OSError as error:
        reason = str(error)
    logger.warning(
        "MASTER_ADDR is {!r}, where this machine cannot listen for others ({}): its store listens on every "
        "interface; what is not from this run's processes is refused.", host, reason,
    )  # fmt: skip
    return socket.create_server(("", 0), backlog=512)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _from_first(content: bytes) -> bytes:
    """The first process's `content`, as long as the own, by way of torch's group."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(list(content), dtype=torch.uint8, device=device)
    dist.broadcast(numbers, src=0)
    return bytes(numbers.tolist())
