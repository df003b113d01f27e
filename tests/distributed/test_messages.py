"""Messages between processes: what they carry, what they refuse, and who may listen."""

import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo.distributed import store
from grpo.distributed.messages import pack, unpack
from grpo.types import Prompt, Rollout


def rollout() -> Rollout:
    ones = torch.ones(2, 3)
    return Rollout([], [[1, 2]], ones.long(), ones[:, 0].long(), ones[:, 0].bool(), ones / 3, ["a", "\ud800"])


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(10**40), 0.1, float("inf"), "\u2190 \ud800", b"\0\xff", Path("a/b"), (), [], {},
        ("what", [1, (2.5, None)]), {"a": {1: [2]}, (1, 2): "tuple"},
    ],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value):
    back = unpack(pack(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 2)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    value = (torch.rand(shape) * 9).to(dtype)
    for given in (value, value.T if value.ndim == 2 else value):
        back = unpack(pack(given))
        assert back.dtype == dtype and torch.equal(back, given)


def test_arrays_numbers_of_numpy_and_rollouts():
    array = np.arange(6.0).reshape(2, 3).T
    first, second, back = unpack(pack([array, np.int64(3), rollout()]))
    assert np.array_equal(first, array) and first.flags.writeable and second == 3
    assert isinstance(back, Rollout) and back.completions == ["a", "\ud800"]
    assert torch.equal(back.sampler_logp, rollout().sampler_logp)


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


@pytest.mark.parametrize(
    ("host", "here", "address"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "127.0.0.1"),
        ("localhost", False, "0.0.0.0"),  # as a cluster may tell its first machine
        ("192.0.2.1", False, "0.0.0.0"),  # not this machine's
    ],
)
def test_the_store_listens_where_others_know_it(host, here, address):
    with store._listen(host, everyone_is_here=here) as listening:
        assert listening.getsockname()[0] in (address, "::1" if here else address)
