"""What a step's phases cannot do without, and the least time the machine could take for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from rich import box
from rich.table import Table
from transformers import GPT2Config

from benchmarks.speed_worker import StepTime


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, measured: floating-point operations and bytes a second."""

    flops: float
    bytes: float
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.flops / 1e9:.0f} GFLOP/s in {name}, {self.bytes / 1e9:.1f} GB/s copied"


def measure_rates(dtype: torch.dtype, *, size: int = 2048, repeats: int = 7) -> Rates:
    """A large matrix product in `dtype`, and a large copy (read and written)."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    source, target = torch.ones(2**26), torch.empty(2**26)
    multiply = min(_seconds(lambda: a @ b) for _ in range(repeats))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))
    return Rates(2 * size**3 / multiply, 2 * source.nbytes / copy, dtype)


def _seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


@dataclass(frozen=True)
class PhaseWork:
    """Operations and bytes that a phase cannot do without, and the least seconds they take."""

    flops: float
    bytes: float

    def least_seconds(self, rates: Rates) -> float:
        return max(self.flops / rates.flops, self.bytes / rates.bytes)


def phase_work(
    config: GPT2Config,
    *,
    prompts: int,
    group_size: int,
    prompt_tokens: float,
    new_tokens: float,
    itemsize: int = 2,
) -> dict[str, PhaseWork]:
    """GPT-2's phases on B prompts of P tokens, G completions each of C: counted, not measured.

    A matrix product of a token with a weight is 2 operations for each of its numbers, and attention
    4 times the width for each token looked at. Weights, of `itemsize` bytes a number, are read once a
    decoded token, the cache of all rows too; learning is three forward passes; AdamW reads four numbers
    and writes three for each parameter, beside the norm and the copy.
    """
    width, layers, vocabulary = config.n_embd, config.n_layer, config.vocab_size
    b, n, p, c = prompts, prompts * group_size, prompt_tokens, new_tokens
    blocks = 12 * layers * width**2
    head = vocabulary * width
    looked_at = b * p * p / 2 + n * (c * p + c * c / 2)
    forward = 2 * blocks * (b * p + n * c) + 4 * layers * width * looked_at + 2 * head * n * c
    weights = itemsize * (blocks + head)
    cache = itemsize * 2 * layers * width * (c * (b * p) + n * c * c / 2)
    parameters = blocks + head + config.n_positions * width
    return {
        "sample": PhaseWork(forward, weights * c + cache),
        "score": PhaseWork(forward, weights),
        "learn": PhaseWork(3 * forward, 3 * weights),
        "update": PhaseWork(0, parameters * (9 * 4 + itemsize)),
    }


def limit_table(
    title: str, steps: Sequence[StepTime], config: GPT2Config, rates: Rates, *, prompts: int, group_size: int
) -> Table:
    """Our phases beside the least time the machine could take for them."""
    table = Table(title, "GFLOP", "GB moved", "least, s", "measured, s", "of the limit", box=box.MARKDOWN)
    counted = phase_work(
        config,
        prompts=prompts,
        group_size=group_size,
        prompt_tokens=float(np.mean([step.prompt_tokens for step in steps])),
        new_tokens=float(np.mean([step.new_tokens for step in steps])),
        itemsize=rates.dtype.itemsize,
    )
    split = median_split(steps)
    total = float(np.median([step.seconds for step in steps]))
    for phase, work in counted.items():
        seconds, least = split.pop(phase, 0.0), work.least_seconds(rates)
        share = f"{least / seconds:.0%}" if seconds else ""
        table.add_row(
            phase,
            f"{work.flops / 1e9:.0f}",
            f"{work.bytes / 1e9:.2f}",
            f"{least:.2f}",
            f"{seconds:.2f}",
            share,
        )
    for phase, seconds in split.items():
        table.add_row(phase, "", "", "", f"{seconds:.3f}", f"{seconds / total:.1%} of a step")
    return table


def median_split(steps: Sequence[StepTime]) -> dict[str, float]:
    """Seconds of each phase, by its name."""
    names = {name for step in steps for name in step.split}
    return {
        name.removeprefix("timing/").removesuffix("_s"): float(
            np.median([step.split.get(name, 0.0) for step in steps])
        )
        for name in sorted(names)
    }
