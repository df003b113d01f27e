"""Is memory growing? A test, not a glance; and if it is, what grows and who made it.

    with LeakWatch(device) as watch:
        for step in range(200):
            ...                       # a training step
            watch.sample(step, tokens=completion_tokens)
    print(watch.verdict())

Readings are taken at step boundaries, where nothing of a step should be left. What rises tells the
kind: allocated bytes are tensors that somebody holds, reserved bytes alone are fragmentation, the
device's used bytes alone are not torch's. The test is in trend.py. Left out: growth that is less
than `min_growth_bytes` over the run, and growth that stops.
"""

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch

from grpo.memory.device import Device
from grpo.memory.leaks.census import Group, Held, count_tensors, grown_tensors
from grpo.memory.leaks.culprits import Culprit, name_culprits
from grpo.memory.leaks.recording import Recorded, Recording
from grpo.memory.leaks.trend import MIN_STEPS, Array, find_trends, settled, without_covariate

MB = 2**20
MIN_GROWTH_BYTES = 4 * MB
"""Interpreters and allocators settle for hundreds of steps: less than this over a run is no leak."""
SETTLING = 0.03
"""Share of a process's resident memory that its heap may gain in the same way, through fragments."""
RECORDED_STEPS = 4
_BASELINE_STEP = MIN_STEPS // 2
_SUSPICION = 0.01

Kind = Literal["held tensors", "fragmentation", "not torch", "memory of unknown kind"]


@dataclass(frozen=True)
class MemorySample:
    """Bytes at the end of one step. `allocated` and `reserved` are None where nobody counted them."""

    step: int
    device_used_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Growth:
    """One kind of memory: bytes a step over the second half of the run, with a 95 % interval."""

    kind: Kind
    leak: bool
    bytes_per_step: float
    low: float
    high: float
    p_value: float
    why_none: str = ""
    """Why growth that is hardly chance is no leak of this kind."""

    def __str__(self) -> str:
        text = (
            f"{self.kind}: {self.bytes_per_step / MB:+.3f} MB a step "
            f"(95 % interval {self.low / MB:+.3f} to {self.high / MB:+.3f}, p = {self.p_value:.1g})"
        )
        return f"{text}: {self.why_none}" if self.why_none else text


@dataclass(frozen=True)
class LeakVerdict:
    """`growth` holds each kind that was measured, empty when there were too few steps."""

    num_steps: int
    growth: tuple[Growth, ...]
    follows_tokens: bool = False
    culprits: tuple[Culprit, ...] = ()

    @property
    def leak(self) -> bool:
        return any(each.leak for each in self.growth)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(each.kind for each in self.growth if each.leak)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"leak": self.leak, "kinds": list(self.kinds), **asdict(self)}

    def __str__(self) -> str:
        if not self.growth:
            return f"no verdict: {self.num_steps} steps, and a trend needs {MIN_STEPS}"
        head = "LEAK" if self.leak else "no leak"
        shown = [each for each in self.growth if each.leak] or self.growth
        lines = [f"{head} in {self.num_steps} steps", *(f"  {each}" for each in shown)]
        lines += [f"  held: {culprit}" for culprit in self.culprits]
        if self.follows_tokens:
            lines.append("  memory grew with the tokens; fix the completions' length to see what is left")
        return "\n".join(lines)


def detect_leak(samples: Sequence[MemorySample], *, min_growth_bytes: int = MIN_GROWTH_BYTES) -> LeakVerdict:
    """The verdict over one run's samples, in order.

    Where all samples have tokens, growth that these explain is no leak. The kind is the first of
    allocated, reserved and used bytes that rises, as each holds those before it.
    """
    if len(samples) < MIN_STEPS:
        return LeakVerdict(len(samples), ())
    kinds, levels = _levels(samples)
    steps = np.array([sample.step for sample in samples], float)
    raw = found = find_trends(levels, steps, min_growth=min_growth_bytes)
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    if len(tokens) == len(samples):
        levels = without_covariate(levels, np.array(tokens, float))
        found = find_trends(levels, steps, min_growth=min_growth_bytes)
    span = np.ptp(settled(steps))
    least = _least_growth(samples, levels, min_growth_bytes)
    rising = found.rising & (found.slope >= least / span)
    growth = tuple(
        Growth(
            kind,
            bool(rising[row] and not rising[:row].any()),
            float(found.slope[row]),
            float(found.low[row]),
            float(found.high[row]),
            float(found.p_value[row]),
            _why_none(
                float(found.p_value[row]),
                float(found.slope[row] * span),
                float(least[row]),
                leak=bool(rising[row] and not rising[:row].any()),
                in_another=bool(rising[:row].any()),
            ),
        )
        for row, kind in enumerate(kinds)
    )
    follows_tokens = bool((raw.rising & (raw.slope >= least / span)).any() and not rising.any())
    return LeakVerdict(len(samples), growth, follows_tokens)


