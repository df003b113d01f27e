"""The error where not one row fits: what it takes, what would take less, and the least that is enough."""

import math
from collections.abc import Callable

import torch

from grpo.memory import DoesNotFit, Fit
from grpo.memory.budget import GB, MEMORY_LIMIT, readable
from grpo.memory.device import GROWTH_BYTES
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload


def check_one_row(
    traced: TracedPhases, fit: Fit, advice: Callable[[TracedPhases, Fit], DoesNotFit] | None = None
) -> None:
    """DoesNotFit, with the remedy, where a phase has no room for one row of the longest texts.

    advice: what makes the error; None: `explain`, by the settings of a run.
    """
    work, room = traced.work, fit.room_bytes() / (1 + fit.device.slack)
    group = min(work.rows_here, work.config.group_size)
    for phase in work.phases:
        if all(traced.added_bytes(phase, work.size(rows, phase)) > room for rows in (group, 1)):
            raise (advice or explain)(traced, fit)


def explain(traced: TracedPhases, fit: Fit) -> DoesNotFit:
    """Says what one row takes, what would take less, and the least that is enough. Nothing is computed."""
    work, used, budget = traced.work, fit.device.used_bytes(), fit.device.budget()
    row = work.size(1)
    phase = max(work.phases, key=lambda name: traced.added_bytes(name, row))
    needed = (1 + fit.device.slack) * traced.added_bytes(phase, row)
    parts = traced.phases.known_parts(phase, row)
    parts["activations"] = max(0, int(needed) - sum(parts.values()))
    text = (
        f"{phase} does not fit: one row needs {readable(needed)} ({_in_words(parts)}) beside the "
        f"{readable(used)} that are held all along, and there are {budget}{_neighbours(fit)}. "
    )
    if used < budget.usable_bytes:
        text += _remedies(traced, phase)
    else:
        text += f"The process and the model alone take {readable(used)}."
    enough = math.ceil(100 * (used + needed + GROWTH_BYTES) / budget.share / GB) / 100
    if budget.reason == MEMORY_LIMIT:
        return DoesNotFit(f"{text} {MEMORY_LIMIT} has to be at least {enough:.2f}GB.")
    of_which = f", of which {budget.share:.0%} are used (--memory-utilization)" if budget.share < 1 else ""
    return DoesNotFit(f"{text} As it is, {enough:.2f} GB have to be there{of_which}.")


def explain_model_does_not_fit(work: Workload, fit: Fit) -> str:
    """Why set-up ran out of memory: what exists all along, what there is, and what would save some."""
    traced = TracedPhases(work)
    resident = traced.phases.resident()
    return (
        f"the model does not fit: what stays all along needs {readable(sum(resident.values()))} "
        f"({_in_words(resident)}), and there are {fit.device.budget()}{_neighbours(fit)}: "
        f"{_remedies(traced, 'sample')}"
    )


def _remedies(traced: TracedPhases, phase: str) -> str:
    """Settings to change, with the bytes that each saves where the present model tells."""
    work, row, resident = traced.work, traced.work.size(1), traced.phases.resident()
    config, half = work.config, max(1, row.completion_tokens // 2)
    fewer_bytes = traced.added_bytes(phase, row) - traced.added_bytes(
        phase, row._replace(completion_tokens=half)
    )
    savings = {f"--max-new-tokens {half}": readable(fewer_bytes)}
    if phase == "learn" and work.checkpointing == "none":
        savings["--gradient-checkpointing full"] = "most of the activations"
    if work.target.dtype == torch.float32:
        savings["--precision bf16"] = "half of the activations"
    if config.uses_lora and not config.load_in_4bit:
        savings["--load-in-4bit"] = f"most of {readable(resident['weights'])}"
    if "reference" in resident and not config.uses_lora:
        elsewhere = "" if work.target.on_cpu else ", or --reference-device cpu"
        savings[f"--kl-coef 0{elsewhere}"] = readable(resident["reference"])
    if not config.uses_lora and work.shards == 1:  # adapters themselves are small
        frozen = work.target.dtype.itemsize * sum(traced.phases.trained_sizes)
        savings["--lora-rank 16"] = readable(sum(resident.values()) - frozen)
    ways = [f"{name} saves {saved}" for name, saved in savings.items()]
    return "; ".join([*ways, "a smaller --model saves more"]) + "."


def _in_words(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)


def _neighbours(fit: Fit) -> str:
    others = fit.device.neighbours()
    return f"; on the card: {others}" if others else ""
