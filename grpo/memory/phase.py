"""What is known of a phase beforehand, and what is recorded of it when it has run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from grpo.memory.shape import Shape

Parts = Mapping[str, int]
"""Bytes by component."""
OUTSIDE = "not torch"
"""The part of a footprint that no tensor accounts for: interpreter, libraries, context."""
KEPT = "freed, but kept"
"""The part that an allocator holds for later: gaps between tensors, and what a larger phase needed."""
LEFT = "kept for the next rollout"
"""The part that another phase has left for the next time that it runs."""
ADDED = "added"
"""The only part of a footprint that says what a phase adds, and not yet what it consists of."""


@dataclass(frozen=True)
class Footprint:
    """Bytes at a phase's peak, by component, give or take `error_bytes` (95 %)."""

    parts: dict[str, float]
    error_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def upper_bytes(self) -> float:
        return self.peak_bytes + self.error_bytes

    @property
    def tensor_bytes(self) -> float:
        """Without what no tensor accounts for."""
        return self.peak_bytes - self.parts.get(OUTSIDE, 0.0) - self.parts.get(KEPT, 0.0)


@dataclass(frozen=True)
class Slack:
    """What a process holds besides a phase's tensors and what it held before: in shares of what is added.

    share_of_others: of what the largest of the other phases adds, between whose tensors this one's come.
    """

    share: float
    error_share: float
    error_bytes: float = 0.0
    share_of_others: float = 0.0


class Kept(Protocol):
    """What a phase has left for the next time that it runs."""

    @property
    def nbytes(self) -> int: ...

    @property
    def largest_nbytes(self) -> int:
        """Of what is used first."""

    def trim(self, room: float) -> None:
        """Hold no more than `room` bytes."""

    def release(self) -> None: ...


@dataclass(frozen=True)
class PhaseSpec:
    """A phase that can be split by rows.

    whole, split: what the predictor calls it when all rows go through at once, and when they do not.
    rows: fixed by the user, or None. parts: what its added bytes consist of, in closed form; what is
    left of the prediction is called activations. keeps: bytes that it leaves for the next time, given room.
    """

    whole: str
    split: str
    rows: int | None = None
    parts: Callable[[Shape], Parts] = field(default=lambda _: {})
    keeps: Callable[[Shape], int] | None = None


@dataclass
class PhaseRecord:
    """One phase of one step, a line of memory.jsonl. Bytes, of the process's peak where nothing else is said.

    worst: what was planned before the first step, for the longest texts, with its error. expected: by what
    was known then, for the shapes that came. predicted: by what was measured since, too; of it, what tensors
    add. device_used: measured.
    """

    phase: str
    rows: int
    prompt_tokens: int
    new_tokens: int
    worst_bytes: int
    expected_bytes: int
    expected_error_bytes: int
    predicted_bytes: int
    predicted_added_bytes: int
    process_before_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    device_used_bytes: int
    added_bytes: int | None = None
    kv_bytes: int | None = None
    kv_growth: list[tuple[int, int]] = field(default_factory=list)
    """(tokens generated, bytes of keys and values) within a rollout."""
    retries: int = 0
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