def _why_none(p_value: float, gained: float, least: float, *, leak: bool, in_another: bool) -> str:
    """Of a kind that grew by `gained` bytes, hardly by chance; in_another: that grows, and is held in it."""
    if leak or p_value >= _SUSPICION or gained <= 0:
        return ""
    if in_another:
        return "it holds what grows above"
    if gained < least:
        return f"{gained / MB:.1f} MB in all, and up to {least / MB:.0f} MB a run may settle by"
    return "not all the way to the end, or in one jump"


def _levels(samples: Sequence[MemorySample]) -> tuple[list[Kind], Array]:
    """The kinds that were measured and their bytes (kinds, T), each level holding the one before."""
    device = [sample.device_used_bytes for sample in samples]
    allocated = [sample.allocated_bytes for sample in samples]
    reserved = [sample.reserved_bytes for sample in samples]
    if None in allocated:
        return ["memory of unknown kind"], np.array([device], float)
    if None in reserved:
        return ["held tensors", "not torch"], np.array([allocated, device], float)
    return ["held tensors", "fragmentation", "not torch"], np.array([allocated, reserved, device], float)


def _least_growth(samples: Sequence[MemorySample], levels: Array, min_growth_bytes: int) -> Array:
    """Bytes that each of the levels (kinds, T) has to gain, (kinds,)."""
    least = np.full(len(levels), float(min_growth_bytes))
    if samples[0].reserved_bytes is None:  # a host: the last level is the process's resident memory
        least[-1] = max(least[-1], SETTLING * levels[-1].mean())
    return least


class LeakWatch:
    """Samples a device at step boundaries; once something seems to grow, records who makes it.

    Cost: some 0.1 ms a step. With `count` on the host also a count of the live tensors, see
    census.py: call `gc.freeze()` after set-up to keep it small, and leave `count` off in training,
    where the kind of a leak then stays unknown. The RECORDED_STEPS steps after steps 40, 60, 90 and so
    on, if the test finds growth by then, take several times as long.

    Call it from the thread that trains. On an accelerator the used bytes are those of all processes.
    """

    def __init__(
        self, device: torch.device, *, count: bool = True, min_growth_bytes: int = MIN_GROWTH_BYTES
    ) -> None:
        importlib.import_module("torch._dynamo")  # a recording would: some 90 s while allocations are traced
        self.samples: list[MemorySample] = []
        self._device = Device(device)
        self._count = count
        self._min_growth_bytes = min_growth_bytes
        self._baseline: dict[Group, Held] = {}
        self._recording: Recording | None = None
        self._recorded = Recorded()
        self._next_check = MIN_STEPS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording, if a recording is on."""
        if self._recording is not None:
            self._recorded = self._recording.stop() or self._recorded
            self._recording = None

    def sample(self, step: int, tokens: int | None = None) -> MemorySample:
        """To be called at the end of every step."""
        if self._recording is not None:
            self._recording.boundary()
            if self._recording.num_boundaries == RECORDED_STEPS:
                self.close()
        sample = self._read(step, tokens)
        self.samples.append(sample)
        if len(self.samples) == _BASELINE_STEP:
            self._baseline = count_tensors()
        if len(self.samples) == self._next_check:
            self._next_check += self._next_check // 2
            if self._recording is None and self._seems_to_grow():
                self._recording = Recording()
        return sample

    def verdict(self) -> LeakVerdict:
        """Over all samples so far, with the culprits if there is a leak."""
        self.close()
        verdict = detect_leak(self.samples, min_growth_bytes=self._min_growth_bytes)
        if not verdict.leak:
            return verdict
        grown = grown_tensors(self._baseline, count_tensors())
        culprits = name_culprits(grown, len(self.samples) - _BASELINE_STEP, self._recorded)
        rate = sum(each.bytes_per_step for each in verdict.growth if each.leak)
        main = (each for each in culprits if each.num_bytes / each.num_steps > rate / 10)
        return replace(verdict, culprits=tuple(main))

    def _seems_to_grow(self) -> bool:
        """Asks less than the verdict: a recording costs little, and a leak is better caught early."""
        return any(
            each.p_value < _SUSPICION and each.bytes_per_step * len(self.samples) > self._min_growth_bytes / 4
            for each in detect_leak(self.samples).growth
        )

    def _read(self, step: int, tokens: int | None) -> MemorySample:
        reading = self._device.read()
        if self._device.on_host:
            held = sum(count.num_bytes for count in count_tensors().values()) if self._count else None
            return MemorySample(step, reading.allocated_bytes, held, None, tokens)
        memory = self._device.memory()
        used = memory.total_bytes - memory.free_bytes
        return MemorySample(step, used, reading.allocated_bytes, reading.reserved_bytes, tokens)
