"""The plan of a run without its weights: the warm-up on tensors without storage, the same planner."""

from copy import copy
from functools import partial

from loguru import logger

from grpo.memory import Card, Fit, Size
from grpo.plan.advice import check_one_row
from grpo.plan.tables import Plan, plan_of
from grpo.plan.trace import TracedPhases
from grpo.plan.warm_up import largest_batch, warm_up
from grpo.plan.workload import Workload

STARTED_BYTES = 64 * 2**20
"""What a process on a host grows by from its imports to its plan: code and threads."""


def plan_without_weights(work: Workload, card: Card) -> tuple[Workload, Plan]:
    """What is auto in the settings is settled in the workload that comes back. DoesNotFit with a remedy.

    card: with what the process holds besides tensors.
    """
    card, first = copy(card), None
    outside = card.held_bytes
    kinds = ("none", "full") if work.config.gradient_checkpointing == "auto" else (None,)
    for kind in kinds:
        tried = work if kind is None else work.with_settings(gradient_checkpointing=kind)
        try:
            traced = TracedPhases(tried.phase_settings())
            resident = tried.resident(traced.num_parameters, traced.trained_sizes, traced.frozen_bytes)
            card.held_bytes = outside + sum(resident.values())
            fit = Fit(card, group_size=work.config.group_size, fixed=work.fixed_rows)
            check_one_row(tried, traced, fit)
            break
        except ValueError as error:  # of "full", too, where a model does not say what its layers are
            if kind != "none":
                raise first or error from None
            first = error
    if tried.config.gradient_checkpointing == "full" != work.config.gradient_checkpointing:
        logger.info("gradient checkpointing is full: not one row would learn otherwise")
    see_traces(fit, tried, traced)
    if work.config.batch_size == "auto":
        tried = tried.with_settings(batch_size=work.processes * largest_batch(fit, tried))
        see_traces(fit, tried, traced)
    return tried, plan_of(fit, tried, resident, trained=sum(traced.trained_sizes))


def see_traces(fit: Fit, work: Workload, traced: TracedPhases) -> None:
    """Plan all phases from traces."""
    warm_up(fit, work, partial(see_trace, fit, traced), bold=True)


def see_trace(fit: Fit, traced: TracedPhases, phase: str, size: Size) -> bool:
    """One pass, of which nothing is computed."""
    fit.see(phase, size, traced.added_bytes(phase, size))
    return True
