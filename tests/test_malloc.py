"""What glibc keeps of freed memory, seen from outside: the private memory that the system counts."""

import os
from unittest import mock

import pytest
from several_processes import in_processes

from grpo import malloc
from grpo.memory.monitor import private_bytes

MB = 2**20
pytestmark = pytest.mark.skipif(malloc.free_bytes() == 0, reason="another C library than glibc")


def blocks(count: int, size: int = MB) -> list[bytearray]:
    return [bytearray(size) for _ in range(count)]


def held(rank: int) -> list[int]:
    """MB more than before, of a heap that keeps all, or of one that is bounded, as blocks come and go."""
    before, seen = private_bytes(), []
    malloc.keep_freed() if rank == 0 else malloc.bound_heap(64 * MB)
    seen.append((private_bytes() - before) // MB)
    for count, size in ((64, MB), (32, 2 * MB - 4096)) if rank == 0 else ((48, MB), (96, MB)):
        made = blocks(count, size)
        seen.append((private_bytes() - before) // MB)
        del made
        seen.append((private_bytes() - before) // MB)
    return [*seen, malloc.free_bytes() // MB]


def test_what_is_freed_is_kept_and_a_bounded_heap_is_there_from_the_start_and_does_not_grow():
    """Of 64 MB: 48 fit in, of 96 half get mappings of their own, which go back."""
    keeping, bounded = (ended.value for ended in in_processes(2, held))
    _, filled, kept, again, after, free = keeping
    assert 62 <= filled <= 68 and kept == filled and again <= filled + 1 and after == again and free >= 63
    reserved, within, _, beyond, after, _ = bounded
    assert 62 <= reserved <= 66 and within <= reserved + 1 and after <= reserved + 2
    assert 24 <= beyond - reserved <= 38  # of 32, as some may find a gap of before


def test_the_user_has_the_last_word():
    for said, theirs in ({}, False), ({"GLIBC_TUNABLES": "ours"}, False), ({"GLIBC_TUNABLES": "x"}, True):
        with mock.patch.dict(os.environ, said, clear=True):
            assert malloc.user_tunes_malloc("ours") == theirs
    with mock.patch.dict(os.environ, {"MALLOC_ARENA_MAX": "1"}, clear=True):
        assert malloc.user_tunes_malloc("ours")
