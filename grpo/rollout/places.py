"""Places in tensors of fixed size, taken and given back."""

from collections.abc import Collection
from heapq import heappop, heappush


class Pool:
    """Numbered places. The lowest free one is taken first, so that those in use stay close to the front."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = set[int]()
        self._free = list(range(size))  # a heap

    @property
    def num_free(self) -> int:
        return self.size - len(self.taken)

    @property
    def front(self) -> int:
        """Places up to the last one in use: so many are read."""
        return max(self.taken, default=-1) + 1

    def take(self) -> int:
        """Returns a place that was free. IndexError where none is."""
        place = heappop(self._free)
        self.taken.add(place)
        return place

    def give_back(self, place: int) -> None:
        """Frees a place."""
        self.taken.remove(place)
        heappush(self._free, place)

    def close_gaps(self) -> dict[int, int]:
        """Takes what stands behind gaps into them, as new places by old ones."""
        moves, used = moves_into_gaps(self.taken), len(self.taken)
        self.taken = set(range(used))
        self._free = list(range(used, self.size))  # a heap
        return moves


def moves_into_gaps(taken: Collection[int]) -> dict[int, int]:
    """Returns new places, by old ones, of what stands behind gaps: as few move as can."""
    count, stay = len(taken), {place for place in taken if place < len(taken)}
    gaps = (place for place in range(count) if place not in stay)
    return {place: next(gaps) for place in sorted(taken) if place >= count}
