"""The processes of a run: what they are dealt, what they tell each other, and who counts as lost."""

import math
import os
import pickle
import re
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save
from several_processes import PATIENCE_S, begin, heard, in_processes, stop_until_gone, values

from grpo.distributed import ProcessLost, World, largest_share, launch, open_world, processes
from grpo.distributed.processes import pack, unpack
from grpo.distributed.world import sum_of_bits
from grpo.environment import launched_processes
from grpo.evaluate import interleave


@pytest.mark.parametrize(("size", "count"), [(1, 2), (2, 7), (3, 0), (3, 8), (8, 1), (8, 64)])
def test_groups_are_dealt_once_each_as_evenly_as_can_be(size, count):
    world, shares = World(), []
    for world.rank in range(size):
        world.size = size
        shares.append(world.share(count))
    assert [group for share in shares for group in share] == [*range(count)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert max(map(len, shares)) <= largest_share(count, size)


def test_one_process_has_nobody_to_wait_for():
    with open_world("mps", wait_minutes=1) as (world, device):
        assert (world.rank, world.size, world.is_main, device) == (0, 1, True, "mps")
        assert world.exchange("anything", "mine") == ["mine"]
        assert world.from_main("anything", 3) == 3
        parameter = torch.nn.Parameter(torch.ones(2))
        world.sum_gradients([parameter])
        assert parameter.grad is None and world.take_traffic() == {}


def test_launchers_say_who_is_who_and_each_has_a_card_of_its_own(monkeypatch):
    assert launched_processes() == (0, 1)
    for place, prefix in enumerate(("", "PMI_", "OMPI_COMM_WORLD_")):
        with monkeypatch.context() as launched:
            launched.setenv(f"{prefix}RANK", str(place))
            launched.setenv("WORLD_SIZE" if not prefix else f"{prefix}SIZE", "4")
            assert launched_processes() == (place, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch._device_of("auto") == launch._device_of("cuda") == "cuda:1"
    assert launch._device_of("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"device is 'cuda:0'.*auto, cuda or cpu"):
        launch._device_of("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"2 CUDA devices.*--device cpu"):
        launch._device_of("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch._device_of("auto") == "cpu"


@pytest.mark.parametrize(
    ("said", "found", "cards", "device"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": 5, "OMPI_COMM_WORLD_SIZE": 8, "OMPI_COMM_WORLD_LOCAL_RANK": 1},
            (5, 8),
            4,
            "cuda:1",
        ),
        ({"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 3}, (3, 4), 4, "cuda:3"),
        ({"SLURM_PROCID": 2, "SLURM_STEP_NUM_TASKS": 4, "SLURM_LOCALID": 2}, (2, 4), 4, "cuda:2"),
        (
            {"SLURM_PROCID": 2, "SLURM_STEP_NUM_TASKS": 4, "SLURM_LOCALID": 2, "CUDA_VISIBLE_DEVICES": 7},
            (2, 4),
            1,
            "cuda:0",
        ),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4}, (0, 1), 1, "cuda:0"),  # the script of a job, before srun
        (
            {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "SLURM_PROCID": 0, "SLURM_LOCALID": 0},
            (1, 2),
            2,
            "cuda:1",
        ),  # torchrun within a job
    ],
)
def test_ranks_of_mpi_and_slurm(said, found, cards, device, monkeypatch):
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert launched_processes() == found and launch._device_of("auto") == device


@pytest.mark.parametrize(
    "said", [{"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}]
)
def test_processes_on_one_card_that_nobody_gave_them_are_refused(said, monkeypatch):
    """torchrun and a plain mpirun show all processes all cards, also where there is one of them."""
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="1 CUDA devices"):
        launch._device_of("auto")


@pytest.mark.parametrize("machines", [1, 2])
def test_torch_is_told_where_the_first_process_is_or_it_is_asked_for(machines):
    said = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    with mock.patch.dict(os.environ, said | {"SLURM_STEP_NUM_NODES": str(machines)}):
        if machines > 1:
            with pytest.raises(ValueError, match=r"4 processes were started on 2 machines.*set MASTER_ADDR"):
                launch._tell_torch(1, 4)
            os.environ["MASTER_ADDR"] = "first"
        launch._tell_torch(1, 4)
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
        address = "first" if machines > 1 else "127.0.0.1"
        assert [os.environ[name] for name in names] == ["1", "4", "1", address, "29500"]
    assert "WORLD_SIZE" not in os.environ


def test_a_sum_of_bits_is_of_numbers_of_any_size():
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        ones = torch.ones(3).to(dtype)
        assert sum_of_bits(ones) != sum_of_bits(torch.zeros(3).to(dtype)) == 0
        assert sum_of_bits(ones) == 3 * sum_of_bits(ones[:1])


def test_interleaved_scores_are_in_the_order_of_the_prompts():
    scores = np.arange(7.0).reshape(7, 1)
    parts = [{"legal": scores[rank::3]} for rank in range(3)]
    parts[1]["top5"] = scores[1::3]
    joined = interleave(parts)
    assert np.array_equal(joined["legal"], scores)
    assert np.array_equal(np.flatnonzero(~np.isnan(joined["top5"])), [1, 4])
    assert np.array_equal(interleave([{"legal": scores[:1]}, {}, {}])["legal"], scores[:1])


def tell(rank: int) -> tuple:
    """Messages of many sizes, sums of unequal gradients, and a copy of the first one's tensor.

    Gradients are packed into five lots of one kind and at most 100 bytes, or of a larger one alone; of lots
    no more than two are on their way at once.
    """
    with (
        open_world("cpu", wait_minutes=1) as (world, device),
        mock.patch.object(processes, "BUCKET_BYTES", 100),
    ):
        large = world.exchange("much", {"numbers": torch.full((2**20,), float(rank))})
        assert [each["numbers"].sum() for each in large] == [0, 2**20, 2**21]
        small = [world.exchange("little", [rank, step]) for step in range(20)]
        shapes = (5, 2), (10, 1), (6, 5), (5, 1), (12, 1), (40, 1)
        kinds = {(5, 1): torch.float64}  # which would fit into a lot with the next
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=kinds.get(shape))) for shape in shapes]
        for number, parameter in enumerate(parameters[:-1], 1):  # of the last nobody has any
            if rank:
                parameter.grad = torch.full_like(parameter.T, rank * number).T  # not contiguous
        order = mock.Mock()
        with (
            mock.patch.object(processes.dist, "all_reduce", wraps=processes.dist.all_reduce) as send,
            mock.patch.object(world, "_finish", wraps=world._finish) as wait,
        ):
            order.attach_mock(send, "send")
            order.attach_mock(wait, "wait")
            world.sum_gradients(parameters)
        assert "".join(call[0][0] for call in order.mock_calls) == "sswswswsww"  # sent, waited for
        own = torch.full((2, 2), float(rank)).T
        world.copy_from_main([own])
        sums = [p.grad.unique().tolist() for p in parameters]
        return device, small, sums, own.tolist(), world.take_traffic(), world.ranks_on_device


def out_of_step(rank: int) -> None:
    with open_world("cpu", wait_minutes=1) as (world, _):
        world.exchange("this" if rank else "that", None)


def say_nonsense(rank: int) -> None:
    with open_world("cpu", wait_minutes=1) as (world, _):
        if rank:
            with mock.patch.object(processes, "pack", pickle.dumps):
                world._send(["a pickle", None])
            heard(world)  # the exchange lets go of what was said before it, which nobody may have read yet
        world.exchange("the next", None)


def lose_the_third(rank: int, kind: str) -> float:
    """Seconds until a process knows that the third of three is lost, while the second is slow or all sum."""
    begun = 0.0
    with pytest.raises(ProcessLost) as caught, open_world("cpu", wait_minutes=1) as (world, _):
        pids = world.exchange("their numbers", os.getpid())
        heard(world)
        begun = time.monotonic()
        if kind == "stopped":
            world._wait_s = PATIENCE_S
        if rank == 2:
            if kind == "stopped":
                stop_until_gone(pids[0])
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "killed in a sum":
            world.sum_gradients([torch.nn.Parameter(torch.ones(2**18))])
        elif kind == "killed" and rank == 1:
            while 0 not in world._lost:  # as long as it takes the first to know
                time.sleep(0.01)
        world.exchange("the next", None)
    # As one of those that waited ends, the other may hear of that first.
    assert caught.value.rank == 2 or "ProcessLost: process 2 (" in str(caught.value)
    return time.monotonic() - begun


def test_a_process_that_dies_is_named_at_once_and_one_that_is_stopped_after_wait_minutes():
    begun = {kind: begin(3, lose_the_third, kind) for kind in ("killed", "killed in a sum", "stopped")}
    waited = {kind: [one.value for one in ended()[:2]] for kind, ended in begun.items()}
    assert max(waited["killed"][0], *waited["killed in a sum"]) < 30  # they would wait for a minute
    assert PATIENCE_S <= waited["stopped"][0] < 60


def test_processes_tell_each_other_everything_and_notice_who_is_not_in_step():
    unlike, nonsense = begin(2, out_of_step), begin(2, say_nonsense)
    for device, small, sums, own, traffic, sharing in values(in_processes(3, tell)):
        assert device == "cpu" and sharing == 3
        assert small == [[[rank, step] for rank in range(3)] for step in range(20)]
        assert sums == [[3.0], [6.0], [9.0], [12.0], [15.0], [0.0]]
        assert own == [[0.0, 0.0]] * 2
        assert traffic["processes/exchanged_bytes"] > 2**22
        assert traffic["processes/summed_bytes"] == 4 * (107 + 5)
    first, second = unlike()
    assert "has come to this when this process came to that" in first.error
    assert second.error is not None
    assert "process 1 (" in (said := nonsense()[0].error) and "said what is no message" in said


def test_values_come_back_as_they_were():
    for value in (
        None,
        True,
        3,
        -(10**40),
        0.1,
        math.inf,
        "\u2190 \ud800",
        [],
        {},
        ["what", [1, [2.5, None]]],
        {"a": {"b": [2]}},
    ):
        assert unpack(pack(value)) == value
    assert unpack(pack((1, np.float64(0.5)))) == [1, 0.5]
    base = torch.rand(3, 2) * 9
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int64):
        for shape in ((), (0,), (2, 0), (3, 2)):
            value = base.flatten()[: math.prod(shape)].view(shape).to(dtype)
            first, same = unpack(pack({"some": [value, value.T if value.ndim == 2 else value]}))["some"]
            assert first.dtype == dtype and torch.equal(first, value) and same.shape == value.shape[::-1]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", np.zeros(2), World(), print, {(1, 2): 3}])
def test_what_is_none_of_these_is_refused_before_it_is_sent(value):
    with pytest.raises(TypeError):
        pack(value)


def text_only(text: bytes) -> bytes:
    return save({"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pickle.dumps(print),
        pack([1, 2])[:-3],
        save({"other": torch.ones(1)}),
        text_only(pickle.dumps(print)),
        text_only(b"[" * 100_000),
        text_only(b'{"\\u0000tensor": "0"}'),
        save({"json": torch.ones(2).bfloat16()}),
    ],
)
def test_what_is_no_message_is_a_value_error(content):
    with pytest.raises(ValueError, match="no message"):
        unpack(content)


def test_nothing_that_comes_from_another_process_is_unpickled():
    for path in Path(processes.__file__).parent.glob("*.py"):
        assert not re.search(
            r"import pickle|pickle\.|(?<!json\.)_object|object_(?!hook)", path.read_text()
        ), path
