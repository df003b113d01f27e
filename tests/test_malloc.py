"""What glibc keeps of freed memory, seen from outside: the private memory that the system counts."""

import subprocess
import sys

import pytest

from grpo import malloc

MB = 2**20
HEADER = """
from grpo import malloc
from grpo.memory.monitor import private_bytes as held
MB = 2**20
def blocks(count, size=MB):
    return [bytearray(size) for _ in range(count)]
"""


def said(script: str) -> list[int]:
    """Numbers that a fresh process prints."""
    command = [sys.executable, "-c", HEADER + script]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(word) for word in ended.stdout.split()]


pytestmark = pytest.mark.skipif(malloc.free_bytes() == 0, reason="another C library than glibc")


def test_what_is_freed_is_kept_for_what_comes_next():
    script = """
malloc.keep_freed()
before = held()
first = blocks(64)
filled = held() - before
del first
print(filled // MB, (held() - before) // MB, malloc.free_bytes() // MB)
again = blocks(32, 2 * MB - 4096)
print((held() - before) // MB)
"""
    filled, kept, free, reused = said(script)
    assert 62 <= filled <= 68 and kept == filled and free >= 63 and reused <= filled + 1


def test_a_bounded_heap_is_there_from_the_start_and_does_not_grow():
    """64 MB: 48 fit in, of 96 half get mappings of their own, which go back."""
    script = """
before = held()
malloc.bound_heap(64 * MB)
print((held() - before) // MB)
some = blocks(48)
print((held() - before) // MB)
del some
many = blocks(96)
print((held() - before) // MB)
del many
print((held() - before) // MB)
"""
    reserved, within, beyond, after = said(script)
    assert 62 <= reserved <= 66 and within <= reserved + 1
    assert 96 <= beyond <= 102 and after <= reserved + 2


def test_the_user_has_the_last_word(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert not malloc.user_tunes_malloc("ours")
    monkeypatch.setenv("GLIBC_TUNABLES", "ours")
    assert not malloc.user_tunes_malloc("ours")
    monkeypatch.setenv("GLIBC_TUNABLES", "theirs")
    assert malloc.user_tunes_malloc("ours")
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert malloc.user_tunes_malloc("ours")
