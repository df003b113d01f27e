"""From a run's settings to its memory plan: what exists all along, what phases add, what fits.

Closed forms and traces come together here, for a run that is about to start (`make_memory`), for its
batch size where that is left to us (`find_batch_size`), and for the tables before and after.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from loguru import logger

from grpo.config import Config, SettingsError
from grpo.data import PromptSource, Tokenizer
from grpo.data.tokens import tokenize
from grpo.learning.optimizer import step_bytes
from grpo.memory import AdaptiveMemory, Budget, MemoryMonitor, PhaseSpec, Predictor, ProcessMemory, Shape
from grpo.plan.advice import advice
from grpo.plan.trace import PHASES, PhaseTracer, split_name
from grpo.plan.workload import (
    LATER_BYTES,
    LATER_PRIVATE_BYTES,
    Workload,
    attention_workspace,
    bytes_at_start,
    kernel_parts,
    logits_parts,
    resident_parts,
    sample_parts,
    scratch_bytes,
    slots_bytes,
    usual_slack,
)
from grpo.rollout.decoder import records_steps
from grpo.rollout.slots import KeptSlots

CPU_ERROR = 0.02
"""Of a trace, relative: on CPUs the worst was 1.6 % (`scripts/benchmark_memory.py predict`)."""
LONGEST_TEXTS = 64
"""Texts of most characters that are tokenized to find the one of most tokens."""


class TracedFit:
    """A phase's fit, made when first asked for; below a whole group, where rows share less, traced."""

    def __init__(self, tracer: PhaseTracer, phase: str, longest: Shape, group_size: int) -> None:
        self._tracer, self._phase, self._longest, self._group_size = tracer, phase, longest, group_size
        self._fit: Callable[[Shape], float] | None = None
        self._parts: dict[Shape, float] = {}

    def __call__(self, shape: Shape) -> float:
        if (
            shape.rows < self._group_size
        ):  # as if all were long: a trace for each shape takes time, and memory
            longest = self._longest
            shape = shape._replace(
                prompt_tokens=max(shape.prompt_tokens, longest.prompt_tokens),
                new_tokens=max(shape.new_tokens, longest.new_tokens), scored_tokens=None,
            )  # fmt: skip
            if shape not in self._parts:
                self._parts[shape] = float(self._tracer.peak_bytes(self._phase, shape))
            return self._parts[shape]
        if self._fit is None:
            self._fit = self._tracer.fit(self._phase, self._longest)
        return self._fit(self._tracer.rounded(self._phase, shape))


