"""The memory plan of a run that is about to start: what there is, in which precision it does most, what fits.

The plan itself is made in `grpo.plan`; here it meets the process that will run by it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from loguru import logger

from grpo import malloc
from grpo.config import Config
from grpo.config.sizes import parse_size
from grpo.data import PromptSource
from grpo.distributed import World
from grpo.memory import AdaptiveMemory, Budget, DoesNotFit, MemoryMonitor, make_budget
from grpo.memory.budget import DeviceMemory
from grpo.memory.enforce import is_near, limit_memory
from grpo.model.load import ModelSource
from grpo.model.target import Target, make_target
from grpo.plan.build import fits_better, longest_prompt, plan_memory, trace_parts, trace_phases
from grpo.plan.workload import Workload
from grpo.run.rehearsal import Rehearsal

NARROW = 2 * 2**30
"""Bytes of a budget in which kernels that are compiled may be what does not fit."""


def budget_of(config: Config, monitor: MemoryMonitor, sharing: int = 1) -> Callable[[], Budget]:
    """What this process may hold, as it is whenever that is asked. sharing: processes on the device."""
    return lambda: budget_within(config, monitor.memory().shared_by(sharing))


def budget_within(config: Config, memory: DeviceMemory) -> Budget:
    """What the settings allow of a device's memory."""
    limit = parse_size(config.memory_limit) if config.memory_limit else None
    return make_budget(memory, utilization=config.memory_utilization, limit_bytes=limit)


def choose_target(
    config: Config,
    model: ModelSource,
    device: torch.device,
    source: PromptSource,
    monitor: MemoryMonitor,
    budget: Budget,
) -> Target:
    """The model's, in fp32 where the precision is auto and there is no room for the kernels of bf16."""
    target = make_target(model.load_config(), device, config.precision)
    if config.precision != "auto" or not (target.on_cpu and target.is_lower and budget.usable_bytes < NARROW):
        return target
    exact = make_target(target.model_config, device, torch.float32)
    longest = longest_prompt(source, model.load_tokenizer(), config)
    settled = config
    if config.batch_size == "auto":
        settled = replace(config, batch_size=config.group_size)
    lower = Workload(settled, target, longest, reference_here=True)
    if not fits_better(lower, replace(lower, target=exact), monitor, budget):
        return target
    logger.info("precision is fp32: {} leave no room for the kernels that bf16 compiles", budget)
    return exact


def plan_together(
    world: World,
    work: Workload,
    monitor: MemoryMonitor,
    budget: Callable[[], Budget],
    rehearsal: Rehearsal,
    bias: float,
) -> tuple[Workload, AdaptiveMemory]:
    """Each process's own plan, of a batch size that is the same for all."""
    if world.size > 1:
        with world.main_first("the first plan"):
            trace_phases(work)
    plan = partial(
        plan_memory, monitor=monitor, budget=budget, compiled_bytes=rehearsal.grown_bytes, bias=bias
    )
    work, memory = plan(work, agree=lambda rows: min(world.exchange("the batch size", rows)))
    if work.config.shard:
        work, memory = _stay_gathered(world, work, memory, plan)
    trace_parts(work, memory)
    return work, memory


def _stay_gathered(
    world: World,
    work: Workload,
    memory: AdaptiveMemory,
    plan: Callable[[Workload], tuple[Workload, AdaptiveMemory]],
) -> tuple[Workload, AdaptiveMemory]:
    """Sample with all weights of a sharded model gathered, where every process has room for as many rows."""
    other: tuple[Workload, AdaptiveMemory] | None = None
    with suppress(DoesNotFit):
        other = plan(replace(work, stays_gathered=True))
    fits = other is not None and other[1].plan["sample"].rows == memory.plan["sample"].rows
    if not all(world.exchange("the room for gathered weights", fits)) or other is None:
        return work, memory
    logger.info("all weights stay gathered while sampling, as there is room for them")
    return other


def enforce(config: Config, monitor: MemoryMonitor, memory: AdaptiveMemory, budget: Budget) -> None:
    """Keep malloc within the plan where the budget is near, and set --memory-limit where that is possible.

    Last, when threads and processes have started.
    """
    most = max(each.upper_bytes for each in memory.worst().values())
    if monitor.device.type == "cpu" and is_near(budget.usable_bytes, most):
        memory.reserve(malloc.bound_heap)
    if config.memory_limit:
        how = limit_memory(monitor.device, parse_size(config.memory_limit), monitor.memory().total_bytes)
        logger.info("memory limit {}: {}", config.memory_limit, how)
