"""What is done number by number, a slice at a time: on a CPU numbers then stay in its caches."""

from collections.abc import Iterator


def slices(count: int, size: int) -> Iterator[slice]:
    """Of `count` things, `size` at a time."""
    for start in range(0, count, size):
        yield slice(start, start + size)