def process_memory(
    work: Workload,
    tracer: PhaseTracer,
    monitor: MemoryMonitor,
    *,
    overhead_bytes: int | None = None,
    compiled_bytes: int = 0,
    bias: float = 1.0,
) -> ProcessMemory:
    """What the process of a run holds, phase by phase.

    overhead_bytes: besides tensors; None: measured. compiled_bytes: of kernels, in that.
    """
    config = work.config
    longest = Shape(config.group_size, work.longest_prompt, work.new_tokens)
    traced = {phase: TracedFit(tracer, phase, longest, config.group_size) for phase in PHASES}
    sizes = work.sizes_here(tracer.trained_sizes)
    resident = resident_parts(work, tracer.num_parameters, sizes, tracer.frozen_bytes)
    gaps = 0
    if overhead_bytes is None:
        gaps = monitor.gap_bytes()
        overhead_bytes = max(0, monitor.in_use_bytes() - sum(resident.values()))
        later = LATER_PRIVATE_BYTES if monitor.counts_private else LATER_BYTES
        overhead_bytes += later if work.target.on_cpu else 0
    resident |= kernel_parts(work.target, compiled_bytes, private=monitor.counts_private)
    gathered: dict[str, int] = {}
    if work.stays_gathered:  # a layer of it is traced, too
        gathered = {"gathered weights": work.target.dtype.itemsize * tracer.num_parameters}
    gradients = {"gradients": work.exact_bytes * sum(sizes)}
    update = gradients["gradients"] + step_bytes(sizes, config.optimizer, work.target.device.type)
    specs = {
        "sample": PhaseSpec(
            "sample", split_name("sample"), config.rollout_rows,
            lambda shape: {**gathered, **sample_parts(work, shape)},
            partial(slots_bytes, work) if _keeps_slots(work) else None,
        ),
        "score": PhaseSpec("score", "score", config.score_rows, partial(logits_parts, work)),
        "learn": PhaseSpec(
            split_name("learn") if work.gradients_first else "learn", split_name("learn"), config.train_rows,
            lambda shape: {**gradients, **logits_parts(work, shape), **attention_workspace(work, shape)},
        ),
        "update": PhaseSpec("update", "update", None, lambda shape: gradients),
    }  # fmt: skip
    fits: dict[str, Callable[[Shape], float]] = {**traced, "update": lambda shape: update}
    unseen: dict[str, Callable[[Shape], Mapping[str, int]]] = {  # by traces
        "learn": partial(attention_workspace, work), "sample": lambda _: gathered,
    }  # fmt: skip
    for phase, parts in unseen.items():
        for name in (phase, split_name(phase)):
            fits[name] = partial(_with_parts, parts, traced[name])
    scratch = {phase: scratch_bytes(phase, work.target) for phase in fits}
    if not (config.uses_reference or config.num_iterations > 1 or config.kl_in_reward):
        del specs["score"]
    first_error = CPU_ERROR if work.target.on_cpu else None
    return ProcessMemory(
        specs, Predictor(fits, scratch_bytes=scratch, first_error=first_error, bias=bias), monitor,
        resident=lambda: resident, batch_size=work.rows_here, overhead_bytes=overhead_bytes,
        gap_bytes=gaps, slack=partial(usual_slack, work),
    )  # fmt: skip


def _with_parts(
    parts: Callable[[Shape], Mapping[str, int]], traced: Callable[[Shape], float], shape: Shape
) -> float:
    return traced(shape) + sum(parts(shape).values())


def _keeps_slots(work: Workload) -> bool:
    """Whether what decoding has recorded may stay from one rollout to the next."""
    return work.shards == 1 and records_steps(work.target.model_config, work.target.device.type)


def make_memory(
    work: Workload, monitor: MemoryMonitor, budget: Callable[[], Budget], **process: Any
) -> AdaptiveMemory:
    """The memory of a run, to plan by and to run phases with. process: as `process_memory` takes it."""
    tracer = PhaseTracer(work.phase_settings())
    return AdaptiveMemory(
        process_memory(work, tracer, monitor, **process), monitor,
        budget=budget, group_size=work.config.group_size, kept=KeptSlots() if _keeps_slots(work) else None,
        advice=lambda phase, missing: advice(work, phase, tracer, missing), replays=work.shards == 1,
    )  # fmt: skip


def plan_memory(
    work: Workload,
    monitor: MemoryMonitor,
    budget: Callable[[], Budget],
    *,
    agree: Callable[[int], int] = lambda rows: rows,
    **process: Any,
) -> tuple[Workload, AdaptiveMemory]:
    """The first plan; what is auto in the settings is settled in the workload that comes back.

    agree: from the rows that fit in this process to those of the process that holds least. process: as
    `process_memory` takes it.
    """

    def make(work: Workload) -> AdaptiveMemory:
        return make_memory(work, monitor, budget, **process)

    if work.config.batch_size == "auto":
        size = work.processes * agree(find_batch_size(make(work), work, budget()))
        logger.info("batch size {}: the largest that needs no splitting, of {}", size, budget())
        work = replace(work, config=replace(work.config, batch_size=size))
    work, memory = _settle_checkpointing(work, make, budget)
    memory.replan(work.longest_prompt, work.new_tokens)
    return work, memory


