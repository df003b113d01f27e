"""Opens the processes of a run, from what a launcher has put into the environment."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import PartialState
from torch import distributed as dist

from grpo.distributed.processes import THE_END, Processes
from grpo.distributed.world import World
from grpo.environment import is_bound_to_one_card, launched_processes, local_rank, num_machines
from grpo.errors import UserError


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
    _tell_torch(rank, size)
    state = PartialState(cpu=device == "cpu", timeout=timedelta(minutes=wait_minutes + 10))
    world = Processes(rank, size, name=f"{socket.gethostname()}, {device}", wait_s=60 * wait_minutes)
    if dist.get_backend() == "nccl":
        dist.all_reduce(torch.zeros(1, device=device))  # its buffers are there before memory is planned
    try:
        yield world, device
        world.exchange(THE_END, None)
    except BaseException as error:
        world.leave(error)
        dist.distributed_c10d._abort_process_group()  # else NCCL's end would wait for a sum that hangs
        raise
    world.leave(None)
    state.destroy_process_group()


def _tell_torch(rank: int, size: int) -> None:
    """Set what torchrun would have, where another launcher has started this process. ValueError for a gap.

    torch and accelerate take the first process's machine and a port on it from the environment.
    """
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local_rank())):
        os.environ.setdefault(name, str(value))
    if "MASTER_ADDR" not in os.environ and num_machines() > 1:
        raise UserError(
            f"{size} processes were started on {num_machines()} machines, and none knows where the first one "
            "is: set MASTER_ADDR to the first machine's name, for all of them."
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _device_of(device: str) -> str:
    """The device of this process among those of its machine."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UserError(f"device is {device!r}, but each process has its own: give auto, cuda or cpu.")
    place, cards = local_rank(), torch.cuda.device_count()
    if cards == 1 and is_bound_to_one_card():
        return "cuda:0"  # which is another one for each process
    if place >= cards:
        raise UserError(
            f"{place + 1} processes or more were started on a machine with {cards} CUDA devices: "
            "start one for each, or give --device cpu."
        )
    return f"cuda:{place}"
