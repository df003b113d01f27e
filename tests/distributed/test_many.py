"""The processes of a run: what they are dealt, what they tell each other, and who counts as lost."""

import pickle
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from several_processes import begin, in_processes, values

from grpo.distributed import World, heartbeat, launch, many, open_world, store
from grpo.distributed.messages import pack, unpack
from grpo.environment import launched_processes
from grpo.evaluate import interleave
from grpo.types import Prompt, Rollout


@pytest.mark.parametrize(("size", "count"), [(1, 2), (2, 7), (3, 0), (3, 8), (8, 1), (8, 64)])
def test_groups_are_dealt_once_each_as_evenly_as_can_be(size, count):
    world, shares = World(), []
    for world.rank in range(size):
        world.size = size
        shares.append(world.share(count))
    assert [group for share in shares for group in share] == [*range(count)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert max(map(len, shares)) <= world.largest_share(count)


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


class FakeStore(dict):
    def has(self, keys):
        return all(key in self for key in keys)


def test_a_process_is_lost_when_its_heart_is_silent_for_too_long(monkeypatch):
    now = 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beats = FakeStore({"beat/1": b"1", "beat/2": b"1"})
    listener = heartbeat.Listener(beats)
    for now in np.arange(0.0, 40.0, 2.0):
        beats["beat/1"] = str(now).encode()
        trouble = listener.trouble([1, 2])
        assert trouble == (None if now <= 20 else (2, "is lost: no sign of life for 20 seconds"))
    beats["gone/1"] = b"failed: ValueError: too hot"  # what is said goes before what is guessed
    assert listener.trouble([1, 2]) == (1, "failed: ValueError: too hot")
    del beats["gone/1"]
    for now in (100.0, 102.0, 104.0):  # who has not listened for a while begins anew
        assert listener.trouble([1]) is None, now


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
    with open_world("cpu", wait_minutes=1) as (world, device), mock.patch.object(many, "BUCKET_BYTES", 100):
        random = np.random.default_rng(rank).bytes(9 * 2**20)  # does not compress: three parts
        large = world.exchange("much", random)
        assert [len(each) for each in large] == [len(random)] * 3
        assert large[rank] == random and large[0] != large[1]
        small = [world.exchange("little", (rank, step)) for step in range(20)]
        shapes = (5, 2), (10, 1), (6, 5), (5, 1), (12, 1), (40, 1)
        kinds = {(5, 1): torch.float64}  # which would fit into a lot with the next
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=kinds.get(shape))) for shape in shapes]
        for number, parameter in enumerate(parameters[:-1], 1):  # of the last nobody has any
            if rank:
                parameter.grad = torch.full_like(parameter.T, rank * number).T  # not contiguous
        order = mock.Mock()
        with (
            mock.patch.object(many.dist, "all_reduce", wraps=many.dist.all_reduce) as send,
            mock.patch.object(world, "_finish", wraps=world._finish) as wait,
        ):
            order.attach_mock(send, "send")
            order.attach_mock(wait, "wait")
            world.sum_gradients(parameters)
        assert "".join(call[0][0] for call in order.mock_calls) == "sswswswsww"  # sent, waited for
        own = torch.full((2, 2), float(rank)).T
        world.copy_from_main([own])
        sums = [p.grad.unique().tolist() for p in parameters]
        return device, small, sums, own.tolist(), world.take_traffic(), world.sharing


def out_of_step(rank: int) -> None:
    with open_world("cpu", wait_minutes=1) as (world, _):
        world.exchange("this" if rank else "that", None)


def test_processes_tell_each_other_everything_and_notice_who_is_not_in_step():
    unlike = begin(2, out_of_step)
    for device, small, sums, own, traffic, sharing in values(in_processes(3, tell)):
        assert device == "cpu" and sharing == 3
        assert small == [[(rank, step) for rank in range(3)] for step in range(20)]
        assert sums == [[3.0], [6.0], [9.0], [12.0], [15.0], [0.0]]
        assert own == [[0.0, 0.0]] * 2
        assert traffic["processes/exchanged_bytes"] > 9 * 2**20
        assert traffic["processes/summed_bytes"] == 4 * (107 + 5)
    first, second = unlike()
    assert "has come to this when this process came to that" in first.error
    assert second.error is not None


def test_values_come_back_as_they_were():
    for value in (
        None, True, 3, -(10**40), 0.1, float("inf"), "\u2190 \ud800", b"\0\xff", Path("a/b"), (), [], {},
        ("what", [1, (2.5, None)]), {"a": {1: [2]}, (1, 2): "tuple"},
    ):  # fmt: skip
        back = unpack(pack(value))
        assert back == value and type(back) is type(value)
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int64):
        for shape in ((), (0,), (2, 0), (3, 2)):
            value = (torch.rand(shape) * 9).to(dtype)
            for given in (value, value.T if value.ndim == 2 else value):
                back = unpack(pack(given))
                assert back.dtype == dtype and torch.equal(back, given)
    texts, ones = ["a", "\ud800"], torch.ones(2, 3)
    made = Rollout([], [[1, 2]], ones.long(), ones[:, 0].long(), ones[:, 0].bool(), ones / 3, texts)
    array = np.arange(6.0).reshape(2, 3).T
    first, second, back = unpack(pack([array, np.int64(3), made]))
    assert np.array_equal(first, array) and first.flags.writeable and second == 3
    assert isinstance(back, Rollout) and back.completions == texts
    assert torch.equal(back.sampler_logp, made.sampler_logp)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), Prompt("1", "P:", {}), print])
def test_what_is_none_of_these_is_refused_before_it_is_sent(value):
    with pytest.raises(TypeError, match="cannot tell each other"):
        pack(value)


@pytest.mark.parametrize(
    "content",
    [
        b"", pickle.dumps(print), zlib.compress(b""), zlib.compress(pickle.dumps(print)),
        pack([1, 2])[:-3],
        *(zlib.compress(len(head).to_bytes(4, "big") + head) for head in (
            b'{"record": ["os.system", ["true"]]}', b'{"tensor": ["load", [1]]}', b'{"bytes": 5}',
            b'{"tensor": ["int64", [99]]}', b'{"array": ["|O", [1]]}', b'{"new": 1}', b'{"a": 1, "b": 2}',
            b"[" * 100_000,
        )),
    ],
)  # fmt: skip
def test_what_is_no_message_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"."):
        unpack(content)


def test_the_store_listens_where_others_know_it():
    for host, here, addresses in (
        ("127.0.0.1", True, ("127.0.0.1",)), ("localhost", True, ("127.0.0.1", "::1")),
        ("localhost", False, ("0.0.0.0",)),  # as a cluster may tell its first machine
        ("192.0.2.1", False, ("0.0.0.0",)),  # not this machine's
    ):  # fmt: skip
        with store._listen(host, everyone_is_here=here) as listening:
            assert listening.getsockname()[0] in addresses
