"""What glibc keeps of freed memory, seen from outside: the private memory that the system counts."""

import os
from unittest import mock

import pytest
from several_processes import in_processes, values

from grpo import malloc
from grpo.memory import Device
from grpo.memory.device import resident_bytes

MB = 2**20
pytestmark = pytest.mark.skipif(malloc.free_bytes() == 0, reason="another C library than glibc")


def held(rank: int) -> list[int]:
    """MB more than before, as blocks come and go, kept and then given back: private, free, resident.

    What is free below a block that stays is given back as pages, and is private memory still.
    """
    device = Device(limit_bytes=2**40)
    before, free, seen = device.memory().ours_bytes, malloc.free_bytes(), list[int]()
    resident = resident_bytes()

    def note() -> None:
        now = device.memory().ours_bytes - before, malloc.free_bytes() - free, resident_bytes() - resident
        seen.extend(each // MB for each in now)

    malloc.keep_freed()
    for count, size in (64, MB), (32, 2 * MB - 4096):
        blocks = [bytearray(b"1") * size for _ in range(count)]  # each page is touched
        note()
        del blocks
        note()
    malloc.give_back()
    note()
    blocks = [bytearray(2 * MB) for _ in range(32)]
    del blocks
    note()
    return seen


def test_what_is_freed_is_kept_for_what_comes_next_until_it_is_given_back():
    (seen,) = values(in_processes(1, held))
    filled, kept, again, after, returned, beyond = zip(seen[::3], seen[1::3], seen[2::3], strict=True)
    assert 62 <= filled[0] <= 68 and kept[0] == filled[0] and kept[1] >= 62
    assert again[0] <= filled[0] + 1 and after[0] == again[0] and after[1] >= 62
    assert filled[2] >= 60 and kept[2] >= 60 and min(returned[0], returned[2]) <= 4
    assert abs(beyond[0] - returned[0]) <= 2  # large ones have mappings of their own


def test_the_user_has_the_last_word():
    for said, theirs in ({}, False), ({"GLIBC_TUNABLES": "ours"}, False), ({"GLIBC_TUNABLES": "x"}, True):
        with mock.patch.dict(os.environ, said, clear=True):
            assert malloc.user_tunes_malloc("ours") == theirs
    with mock.patch.dict(os.environ, {"MALLOC_ARENA_MAX": "1"}, clear=True):
        assert malloc.user_tunes_malloc("ours")