def fits_better(work: Workload, other: Workload, monitor: MemoryMonitor, budget: Budget) -> bool:
    """Whether `work` does no group at once in every phase, and `other` does a row, or needs less for it.

    Before anything is loaded: what the process holds now, and what a start adds to it, is not torch's.
    """
    overhead = bytes_at_start("cpu", monitor)

    def need(work: Workload, rows: int) -> float:
        """Bytes with which every phase takes so many rows at once, or as many as a person fixed."""
        tracer = PhaseTracer(work.phase_settings())
        process = process_memory(work, tracer, monitor, overhead_bytes=overhead)
        shape = Shape(rows, work.longest_prompt, work.new_tokens)
        return max(
            process.footprint(phase, shape._replace(rows=min(rows, spec.rows or rows))).upper_bytes
            for phase, spec in process.phases.items()
        )

    if need(work, work.config.group_size) <= budget.usable_bytes:
        return False
    return need(other, 1) <= max(need(work, 1), budget.usable_bytes)


def trace_parts(work: Workload, memory: AdaptiveMemory) -> None:
    """Trace beforehand what may be done in parts: learning to spare padding, others under a limit."""
    for phase in ("sample", "learn") if work.config.memory_limit else ("learn",):
        memory.footprint(phase, Shape(work.config.group_size, work.longest_prompt, work.new_tokens))


def _settle_checkpointing(
    work: Workload, make: Callable[[Workload], AdaptiveMemory], budget: Callable[[], Budget]
) -> tuple[Workload, AdaptiveMemory]:
    """Where gradient_checkpointing is auto: nothing is recomputed, or all if not one row learns otherwise.

    The processes of a sharded model have to do the same, and do not look whether they need to.
    """
    if work.config.gradient_checkpointing != "auto":
        return work, make(work)

    def one_row_learns(memory: AdaptiveMemory) -> bool:
        row = Shape(1, work.longest_prompt, work.new_tokens)
        return memory.footprint("learn", row).upper_bytes <= budget().usable_bytes

    plain, recomputing = (
        replace(work, config=replace(work.config, gradient_checkpointing=kind)) for kind in ("none", "full")
    )
    memory = make(plain)
    if work.config.shard or one_row_learns(memory):
        return plain, memory
    with suppress(ValueError):  # a model that does not say what its layers are
        leaner = make(recomputing)
        if one_row_learns(leaner):
            logger.info("gradient checkpointing is full: not one row would learn otherwise")
            return recomputing, leaner
    return plain, memory  # whose plan says what is missing


def trace_phases(work: Workload) -> None:
    """Trace what plans are made from, so that whoever plans for the same later finds it done."""
    longest = Shape(work.config.group_size, work.longest_prompt, work.new_tokens)
    tracer = PhaseTracer(work.phase_settings())
    for phase in PHASES:
        tracer.fit(phase, longest)


def longest_prompt(source: PromptSource, tokenizer: Tokenizer, config: Config) -> int:
    """Tokens of the longest prompt that is known beforehand: among the longest texts."""
    prompts = source.longest(LONGEST_TEXTS)
    if not prompts:
        return config.sampling.max_new_tokens
    return max(1, *map(len, tokenize(prompts, tokenizer)))


def find_batch_size(memory: AdaptiveMemory, work: Workload, budget: Budget) -> int:
    """The largest multiple of the group size, up to one process's share, that no phase has to split."""
    config = work.config
    groups = max(1, config.max_batch_size // config.group_size // work.processes)
    size = groups * config.group_size
    for phase in memory.phases:
        fits = memory.largest_whole(phase, budget, size, work.longest_prompt, work.new_tokens)
        if fits < config.group_size:
            raise SettingsError(
                f"batch_size is auto, but {phase} does not hold one group of {config.group_size} at once in "
                f"{budget}: give --batch-size {config.group_size}, which is then done in parts."
            )
        size = min(size, fits)
    return size
