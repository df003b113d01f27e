"""The processes of a run: what they are dealt, what they tell each other, and who counts as lost."""

import numpy as np
import pytest
import torch
from several_processes import in_processes

from grpo.distributed import World, heartbeat, launch, many, open_world
from grpo.environment import launched_processes
from grpo.evaluate import interleave


def of_size(size: int) -> list[World]:
    worlds = [World() for _ in range(size)]
    for rank, world in enumerate(worlds):
        world.rank, world.size = rank, size
    return worlds


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 64])
def test_groups_are_dealt_once_each_as_evenly_as_can_be(size, count):
    shares = [world.share(count) for world in of_size(size)]
    assert [group for share in shares for group in share] == [*range(count)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert max(map(len, shares)) <= World.largest_share(of_size(size)[0], count)


def test_one_process_has_nobody_to_wait_for():
    with open_world("mps", wait_minutes=1) as (world, device):
        assert (world.rank, world.size, world.is_main, device) == (0, 1, True, "mps")
        assert world.exchange("anything", "mine") == ["mine"]
        assert world.from_main("anything", 3) == 3
        parameter = torch.nn.Parameter(torch.ones(2))
        world.sum_gradients([parameter])
        assert parameter.grad is None
        assert world.take_traffic() == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
    ],
)
def test_launchers_say_who_is_who(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_processes() == expected


def test_each_process_has_a_card_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch._device_of("auto") == launch._device_of("cuda") == "cuda:1"
    assert launch._device_of("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"device is 'cuda:0'.*auto, cuda or cpu"):
        launch._device_of("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"2 CUDA devices: start one for each, or give --device cpu"):
        launch._device_of("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch._device_of("auto") == "cpu"


def test_gradients_are_packed_while_others_are_on_their_way(monkeypatch):
    """Two lots at once, no more; each sum comes to its own."""
    processes = many.Processes.__new__(many.Processes)
    processes._traffic = {"processes/summed_bytes": 0.0}
    flying: list[torch.Tensor] = []
    seen = []

    def send(flat: torch.Tensor, async_op: bool) -> torch.Tensor:
        flying.append(flat)
        seen.append(len(flying))
        return flat

    def finish(sent: torch.Tensor, what: str) -> None:
        assert flying.pop(0) is sent
        sent.mul_(2)

    monkeypatch.setattr(many.dist, "all_reduce", send)
    monkeypatch.setattr(many, "BUCKET_BYTES", 100)
    monkeypatch.setattr(processes, "_finish", finish, raising=False)
    parameters = [torch.zeros(size, requires_grad=True) for size in (10, 10, 30, 5, 12, 40)]
    for number, parameter in enumerate(parameters[1:], 1):  # the first has none yet
        parameter.grad = torch.full_like(parameter, number)
    processes.sum_gradients(parameters)
    assert [parameter.grad.unique().tolist() for parameter in parameters] == [[2 * n] for n in range(6)]
    assert seen == [1, 2, 2, 2] and not flying
    assert processes._traffic["processes/summed_bytes"] == 4 * 107


def test_buckets_hold_every_gradient_once_and_no_more_than_they_may(monkeypatch):
    monkeypatch.setattr(many, "BUCKET_BYTES", 100)
    kinds = [(10, torch.float32), (15, torch.float32), (1, torch.float32), (2, torch.float64)]
    tensors = [torch.full((size,), float(i), dtype=dtype) for i, (size, dtype) in enumerate(kinds)]
    tensors.append(torch.zeros(99, dtype=torch.float64))  # by itself
    buckets = list(many.buckets(tensors))
    assert [tensor for bucket in buckets for tensor in bucket] == tensors
    assert [len(bucket) for bucket in buckets] == [2, 1, 1, 1]
    assert not list(many.buckets([]))


class FakeStore(dict):
    def has(self, keys):
        return all(key in self for key in keys)


def test_a_process_is_lost_when_its_heart_is_silent_for_too_long(monkeypatch):
    now = 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    store = FakeStore({"beat/1": b"1", "beat/2": b"1"})
    listener = heartbeat.Listener(store)
    for now in np.arange(0.0, 40.0, 2.0):
        store["beat/1"] = str(now).encode()
        trouble = listener.trouble([1, 2])
        assert trouble == (None if now <= 20 else (2, "is lost: no sign of life for 20 seconds"))
    store["gone/1"] = b"failed: ValueError: too hot"  # what is said goes before what is guessed
    assert listener.trouble([1, 2]) == (1, "failed: ValueError: too hot")


def test_who_has_not_listened_for_a_while_begins_anew(monkeypatch):
    times = iter((0.0, 60.0, 62.0, 64.0))
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: next(times))
    listener = heartbeat.Listener(FakeStore({"beat/1": b"1"}))
    assert [listener.trouble([1]) for _ in range(4)] == [None] * 4


def test_interleaved_scores_are_in_the_order_of_the_prompts():
    scores = np.arange(7.0).reshape(7, 1)
    parts = [{"legal": scores[rank::3]} for rank in range(3)]
    parts[1]["top5"] = scores[1::3]
    joined = interleave(parts)
    assert np.array_equal(joined["legal"], scores)
    assert np.array_equal(np.flatnonzero(~np.isnan(joined["top5"])), [1, 4])
    assert np.array_equal(interleave([{"legal": scores[:1]}, {}, {}])["legal"], scores[:1])


def tell(rank: int) -> tuple:
    """Messages of many sizes, a sum of unequal gradients, and a copy of the first one's tensor."""
    with open_world("cpu", wait_minutes=1) as (world, device):
        random = np.random.default_rng(rank).bytes(9 * 2**20)  # does not compress: three parts
        large = world.exchange("much", random)
        assert [len(each) for each in large] == [len(random)] * 3
        assert large[rank] == random and large[0] != large[1]
        small = [world.exchange("little", (rank, step)) for step in range(20)]
        parameters = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5))]
        if rank:
            parameters[0].grad = torch.full((2, 3), float(rank)).T  # not contiguous
        world.sum_gradients(parameters)
        own = torch.full((2, 2), float(rank)).T
        world.copy_from_main([own])
        traffic = world.take_traffic()
        return device, small, [p.grad.tolist() for p in parameters], own.tolist(), traffic, world.sharing


def test_processes_tell_each_other_everything():
    for ended in in_processes(3, tell):
        assert ended.error is None
        device, small, gradients, own, traffic, sharing = ended.value
        assert device == "cpu" and sharing == 3
        assert small == [[(rank, step) for rank in range(3)] for step in range(20)]
        assert gradients == [[[3.0, 3.0]] * 3, [0.0] * 5]
        assert own == [[0.0, 0.0]] * 2
        assert traffic["processes/exchanged_bytes"] > 9 * 2**20
        assert traffic["processes/summed_bytes"] == 4 * 11


def out_of_step(rank: int) -> None:
    with open_world("cpu", wait_minutes=1) as (world, _):
        world.exchange("this" if rank else "that", None)


def test_processes_that_are_not_in_step_notice():
    first, second = in_processes(2, out_of_step)
    assert "has come to this when this process came to that" in first.error
    assert second.error is not None
