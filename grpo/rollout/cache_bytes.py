"""What a decoder's keys and values take up."""

from typing import NamedTuple


class CacheBytes(NamedTuple):
    """Bytes of the cache: `held` by tensors, `used` by tokens so far.

    growing: the largest layer of a cache that grows by concatenation, which is held once more while
    a token is added; 0 for a static cache.
    """

    held: int
    used: int
    growing: int = 0
