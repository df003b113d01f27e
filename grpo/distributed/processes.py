"""One of several processes: what it tells the others, and what it learns when one does not answer.

Small things go from each to each over a gloo group of their own, as JSON with tensors in safetensors: nothing
is pickled. A thread for each other process takes in what that one says, so a connection that breaks names
whose it was, at once, whatever this process does meanwhile.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor
from torch import distributed as dist

from grpo.distributed.world import ProcessLost, World
from grpo.errors import UserError

T = TypeVar("T")
THE_END = "the end"
"""The last exchange of a run: a connection may close after it."""
BUCKET_BYTES, IN_FLIGHT = 16 * 2**20, 2
"""Gradients that are summed at once, and how many times: what a step holds beside them."""
_PAUSE_S = 0.0002
"""Between looks at whether a sum is done."""
_LAST_WORDS_S = 2.0
"""How long a process that ends tries to say why, and how long one that misses another listens for that."""
_MESSAGES, _NOTHING = 0, 1
"""Tags in the group of messages: they, and what is never sent."""


class Processes(World):
    """Several processes, and this one's place among them.

    torch's process group is there already. name: of machine and device. wait_s: how long processes wait
    for one another while all live.
    """

    def __init__(self, rank: int, size: int, *, name: str, wait_s: float) -> None:
        self.rank, self.size, self._wait_s = rank, size, wait_s
        self._others = [other for other in range(size) if other != rank]
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        self._sends: list[Any] = []
        self._traffic = {"processes/exchanged_bytes": 0.0, "processes/summed_bytes": 0.0}
        self._news = threading.Condition()
        self._inbox: dict[int, deque[list[Any]]] = {other: deque() for other in self._others}
        self._lost: dict[int, str] = {}  # the first is the cause
        self._listeners = [
            threading.Thread(target=self._listen, args=[other], daemon=True) for other in self._others
        ]
        for listener in self._listeners:
            listener.start()
        self.names: list[str] = []
        """The machine and device of each process."""
        self.names = self.exchange("the start", name)
        self.ranks_on_device = self.names.count(name)

    # ------------------------------------------------------------------------------ small things

    def exchange(self, stage: str, value: T) -> list[T]:
        sends = self._send([stage, value])
        with self._news:
            self._news.wait_for(lambda: self._lost or all(self._inbox.values()), self._wait_s)
            if missing := [other for other in self._others if not self._inbox[other]]:
                raise self._loss(stage, missing)
            messages = {other: self._inbox[other].popleft() for other in self._others}
        self._sends = sends  # as all are here, all have read what was sent before
        for other, (their_stage, _) in messages.items():
            if their_stage != stage:
                text = f"{self._called(other)} has come to {their_stage} when this process came to {stage}."
                raise ProcessLost(text, rank=other)
        messages[self.rank] = [stage, value]
        return [messages[rank][1] for rank in range(self.size)]

    def _send(self, message: list[Any]) -> list[Any]:
        """To all others, without waiting: the length, then the bytes. Who is gone its listener tells."""
        content = torch.frombuffer(bytearray(pack(message)), dtype=torch.uint8)
        self._traffic["processes/exchanged_bytes"] += len(content)
        sends = []
        for other in self._others:
            with suppress(RuntimeError):
                sends.append(dist.isend(torch.tensor([len(content)]), other, self._group, _MESSAGES))
                sends.append(dist.isend(content, other, self._group, _MESSAGES))
        self._sends += sends
        return sends

    def _listen(self, other: int) -> None:
        """All that another process says, to its end; in a thread of its own."""
        stage: str | None = ""
        try:
            while stage not in (None, THE_END):
                length = self._receive(other, torch.empty(1, dtype=torch.int64))
                content = self._receive(other, torch.empty(int(length), dtype=torch.uint8))
                stage, value = message = unpack(content.numpy().tobytes())
                with self._news:
                    if stage is None:
                        self._lost[other] = value
                    else:
                        self._inbox[other].append(message)
                    self._news.notify()
        except (RuntimeError, ValueError, TypeError) as error:
            broke = isinstance(error, RuntimeError)
            with self._news:
                self._lost[other] = "is gone: its connection is closed" if broke else f"said what is {error}"
                self._news.notify()

    def _receive(self, other: int, into: Tensor) -> Tensor:
        work = dist.irecv(into, other, self._group, _MESSAGES)
        assert work is not None
        work.wait(timedelta(days=365))  # whoever waits for what is said has a patience of its own
        return into

    def _loss(self, stage: str, missing: Sequence[int]) -> ProcessLost:
        """Returns the error that names whom this process misses, and why.

        It may only now hear who is gone: it may have been stopped.
        """
        with self._news:
            self._news.wait_for(lambda: self._lost, _LAST_WORDS_S)
        for rank, words in self._lost.items():
            return ProcessLost(f"{self._called(rank)} {words}; this process came to {stage}.", rank=rank)
        return ProcessLost(
            f"{' and '.join(map(self._called, missing))} lives but has not come to {stage} for "
            f"{self._wait_s / 60:.3g} minutes: it hangs or is stopped, or is that much slower; "
            "--wait-minutes is how long processes wait for one another.",
            rank=missing[0],
        )

    def _called(self, rank: int) -> str:
        return f"process {rank} ({self.names[rank]})" if self.names else f"process {rank}"

    # ----------------------------------------------------------------------------- large things

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            gradients.append(parameter.grad)
        self._traffic["processes/summed_bytes"] += sum(gradient.nbytes for gradient in gradients)
        stage = "the sum of gradients"
        if dist.get_backend() == "gloo":
            sum_in_buckets(gradients, wait=lambda work: self._finish(work, stage))
        elif last := sum_in_buckets(gradients, wait=lambda work: work.wait()):  # where only streams wait
            self._finish(last, stage)

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            numbers = tensor.detach().reshape(-1).clone()  # as bytes: not all integers can be sent
            sent = dist.broadcast(numbers.view(torch.uint8), src=0, async_op=True)
            self._finish(sent, "the copy of weights")
            tensor.copy_(numbers.view(tensor.shape))

    def _finish(self, work: Any, stage: str) -> None:
        """Wait for a collective, but not for one that is lost."""
        until = time.monotonic() + self._wait_s
        while not work.is_completed():
            if self._lost or time.monotonic() > until:
                raise self._loss(stage, self._others)
            time.sleep(_PAUSE_S)
        try:
            work.wait()
        except RuntimeError as error:  # a connection has broken: whose, its listener will tell
            raise self._loss(stage, self._others) from error

    def take_traffic(self) -> dict[str, float]:
        taken = dict(self._traffic)
        self._traffic = dict.fromkeys(taken, 0.0)
        return taken

    # ------------------------------------------------------------------------------------ the end

    def leave(self, error: BaseException | None) -> None:
        """Tell the others why this process ends, if not because all is done, and hang up."""
        if error is not None:
            words = f"ended with {type(error).__name__}: {error}".strip().splitlines()[0][:500].rstrip(".")
            self._send([None, words])
        until = time.monotonic() + _LAST_WORDS_S
        for send in self._sends:
            with suppress(RuntimeError):
                send.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
        self._hang_up(self._group)
        if error is not None and dist.get_backend() == "gloo":
            self._hang_up(None)
        for listener in self._listeners:
            listener.join(_LAST_WORDS_S)

    def _hang_up(self, group: dist.ProcessGroup | None) -> None:
        """Close a gloo group's connections, and so end whatever waits in it: the process could not end else.

        Of its own `abort` gloo knows nothing, but a receipt that runs out of time closes them all.
        """
        for other in self._others:
            with suppress(RuntimeError):
                receipt = dist.irecv(torch.empty(1), other, group, _NOTHING)
                assert receipt is not None
                receipt.wait(timedelta(milliseconds=1))


def sum_in_buckets(tensors: Sequence[Tensor], *, wait: Callable[[Any], object]) -> Any:
    """Make each tensor its sum over the processes, in lots of one kind, and return the last collective.

    wait: for each collective. A lot is no larger than BUCKET_BYTES unless it is one tensor.
    """
    in_flight: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def finish() -> Any:
        work, flat, bucket = in_flight.popleft()
        wait(work)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            if part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view_as(tensor))
        return work

    last = None
    for bucket in _buckets(tensors):
        if len(in_flight) == IN_FLIGHT:
            finish()
        is_flat = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if is_flat else torch.cat([tensor.reshape(-1) for tensor in bucket])
        in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))
    while in_flight:
        last = finish()
    return last


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype together, as many as BUCKET_BYTES hold."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and sum(part.nbytes for part in [*bucket, tensor]) > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


# ------------------------------------------------------------------------------------ messages

_TEXT, _TENSOR = "json", "\0tensor"


def pack(value: Any) -> bytes:
    """Packs JSON's types, and tensors, which come back on the CPU. TypeError for anything else."""
    tensors: dict[str, Tensor] = {}

    def replaced(tensor: Any) -> dict[str, str]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"processes cannot tell each other a {type(tensor).__name__}.")
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().contiguous().clone()  # none may share another's memory
        return {_TENSOR: name}

    text = json.dumps(value, default=replaced).encode()
    return safetensors.save(tensors | {_TEXT: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def unpack(message: bytes) -> Any:
    """Returns the packed value, tuples as lists. ValueError for anything but a message."""
    try:
        tensors = safetensors.load(message)
        text = tensors.pop(_TEXT).numpy().tobytes()
        return json.loads(text, object_hook=lambda d: tensors[d[_TENSOR]] if _TENSOR in d else d)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"no message: {type(error).__name__}: {error}") from error
