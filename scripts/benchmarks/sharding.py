"""What a process holds of a sharded model: foreseen, measured, and beside a process that has all of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import torch
from rich.table import Table
from torch import distributed as dist
from transformers import LlamaConfig

from benchmarks.real_phases import RealPhases, Setting, own_meter
from grpo.config.groups import Checkpointing
from grpo.memory import Shape
from grpo.plan.trace import PhaseTracer
from grpo.plan.workload import resident_parts

PHASES = ("sample", "score", "learn", "learn split")
MODEL = LlamaConfig(
    vocab_size=512, max_position_embeddings=192, hidden_size=128, intermediate_size=384,
    num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
"""1.7 M parameters; at SHAPE, what is held of weights is about as much as of activations."""
SHAPE = Shape(8, 24, 40)


@dataclass(frozen=True)
class Trial:
    """Peak bytes of one phase, what stays between phases included."""

    dtype: torch.dtype
    checkpointing: Checkpointing
    phase: str
    foreseen: int
    measured: int
    whole: int
    """Foreseen for a process that has the whole model."""

    @property
    def error(self) -> float:
        return self.foreseen / self.measured - 1


def trials(*, quick: bool = False) -> Iterator[Trial]:
    """In each of the processes that torch.distributed has started. quick: in fp32, without checkpointing.

    Measured as training measures. The profiler's record agrees to 0.1 kB where it is whole; what gloo's
    own threads free is not in it.
    """
    for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
        for checkpointing in get_args(Checkpointing)[: 1 if quick else None]:
            setting = Setting("llama", MODEL, dtype, checkpointing=checkpointing, group_size=4)
            yield from _of_setting(setting)


def _of_setting(setting: Setting) -> Iterator[Trial]:
    work = setting.workload(SHAPE)
    shared = replace(work, config=replace(work.config, shard=True), processes=dist.get_world_size())
    tracers = PhaseTracer(shared.phase_settings()), PhaseTracer(work.phase_settings())
    resident = [
        sum(resident_parts(of, tracer.num_parameters).values())
        for of, tracer in zip((shared, work), tracers, strict=True)
    ]
    real = RealPhases(setting)
    real.shard()
    for phase in PHASES:
        real.prepare(phase, SHAPE)()  # the first time, kernels and buffers are set up
        measured = own_meter(real.prepare(phase, SHAPE))
        added = [tracer.peak_bytes(phase, SHAPE) for tracer in tracers]
        yield Trial(
            setting.compute_dtype, setting.checkpointing, phase, foreseen=resident[0] + added[0],
            measured=resident[0] + measured, whole=resident[1] + added[1],
        )  # fmt: skip


def table(found: list[Trial]) -> Table:
    """A line a phase and setting, in MB of 2**20 bytes."""
    result = Table("compute in", "recomputed", "phase", title="Peak bytes of one process, in MB")
    for column in ("foreseen", "measured", "error", "whole model"):
        result.add_column(column, justify="right")
    for each in found:
        sizes = (f"{size / 2**20:.2f}" for size in (each.foreseen, each.measured))
        result.add_row(
            str(each.dtype).removeprefix("torch."), each.checkpointing, each.phase,
            *sizes, f"{each.error:+.1%}", f"{each.whole / 2**20:.2f}",
        )  # fmt: skip
    return result
