"""Freed memory that glibc keeps, seen from outside: the private memory that the system counts."""

import os
from unittest import mock

import pytest
from several_processes import in_processes, values

from grpo import environment
from grpo.environment import free_bytes, keep_freed, return_freed_memory
from grpo.memory.device import resident_bytes

MB = 2**20
pytestmark = pytest.mark.skipif(free_bytes() == 0, reason="another C library than glibc")


def held(rank: int) -> list[tuple[int, int]]:
    """MB more than before, resident and free, as blocks come and go, kept and then given back."""
    before, free, seen = resident_bytes(), free_bytes(), list[tuple[int, int]]()
    keep_freed()
    for step in range(4):
        if step == 3:
            return_freed_memory()
        blocks = [bytearray(b"1") * MB for _ in range(64)]  # each page is touched
        if step == 0:
            seen.append(((resident_bytes() - before) // MB, (free_bytes() - free) // MB))
        del blocks
        seen.append(((resident_bytes() - before) // MB, (free_bytes() - free) // MB))
    return seen


def test_what_is_freed_is_kept_for_what_comes_next_until_it_is_given_back():
    (seen,) = values(in_processes(1, held))
    (filled, used), *kept, (returned, beyond) = seen
    assert 62 <= filled <= 68 and used <= 2
    assert all(filled - 2 <= resident <= filled + 2 and free >= 60 for resident, free in kept)
    assert returned <= 4 and beyond <= 4


def test_the_user_has_the_last_word_and_a_library_that_refuses_is_named(logged):
    mallopt = mock.Mock(return_value=0)
    with mock.patch.object(environment, "_glibc", return_value=mock.Mock(mallopt=mallopt)):
        for said in {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096"}, {"MALLOC_ARENA_MAX": "1"}:
            with mock.patch.dict(os.environ, said, clear=True):
                keep_freed()
        assert not mallopt.called and not logged
        with mock.patch.dict(os.environ, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, clear=True):
            keep_freed()
    assert mallopt.mock_calls == [mock.call(-3, 2**31 - 1), mock.call(-1, -1)]
    assert len(logged) == 1 and "does not keep freed memory" in logged[0]
