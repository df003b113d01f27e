"""What a process holds: tensors as predicted, and what stands between them and the system's count.

That is what exists all along, what no tensor accounts for, and what an allocator keeps of what was freed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from grpo.memory.monitor import MemoryMonitor
from grpo.memory.phase import KEPT, LEFT, OUTSIDE, Footprint, Parts, PhaseSpec, Slack
from grpo.memory.predictor import Predictor
from grpo.memory.shape import Shape

NO_SLACK = Slack(0.0, 0.0)


class ProcessMemory:
    """The footprint of each phase in a process.

    resident: bytes by component of what exists between phases. batch_size: rows of a step.
    overhead_bytes: what the process holds besides tensors; None: measured. gap_bytes: what its allocator has
    free by now. slack: what allocators hold besides in a phase, as far as it is known beforehand.
    """

    def __init__(
        self,
        phases: Mapping[str, PhaseSpec],
        predictor: Predictor,
        monitor: MemoryMonitor,
        *,
        resident: Callable[[], Parts],
        batch_size: int,
        overhead_bytes: int | None = None,
        gap_bytes: int = 0,
        slack: Callable[[str], Slack] = lambda phase: NO_SLACK,
    ) -> None:
        self.phases = dict(phases)
        self.predictor = predictor
        self.batch_size = batch_size
        self._monitor = monitor
        self._resident = resident
        if overhead_bytes is None:
            overhead_bytes = max(0, monitor.in_use_bytes() - sum(resident().values()))
        self.overhead_bytes = float(overhead_bytes)
        self._slack = slack
        self._gaps = gap_bytes
        self._share_seen: float | None = None
        self._held: list[tuple[float, float]] = []
        self._reserved = self._gaps_of_old = self._most_added = 0.0
        self._limit = math.inf
        self.left_bytes = 0.0
        """What a phase leaves for the next time that it runs, and all have beside what they add."""

    @property
    def base_bytes(self) -> float:
        """What is held all along."""
        return sum(self._resident().values()) + self.overhead_bytes

    def footprint(
        self, phase: str, shape: Shape, batch_size: int | None = None, *, refined: bool = True
    ) -> Footprint:
        """What the process holds at the phase's peak, by component.

        refined: by what was measured since the run began.
        """
        spec = self.phases[phase]
        added = self.predictor.predict(self._name(phase, shape.rows, batch_size), shape, refined=refined)
        parts = {name: float(size) for name, size in spec.parts(shape).items()}
        rest = added.peak_bytes - sum(parts.values())
        if rest < 0:  # the closed forms are upper bounds, the trace is not
            parts = {name: size * added.peak_bytes / sum(parts.values()) for name, size in parts.items()}
        if self.left_bytes:
            parts[LEFT] = self.left_bytes
        slack = self._slack(phase)
        if refined and self._share_seen is not None:
            slack = replace(slack, share=self._share_seen, error_share=slack.error_share / 2)
        return Footprint(
            {
                **self._resident(),
                **parts,
                "activations": max(0.0, rest),
                KEPT: max(slack.share * added.peak_bytes, self._gaps - added.peak_bytes),
                OUTSIDE: self.overhead_bytes,
            },
            math.hypot(added.error_bytes, slack.error_share * added.peak_bytes, slack.error_bytes),
        )

    def added_bytes(self, footprint: Footprint) -> float:
        """What a phase's tensors come to beside those that exist between phases."""
        return self._beside_resident(footprint) - footprint.parts.get(LEFT, 0.0)

    def _beside_resident(self, footprint: Footprint) -> float:
        return footprint.tensor_bytes - sum(self._resident().values())

    def lasting(self, footprints: Mapping[str, Footprint]) -> dict[str, Footprint]:
        """The same once all have run: an allocator does not give back what the largest phase needed.

        Of a heap that is bounded (`reserve`) it does: what did not fit into it. The heap counts as a whole
        where memory does that is not touched, else as far as it is touched. Whether anything fits into the
        gaps that it had before is not known.
        """
        added = {phase: self._beside_resident(own) for phase, own in footprints.items()}
        held = {**self._resident(), OUTSIDE: self.overhead_bytes, KEPT: self._reserved}
        unsure = max(self._slack(phase).error_bytes for phase in self.phases)
        whole = Footprint({name: float(size) for name, size in held.items()}, unsure)
        gaps = self._gaps_of_old
        if self._reserved and self._monitor.counts_private:
            kept = [whole, *(replace(own, error_bytes=own.error_bytes + gaps) for own in footprints.values())]
        else:
            kept = [] if self._reserved else [whole]
            for phase, own in footprints.items():
                others = max((size for other, size in added.items() if other != phase), default=0.0)
                between = self._slack(phase).share_of_others * others + gaps / 2
                parts = {**own.parts, KEPT: own.parts.get(KEPT, 0.0) + between}
                kept.append(Footprint(parts, own.error_bytes + gaps / 2))
        return {phase: _raised(own, [own, *kept], self._limit) for phase, own in footprints.items()}

    def reserve(self, most: Footprint, bound: Callable[[int], None], limit_bytes: float) -> None:
        """Bound a heap to what the largest phase adds; what it then holds is part of the plan.

        limit_bytes: more than that the system does not let this process have, where it counts addresses.
        """
        added = max(0.0, self._beside_resident(most))
        bound(int(added))
        held = self._monitor.memory().ours_bytes - self.base_bytes  # with gaps that were there before
        if self._monitor.counts_private:
            self._limit = limit_bytes
        else:
            held += self._monitor.gap_bytes()  # which is not touched yet
        self._reserved = max(added, held)
        self._gaps_of_old = self._reserved - added

    def observe(
        self, phase: str, shape: Shape, *, added_bytes: int | None, process_bytes: int, before_bytes: int = 0
    ) -> None:
        """What was measured: tensors where they were counted, and the process.

        before_bytes: that it held already. A phase in which it does not grow says nothing of what it needs:
        it goes on in what longer texts have left.
        """
        predicted = self._beside_resident(self.footprint(phase, shape))
        if added_bytes is not None:
            self.predictor.observe(self._name(phase, shape.rows), shape, added_bytes)
        if process_bytes > before_bytes:
            self._held.append((predicted, process_bytes - self.base_bytes))

    def learn_slack(self) -> None:
        """What the process held beyond tensors in the last step's largest phase: others reuse that.

        And so do steps that need less than an earlier one: of them nothing is learned.
        """
        if not self._held:
            return
        added, held = max(self._held)
        self._held.clear()
        if self._reserved or added < self._most_added:  # holds more than what it needs
            return
        self._most_added = added
        share = max(0.0, held - added) / added if added else 0.0
        self._share_seen = max(self._share_seen or 0.0, share)

    def _name(self, phase: str, rows: int, batch_size: int | None = None) -> str:
        spec = self.phases[phase]
        return spec.whole if rows >= (batch_size or self.batch_size) else spec.split


def _raised(own: Footprint, every: Sequence[Footprint], most: float) -> Footprint:
    """To the largest peak of every, which is kept, and the largest upper end, but for `most` bytes."""
    peak = min(most, max(each.peak_bytes for each in every))
    upper = min(most, max(each.upper_bytes for each in every))
    kept = own.parts.get(KEPT, 0.0) + peak - own.peak_bytes
    return Footprint({**own.parts, KEPT: kept}, upper - peak)
