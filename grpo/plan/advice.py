"""What to say where not one row fits: what it takes, what would take less, and the least that is enough."""

import math
from contextlib import suppress
from dataclasses import replace

import torch

from grpo.config.groups import LoraSettings
from grpo.memory import DoesNotFit, Fit, Size
from grpo.memory.budget import GB, MEMORY_LIMIT, readable
from grpo.model.target import make_target
from grpo.plan.tables import in_words
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload

MARGIN_BYTES = 32 * 2**20
"""Beside what is predicted: what a process grows by after its first plan, code and texts."""


def check_one_row(work: Workload, traced: TracedPhases, fit: Fit) -> None:
    """DoesNotFit, with the remedy, where a phase has no room for one row of the longest texts."""
    group, row, room = work.size(min(work.rows_here, work.config.group_size)), work.size(1), fit.room_bytes()
    for phase in work.phase_settings().phases:
        if _needs(traced, fit, phase, group) > room and _needs(traced, fit, phase, row) > room:
            raise explain(work, traced, fit)


def _needs(traced: TracedPhases, fit: Fit, phase: str, size: Size) -> float:
    """Bytes that a pass adds to the process, by what was traced."""
    return (1 + fit.device.slack) * traced.added_bytes(phase, size)


def explain(work: Workload, traced: TracedPhases, fit: Fit) -> DoesNotFit:
    """What one row takes, what would take less, and the least that is enough. Nothing is computed."""
    used, budget, others = fit.device.used_bytes(), fit.device.budget(), fit.device.neighbours()
    needs = {phase: _needs(traced, fit, phase, work.size(1)) for phase in work.phase_settings().phases}
    phase = max(needs, key=lambda name: needs[name])
    parts = dict(work.added_parts(phase, work.size(1), sum(traced.trained_sizes)))
    parts["activations"] = max(0, int(needs[phase]) - sum(parts.values()))
    text = (
        f"{phase} does not fit: one row needs {readable(needs[phase])} ({in_words(parts)}) beside the "
        f"{readable(used)} that are held all along, and there are {budget}."
    )
    if others:
        text += f" On the card: {others}."
    if used < budget.usable_bytes:
        missing = used + needs[phase] - budget.usable_bytes
        text += f" {_remedies(work, traced, phase, missing)}"
    else:
        text += f" The process and the model alone take {readable(used)}."
    enough = math.ceil(100 * (used + needs[phase] + MARGIN_BYTES) / budget.share / GB) / 100
    if budget.reason == MEMORY_LIMIT:
        return DoesNotFit(f"{text} {MEMORY_LIMIT} has to be at least {enough:.2f}GB.")
    of_which = f", of which {budget.share:.0%} are used (--memory-utilization)" if budget.share < 1 else ""
    return DoesNotFit(f"{text} As it is, {enough:.2f} GB have to be there{of_which}.")


def _remedies(work: Workload, traced: TracedPhases, phase: str, missing_bytes: float = 0.0) -> str:
    """Settings to change, with the bytes each would save one row; and whether all of them are enough."""
    config, settings = work.config, work.phase_settings()
    row = work.size(1)
    now = traced.added_bytes(phase, row)
    half = max(1, row.tokens // 2)
    savings = {f"--max-new-tokens {half}": now - traced.added_bytes(phase, row._replace(tokens=half))}

    def with_other(**changes: object) -> int:
        return TracedPhases(replace(settings, **changes)).added_bytes(phase, row)  # type: ignore[arg-type]

    if phase == "learn":
        with suppress(ValueError):  # a model that does not say what its layers are
            savings["--gradient-checkpointing full"] = now - with_other(checkpointing="full")
    resident = work.resident(traced.num_parameters, traced.trained_sizes, traced.frozen_bytes)
    if "reference" in resident and not config.uses_lora:
        elsewhere = "" if work.target.on_cpu else ", or --reference-device cpu"
        savings[f"--kl-coef 0{elsewhere}"] = resident["reference"]
    if not config.uses_lora and work.shards == 1:  # adapters themselves are small
        frozen = work.target.dtype.itemsize * traced.num_parameters
        savings["--lora-rank 16"] = sum(resident.values()) - frozen
    if config.uses_lora and not config.load_in_4bit:
        with suppress(ImportError):  # of bitsandbytes, where it is not installed
            in_4bit = TracedPhases(replace(settings, lora=LoraSettings.of(config, load_in_4bit=True)))
            savings["--load-in-4bit"] = traced.frozen_bytes - in_4bit.frozen_bytes
    if work.target.dtype == torch.float32:
        target = make_target(work.target.model_config, work.target.device, torch.bfloat16)
        savings["--precision bf16"] = now - with_other(target=target)
    useful = {name: saved for name, saved in savings.items() if saved >= 2**20}
    ways = [f"{name} saves {readable(saved)}" for name, saved in useful.items()]
    said = "; ".join([*ways, "a smaller --model saves more"]) + "."
    if useful and sum(useful.values()) < missing_bytes:
        said += f" Without a smaller model it is not enough: {readable(missing_bytes)} are missing."
    return said


def does_not_stay(work: Workload, fit: Fit) -> str:
    """Why set-up ran out of memory: what exists all along, what there is, and what would save some."""
    traced = TracedPhases(work.phase_settings())
    resident = work.resident(traced.num_parameters, traced.trained_sizes, traced.frozen_bytes)
    parts = ", ".join(f"{name} {readable(size)}" for name, size in resident.items())
    others = fit.device.neighbours()
    return (
        f"the model does not fit: what stays all along needs {readable(sum(resident.values()))} ({parts}), "
        f"and there are {fit.device.budget()}{f'; on the card: {others}' if others else ''}: "
        f"{_remedies(work, traced, 'sample')}"
    )
