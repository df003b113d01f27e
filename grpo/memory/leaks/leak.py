"""Is memory growing? A test, not a glance; and if it is, what grows and who made it.

    with LeakWatch(device) as watch:
        for step in range(200):
            ...                       # a training step
            watch.sample(step, tokens=completion_tokens)
    print(watch.verdict())

Readings are taken at step boundaries, where nothing of a step should be left. What rises tells the
kind: allocated bytes are tensors that somebody holds, reserved bytes alone are fragmentation, the
device's used bytes alone are not torch's.

Start-up, a cache that fills, a high-water mark, a jump and noise all grow too. A leak is growth that goes
on: after the first tenth of the run, each sixth of the rest has a higher median than the one before. Left
out: p-values (noise that wanders slowly hides a small leak), growth of less than MIN_GROWTH_BYTES over
the run, and growth that stops.
"""

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from grpo.memory.device import Device
from grpo.memory.leaks.culprits import Culprit, Recorded, Recording, count_tensors

Array = NDArray[np.float64]

MB = 2**20
MIN_GROWTH_BYTES = 4 * MB
"""Interpreters and allocators settle for hundreds of steps: less than this over a run is no leak."""
SETTLING = 0.03
"""Share of a process's resident memory that its heap may gain in the same way, through fragments."""
MIN_STEPS = 40
WARM_UP = 0.1
"""Share of the run that is dropped at its start."""
PARTS = 6
SAME_LINE = 0.98
"""Correlation of tokens with time from which on growth with the one and with the other look the same."""
RECORDED_STEPS = 4
_BASELINE_STEP = MIN_STEPS // 2

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
    """One kind of memory. steady: it rises from each part of the run to the next."""

    kind: Kind
    leak: bool
    steady: bool
    bytes_per_step: float
    gained_bytes: float
    least_bytes: float
    """The least growth of a leak."""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.bytes_per_step / MB:+.3f} MB a step"
        if 0 < self.gained_bytes < self.least_bytes:
            in_all, settling = self.gained_bytes / MB, self.least_bytes / MB
            return f"{text}: {in_all:.1f} MB in all, and up to {settling:.0f} MB a run may settle by"
        stopped = self.gained_bytes > 0 and not self.steady
        return f"{text}: not all the way to the end, or in one jump" if stopped else text


