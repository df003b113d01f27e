"""Settings to change when memory does not suffice, with the bytes each would save."""

from contextlib import suppress
from dataclasses import replace

import torch

from grpo.memory import MemoryMonitor, Shape
from grpo.memory.budget import readable
from grpo.model.target import make_target
from grpo.plan.trace import PHASES, PhaseSettings, PhaseTracer, split_name
from grpo.plan.workload import Workload, resident_parts


def advice(work: Workload, phase: str, tracer: PhaseTracer, missing_bytes: float = 0.0) -> str:
    """Settings to change when one row of `phase` does not fit, with the bytes each would save.

    missing_bytes: what they have to save; the text says where all of them together do not.
    """
    config = work.config
    row = Shape(1, work.longest_prompt, work.new_tokens)
    name = split_name(phase)

    def peak(settings: PhaseSettings, shape: Shape) -> int:
        same = settings == work.phase_settings()
        return (tracer if same else PhaseTracer(settings)).peak_bytes(name, shape)

    savings = {}
    if phase in PHASES:  # the optimizer's step minds no row
        now, half = peak(work.phase_settings(), row), max(1, work.new_tokens // 2)
        shorter = row._replace(new_tokens=half)
        savings[f"--max-new-tokens {half}"] = now - peak(work.phase_settings(), shorter)
    if phase == "learn":
        leaner = replace(work.phase_settings(), checkpointing="full")
        with suppress(ValueError):  # a model that does not say what its layers are
            savings["--gradient-checkpointing full"] = now - peak(leaner, row)
    resident = resident_parts(work, tracer.num_parameters, tracer.trained_sizes, tracer.frozen_bytes)
    if "reference" in resident and not config.lora.on:
        elsewhere = "" if work.target.on_cpu else ", or --reference-device cpu"
        savings[f"--kl-coef 0{elsewhere}"] = resident["reference"]
    if not config.lora.on and work.shards == 1:  # adapters themselves are small
        frozen = work.target.dtype.itemsize * tracer.num_parameters
        savings["--lora-rank 16"] = sum(resident.values()) - frozen
    if config.lora.on and not config.lora.load_in_4bit:
        in_4bit = replace(work.phase_settings(), lora=replace(config.lora, load_in_4bit=True))
        with suppress(ImportError):  # of bitsandbytes, where it is not installed
            savings["--load-in-4bit"] = tracer.frozen_bytes - PhaseTracer(in_4bit).frozen_bytes
    if phase in PHASES and work.target.dtype == torch.float32:
        target = make_target(work.target.model_config, work.target.device, torch.bfloat16)
        lower = replace(work.phase_settings(), target=target)
        savings["--precision bf16"] = now - peak(lower, row)
    useful = {name: saved for name, saved in savings.items() if saved >= 2**20}
    ways = (f"{name} saves {readable(saved)}" for name, saved in useful.items())
    said = "; ".join([*ways, "a smaller --model saves more"]) + "."
    if useful and sum(useful.values()) < missing_bytes:
        said += f" Without a smaller model it is not enough: {readable(missing_bytes)} are missing."
    return said


def does_not_stay(work: Workload, monitor: MemoryMonitor) -> str:
    """Why set-up ran out of memory: what exists all along, what there is, and what would save some."""
    tracer = PhaseTracer(work.phase_settings())
    resident = resident_parts(
        work, tracer.num_parameters, work.sizes_here(tracer.trained_sizes), tracer.frozen_bytes
    )
    parts = ", ".join(f"{name} {readable(size)}" for name, size in resident.items())
    memory, others = monitor.memory(), monitor.neighbours()
    held = f"others hold {readable(memory.others_bytes)}{f' ({others})' if others else ''}"
    return (
        f"the model does not fit on {monitor.device}: what stays all along needs "
        f"{readable(sum(resident.values()))} ({parts}), and of {readable(memory.total_bytes)} {held}: "
        f"{advice(work, 'update', tracer)}"
    )
