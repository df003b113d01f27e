"""What gradient checkpointing saves, and costs: the same learning phase with each kind, and in two parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import get_args

from rich.table import Table
from transformers import PretrainedConfig

from benchmarks.real_phases import CPU, RealPhases, Setting, allocator_peak
from grpo.config.groups import Checkpointing
from grpo.memory import Size
from grpo.memory.budget import GB
from grpo.model.load import default_shape, load_config
from grpo.model.target import compute_dtype

KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)
IN_HALVES = "none, rows in halves"
"""What checkpointing has to be better than where memory is short."""


@dataclass(frozen=True)
class Cost:
    """Most bytes that learning adds, by the profiler's record, and the median of a pass's seconds.

    way: the kind of checkpointing, or IN_HALVES.
    """

    name: str
    compute: str
    size: Size
    way: str
    peak_bytes: int
    seconds: float


def cost_works(quick: bool) -> Iterator[tuple[str, PretrainedConfig, Size]]:
    """Models, and one pass."""
    yield "rook-tiny", load_config("rook-tiny"), Size(16, 16, 20) if quick else Size(64, 144, 60)
    if not quick:
        yield "GPT-2 124 M", default_shape(), Size(16, 144, 60)


def checkpointing_costs(works: Iterator[tuple[str, PretrainedConfig, Size]], rounds: int) -> Iterator[Cost]:
    """They take turns, `rounds` times, after one round that does not count."""
    for name, model, size in works:
        setting = Setting(name, model, compute_dtype("auto", CPU))
        learn: dict[str, Callable[[], object]] = {
            kind: RealPhases(replace(setting, checkpointing=kind)).prepare("learn", size) for kind in KINDS
        }
        half = RealPhases(setting).prepare("learn", size._replace(rows=size.rows // 2))
        learn[IN_HALVES] = lambda half=half: (half(), half())  # type: ignore[misc]
        peaks = {way: allocator_peak(work) for way, work in learn.items()}
        seconds: dict[str, list[float]] = {way: [] for way in learn}
        for _ in range(rounds):
            for way, work in learn.items():
                start = time.perf_counter()
                work()
                seconds[way].append(time.perf_counter() - start)
        for way in learn:
            compute = str(setting.compute_dtype).removeprefix("torch.")
            yield Cost(name, compute, size, way, peaks[way], median(seconds[way]))


def cost_table(costs: Sequence[Cost]) -> Table:
    """Each way beside none at all. GB of 2**30 bytes."""
    table = Table("model", "rows, new tokens, prompt", "recomputed", title="Gradient checkpointing")
    for column in ("peak, GB", "of none's", "seconds", "times none's"):
        table.add_column(column, justify="right")
    for cost, none in zip(costs, _nones(costs), strict=True):
        table.add_row(
            f"{cost.name}, {cost.compute}", ", ".join(map(str, cost.size)), cost.way,
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