@dataclass(frozen=True)
class LeakVerdict:
    """`growth` holds each kind that was measured, empty when there were too few steps."""

    num_steps: int
    growth: tuple[Growth, ...]
    follows_tokens: bool = False
    culprits: tuple[Culprit, ...] = ()

    @property
    def leak(self) -> bool:
        return bool(self.kinds)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(growth.kind for growth in self.growth if growth.leak)

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict as JSON can hold it."""
        return {"leak": self.leak, "kinds": list(self.kinds), **asdict(self)}

    def __str__(self) -> str:
        if not self.growth:
            return f"no verdict: {self.num_steps} steps, and a trend needs {MIN_STEPS}"
        shown = [growth for growth in self.growth if growth.leak] or self.growth
        lines = [f"{'LEAK' if self.leak else 'no leak'} in {self.num_steps} steps"]
        lines += [*(f"  {growth}" for growth in shown), *(f"  held: {culprit}" for culprit in self.culprits)]
        if self.follows_tokens:
            lines.append("  memory grew with the tokens; fix the completions' length to see what is left")
        return "\n".join(lines)


def detect_leak(samples: Sequence[MemorySample]) -> LeakVerdict:
    """The verdict over one run's samples, in order.

    Where all samples have tokens, growth that these explain is no leak. The kind is the first of
    allocated, reserved and used bytes that rises, as each holds those before it.
    """
    if len(samples) < MIN_STEPS:
        return LeakVerdict(len(samples), ())
    last: Kind = "memory of unknown kind" if samples[0].allocated_bytes is None else "not torch"
    levels: dict[Kind, Sequence[int | None]] = {  # each holds the one before
        "held tensors": [sample.allocated_bytes for sample in samples],
        "fragmentation": [sample.reserved_bytes for sample in samples],
        last: [sample.device_used_bytes for sample in samples],
    }
    kinds = [kind for kind, level in levels.items() if None not in level]
    series = np.array([levels[kind] for kind in kinds], float)
    least = np.full(len(kinds), float(MIN_GROWTH_BYTES))
    if samples[0].reserved_bytes is None:  # a host: the last level is the process's resident memory
        least[-1] = max(least[-1], SETTLING * series[-1].mean())
    steady, gained = steady_growth(series, least)
    grew = bool((steady & (gained >= least)).any())
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    if len(tokens) == len(samples):
        steady, gained = steady_growth(without_tokens(series, np.array(tokens, float)), least)
    leaks = steady & (gained >= least)
    leaks &= np.cumsum(leaks) == 1  # the first
    rates = gained / np.ptp(_settled(np.array([sample.step for sample in samples])))
    columns = (column.tolist() for column in (leaks, steady, rates, gained, least))
    growth = tuple(Growth(*row) for row in zip(kinds, *columns, strict=True))
    return LeakVerdict(len(samples), growth, grew and not leaks.any())


def steady_growth(series: Array, least: Array | float) -> tuple[NDArray[np.bool_], Array]:
    """Whether each row of (K, T) grows steadily, and what it gains after the warm-up, both (K,).

    Steadily: each part's median is above the one before by at least a quarter of what a part holds (the
    median of their interquartile ranges; a line's is half of its rise), and half of a part of `least`.
    """
    settled = _settled(series)
    length = settled.shape[1] // PARTS
    parts = settled[:, -PARTS * length :].reshape(-1, PARTS, length)
    low, medians, high = np.percentile(parts, (25, 50, 75), axis=2)
    rises = np.diff(medians, axis=1)
    spread = np.median(high - low, axis=1)
    steady = (rises >= np.maximum(spread / 4, np.asarray(least) / PARTS / 2)[:, None]).all(1)
    return steady, np.median(rises, axis=1) / length * (settled.shape[1] - 1)


def without_tokens(series: Array, tokens: Array) -> Array:
    """`series` (K, T) less what the tokens of its steps, (T,) or (K, T), explain.

    By least squares beside a line in time, so that a leak keeps what is its own; never more than without that
    line, nor less than nothing. Tokens that are themselves a line in time explain all of the growth.
    """
    x, y = (values - values.mean(-1, keepdims=True) for values in (_settled(tokens), _settled(series)))
    time = np.arange(x.shape[-1]) - (x.shape[-1] - 1) / 2
    line = _coefficient(time, x) * time
    alone, beside = _coefficient(x, y), _coefficient(x - line, y - _coefficient(time, y) * time)
    same = (line**2).sum(-1, keepdims=True) > SAME_LINE**2 * (x**2).sum(-1, keepdims=True)
    explained = np.where(same, alone, np.minimum(beside, alone)).clip(0)
    return series - explained * (tokens - _settled(tokens).mean(-1, keepdims=True))


def _settled(series: Array) -> Array:
    """Returns a series (..., T) without the warm-up."""
    return series[..., int(series.shape[-1] * WARM_UP) :]


def _coefficient(x: Array, y: Array) -> Array:
    """Returns the slope of y (..., T) on x (..., T), both centred, by least squares, (..., 1); 0 where x is
    constant."""
    spread = (x**2).sum(-1, keepdims=True)
    return (x * y).sum(-1, keepdims=True) / np.where(spread > 0, spread, 1.0)


class LeakWatch:
    """Samples a device at step boundaries; once something seems to grow, records who makes it.

    Cost: some 0.1 ms a step, on the host also a count of the live tensors (culprits.py): call `gc.freeze()`
    after set-up to keep it small. The RECORDED_STEPS steps after steps 40, 60, 90 and so on, where
    something grows steadily by then, take several times as long, until a culprit is found.

    Call it from the thread that trains. On an accelerator the used bytes are those of all processes.
    """

    def __init__(self, device: torch.device) -> None:
        importlib.import_module("torch._dynamo")  # a recording would: some 90 s while allocations are traced
        self.samples: list[MemorySample] = []
        self._device = Device(device)
        self._baseline: Counter[str] = Counter()
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
            self._recorded, self._recording = self._recording.stop(), None

    def sample(self, step: int, tokens: int | None = None) -> MemorySample:
        """Takes a sample; to be called at the end of every step."""
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
            grows = any(growth.steady for growth in detect_leak(self.samples).growth)
            if grows and self._recording is None and not self._recorded.culprits:
                self._recording = Recording()
        return sample

    def verdict(self) -> LeakVerdict:
        """Returns the verdict over all samples so far, with the culprits if there is a leak."""
        self.close()
        verdict = detect_leak(self.samples)
        if not verdict.leak:
            return verdict
        culprits, num_steps = [*self._recorded.culprits], len(self.samples) - _BASELINE_STEP
        for look, more in (count_tensors() - self._baseline).items():
            if look not in self._recorded.looks:
                culprits.append(Culprit(f"tensors {look}", more, num_steps))
        rate = sum(growth.bytes_per_step for growth in verdict.growth if growth.leak)
        main = (culprit for culprit in culprits if culprit.bytes_per_step > rate / 10)
        by_rate = sorted(main, key=lambda culprit: -culprit.bytes_per_step)
        return replace(verdict, culprits=tuple(by_rate))

    def _read(self, step: int, tokens: int | None) -> MemorySample:
        reading = self._device.read()
        if self._device.on_host:
            return MemorySample(step, reading.allocated_bytes, count_tensors().total(), None, tokens)
        memory = self._device.memory()
        used = memory.total_bytes - memory.free_bytes
        return MemorySample(step, used, reading.allocated_bytes, reading.reserved_bytes, tokens)
