"""What gradient checkpointing saves, and costs: the same learning phase with each kind, and in two parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import get_args

from rich.table import Table
from transformers import PretrainedConfig

from benchmarks.memory_trials import gpt2_config
from benchmarks.real_phases import CPU, RealPhases, Setting, allocator_peak
from grpo.config.groups import Checkpointing
from grpo.memory import Shape
from grpo.memory.budget import GB
from grpo.model.load import load_config
from grpo.model.target import compute_dtype

KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)
IN_HALVES = "none, rows in halves"
"""What checkpointing has to be better than where memory is short."""


@dataclass(frozen=True)
class Cost:
    """Most bytes that learning from `shape` adds, by the profiler's record, and the median of its seconds.

    way: the kind of checkpointing, or IN_HALVES.
    """

    name: str
    compute: str
    shape: Shape
    way: str
    peak_bytes: int
    seconds: float


def cost_works(quick: bool) -> Iterator[tuple[str, PretrainedConfig, Shape]]:
    """Models, and rows of one pass."""
    yield "rook-tiny", load_config("rook-tiny"), Shape(16, 20, 16) if quick else Shape(64, 60, 144)
    if not quick:
        yield "GPT-2 124 M", gpt2_config(), Shape(16, 60, 144)


def checkpointing_costs(works: Iterator[tuple[str, PretrainedConfig, Shape]], rounds: int) -> Iterator[Cost]:
    """They take turns, `rounds` times, after one round that does not count."""
    for name, model, shape in works:
        setting = Setting(name, model, compute_dtype("auto", CPU))
        learn: dict[str, Callable[[], object]] = {
            kind: RealPhases(replace(setting, checkpointing=kind)).prepare("learn", shape) for kind in KINDS
        }
        learn[IN_HALVES] = RealPhases(setting).prepare("learn split", shape._replace(rows=shape.rows // 2))
        peaks = {way: allocator_peak(work) for way, work in learn.items()}
        seconds: dict[str, list[float]] = {way: [] for way in learn}
        for _ in range(rounds):
            for way, work in learn.items():
                start = time.perf_counter()
                work()
                seconds[way].append(time.perf_counter() - start)
        for way in learn:
            compute = str(setting.compute_dtype).removeprefix("torch.")
            yield Cost(name, compute, shape, way, peaks[way], median(seconds[way]))


def cost_table(costs: Sequence[Cost]) -> Table:
    """Each way beside none at all. GB of 2**30 bytes."""
    table = Table("model", "rows, prompt, new tokens", "recomputed", title="Gradient checkpointing")
    for column in ("peak, GB", "of none's", "seconds", "times none's"):
        table.add_column(column, justify="right")
    for cost, none in zip(costs, _nones(costs), strict=True):
        table.add_row(
            f"{cost.name}, {cost.compute}", ", ".join(map(str, cost.shape[:3])), cost.way,
            f"{cost.peak_bytes / GB:.2f}", f"{cost.peak_bytes / none.peak_bytes:.2f}",
            f"{cost.seconds:.2f}", f"{cost.seconds / none.seconds:.2f}",
        )  # fmt: skip
    return table


def cost_verdicts(costs: Sequence[Cost]) -> Mapping[str, bool]:
    """That each kind holds less than the one before it, as the settings' help says."""
    verdicts = {}
    for name in dict.fromkeys(cost.name for cost in costs):
        peaks = [cost.peak_bytes for cost in costs if cost.name == name and cost.way in KINDS]
        verdicts[f"{name}: selective holds less than none, full less than selective"] = peaks == sorted(
            peaks, reverse=True
        )
    return verdicts


def _nones(costs: Sequence[Cost]) -> Iterator[Cost]:
    none = {cost.name: cost for cost in costs if cost.way == "none"}
    return (none[cost.name] for cost in costs)
