"""What a card has to hold: lines that stay whatever the batch size, and what samples add to them.

With a model, all of it is the predictor's (`predict.py`). From counts of parameters alone only the lines
follow; bytes a sample then come from the person, or stay unknown: none are guessed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grpo.workbench.calculator.settings import FrozenDtype, Optimizer, Weights
from grpo.workbench.predict import StepMemory, StepSettings

FROZEN_BYTES: dict[FrozenDtype, float] = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}
"""Of a frozen parameter; scales of quantized ones are left out."""
MOMENT_BYTES: dict[Optimizer, int] = {"adamw": 8, "adamw-8bit": 2, "sgd": 0}
"""Of a trained parameter: AdamW's two moments in fp32, or in 8 bits; plain SGD has none."""
WEIGHT_BYTES: dict[Weights, int] = {"bf16+master": 2, "fp32": 4, "bf16": 2}
"""Of a trained parameter, and of its gradient."""
MASTER_BYTES: dict[Weights, int] = {"bf16+master": 4, "fp32": 0, "bf16": 0}
"""Of the fp32 copy that the optimizer keeps beside weights in bf16."""
OVERHEAD_SHARE = 0.08
"""Of the card, for what is no tensor; with counts alone, as published budgets have it."""


@dataclass(frozen=True)
class Line:
    """One line of the budget in bytes. `share` of the card, where it is one."""

    name: str
    bytes: float
    detail: str
    share: float | None = None


@dataclass(frozen=True)
class Peak:
    """The most that a batch needs, and in which phase."""

    phase: str
    bytes: float


@dataclass(frozen=True)
class Samples:
    """What samples add. peak: of a batch size, the lines included. largest: that fits so many bytes."""

    peak: Callable[[int], Peak]
    largest: Callable[[float], int]


@dataclass(frozen=True)
class Demand:
    """`samples` is None where bytes a sample are not known. Batch sizes are multiples of `multiple`."""

    lines: tuple[Line, ...]
    samples: Samples | None
    multiple: int

    @property
    def fixed_bytes(self) -> float:
        return sum(line.bytes for line in self.lines)


def frozen_lines(counts: tuple[float, ...], dtype: FrozenDtype) -> tuple[Line, ...]:
    """One line for the models that only stand beside, if there are any."""
    if not counts:
        return ()
    each, sizes = FROZEN_BYTES[dtype], " + ".join(f"{count / 1e9:g}" for count in counts)
    return (Line(f"frozen, {sizes} B", each * sum(counts), f"{each:g} bytes a parameter ({dtype})"),)


# ------------------------------------------------------------------------------------- with a model


def demand_of_model(step: StepSettings, frozen: tuple[Line, ...], overhead: Line, *, at_most: int) -> Demand:
    """The planner's lines of the optimizer's step, when weights, moments and gradients are all there.

    Other phases hold other things: `samples` looks at all of them.
    """
    memory = StepMemory(step, overhead_bytes=int(overhead.bytes))
    parts = {**memory.resident, "gradients": memory.gradient_bytes}
    num_parameters = memory.num_trained
    names = {"reference": "frozen reference", "weights": "trainable weights"}
    if step.lora.on:
        names["weights"] = f"frozen base{' in 4 bits' * step.lora.load_in_4bit} and adapters"
    lines = [
        Line(names.get(part, part), size, _each(part, size, num_parameters, step.lora.on))
        for part, size in sorted(parts.items(), key=lambda item: item[0] != "reference")
    ]
    beside = sum(line.bytes for line in frozen)

    def peak(batch_size: int) -> Peak:
        phase, parts = memory.largest_phase(batch_size)
        return Peak(phase, beside + parts.peak_bytes)

    def largest(usable_bytes: float) -> int:
        return memory.largest_batch(usable_bytes - beside, at_most=at_most)

    return Demand((*frozen, *lines, overhead), Samples(peak, largest), step.multiple)


def _each(part: str, size: float, num_trained: float, lora: bool) -> str:
    if lora and part == "weights":
        return f"the reference, too; {num_trained / 1e6:.3g} million are trained"
    return f"{size / num_trained:g} bytes a {'trained ' if lora else ''}parameter"


# --------------------------------------------------------------------------------- from counts alone


def trained_lines(count: float, weights: Weights, optimizer: Optimizer) -> tuple[Line, ...]:
    """Weights, optimizer and gradients of so many trained parameters."""
    weight, master, moments = WEIGHT_BYTES[weights], MASTER_BYTES[weights], MOMENT_BYTES[optimizer]
    dtype = weights.partition("+")[0]
    kept = f"{optimizer}: {moments}" + (f", and a master copy in fp32: {master}" if master else "")
    return (
        Line(f"trainable, {count / 1e9:g} B", weight * count, f"{weight} bytes a parameter ({dtype})"),
        Line("optimizer", (master + moments) * count, f"{master + moments} bytes a parameter ({kept})"),
        Line("gradients", weight * count, f"{weight} bytes a parameter ({dtype})"),
    )


def demand_of_counts(lines: tuple[Line, ...], sample_bytes: float | None, *, at_most: int) -> Demand:
    """Lines, and samples of a known size, if it is; such a size comes with no error."""
    fixed = sum(line.bytes for line in lines)
    if sample_bytes is None:
        return Demand(lines, None, 1)
    size = sample_bytes

    def largest(usable_bytes: float) -> int:
        return max(0, min(at_most, int((usable_bytes - fixed) / size)))

    return Demand(lines, Samples(lambda batch: Peak("", fixed + size * batch), largest), 1)
