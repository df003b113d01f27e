"""The first plan: passes at the longest texts, a group and then more, until the plan is known.

Passes are real before a run's first step, and traced on tensors without storage where they would take long or
for a card that is not there; the planner is the same.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TypeVar

import torch
from loguru import logger
from rich.console import Console

from grpo.config import SettingsError
from grpo.errors import UserError
from grpo.memory import AbsentCard, Device, DoesNotFit, Fit, PassSize, largest_multiple
from grpo.memory.budget import CONTEXT_BYTES, card_memory
from grpo.model.numerics import MODEL_ERRORS
from grpo.plan.advice import check_one_row
from grpo.plan.tables import Plan, plan_of, plan_table
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload

T = TypeVar("T")
FULL_PASS_TOKENS = 1024
"""A pass of fewer tokens takes almost as long: there layers are rather recomputed than rows learn one by one.

GPT-2 124 M on two CPU cores learns a row of 210 tokens in 1.04 s alone, and in 0.70 s among eight with layers
recomputed; a row of 800 tokens in 3.3 s, and in 3.6 s.
"""
MOST_PASSES = 12
"""Passes of one phase at most."""
OVERSHOOT = 1.2
"""A formula may be so many times too high: passes that it puts this far beyond the room are traced, too."""
STARTED_BYTES = 64 * 2**20
"""Bytes that a process on a host grows by from its imports to its plan: code and threads."""


def warm_up(
    fit: Fit, work: Workload, pass_at: Callable[[str, PassSize], bool], *, traced_only: bool = False
) -> None:
    """Makes passes of each phase, until its plan is one that was seen.

    pass_at: makes `fit` see a pass, or one of fewer rows; False where such a pass is not to be had.
    traced_only: no pass can run out of memory, so that one of more rows, which may just fit, is seen, too.
    """
    room, batch = fit.room_bytes(), work.rows_here
    for phase in work.phases:
        whole = work.size(batch, phase)
        rows = min(batch, work.config.group_size, work.fixed_rows.get(phase, batch))
        seen: list[int] = []
        while rows not in seen and len(seen) < MOST_PASSES and pass_at(phase, work.size(rows, phase)):
            seen.append(rows)
            fit.discard_plan(phase)  # what was seen last tells more
            rows = fit.plan(phase, whole)
            if traced_only and phase not in work.fixed_rows and fit.needs(phase, whole) <= room:
                rows = batch  # in proportion to what was seen: rather too much
            more = _with_one_pass_less(rows, work)
            may_fit = more and fit.needs(phase, work.size(more, phase)) <= OVERSHOOT * room
            if traced_only and rows in seen and may_fit:
                rows = more
        if len(seen) == 1 and not traced_only:  # of one size all bytes would be taken to grow with the tokens
            longest = work.size(seen[0], phase)
            pass_at(phase, longest._replace(completion_tokens=max(1, longest.completion_tokens // 2)))


def _with_one_pass_less(rows: int, work: Workload) -> int:
    """The rows with which a step takes one pass less; 0 where it takes one, or less than a group at once."""
    batch, group = work.rows_here, work.config.group_size
    passes = -(-batch // rows) - 1
    return -(-batch // (passes * group)) * group if passes and rows >= group else 0


def see_trace(fit: Fit, traced: TracedPhases, phase: str, size: PassSize) -> bool:
    """Traces one pass, of which nothing is computed."""
    fit.see(phase, size, traced.added_bytes(phase, size))
    return True


def largest_batch(fit: Fit, work: Workload) -> int:
    """The largest multiple of the group size, up to one process's share, that no phase has to split."""
    config, room = work.config, fit.room_bytes()
    size = max(1, config.max_batch_size // config.group_size // work.processes) * config.group_size
    for phase in work.phases:

        def fits(rows: int, phase: str = phase) -> bool:
            return fit.needs(phase, work.size(rows)) <= room

        size = largest_multiple(fits, at_most=size, multiple=config.group_size)
        if not size:
            raise SettingsError(
                f"batch_size is auto, but {phase} does not hold one group of {config.group_size} at once in "
                f"{fit.device.budget()}: give --batch-size {config.group_size}, which is then done in parts."
            )
    logger.info("batch size {}: the largest that needs no splitting, of {}", size, fit.device.budget())
    return size


def plan_without_weights(work: Workload, card: AbsentCard) -> tuple[Workload, Plan]:
    """The plan of a run from traces alone, and the workload with what is auto in its settings settled.

    card: with what the process holds besides tensors. DoesNotFit, with a remedy, where not one row fits.
    """
    traced, fit = choose_recomputing(work, partial(_traced_plan, card=card))
    work = traced.work
    if work.config.batch_size == "auto":
        work = work.with_settings(batch_size=work.processes * largest_batch(fit, work))
        warm_up(fit, work, partial(see_trace, fit, traced), traced_only=True)
    return work, plan_of(fit, traced.phases)


def card_to_plan_for(
    device: torch.device, absent: int | None, *, utilization: float, limit_bytes: int | None
) -> AbsentCard:
    """The device that is here, or a card of so many bytes, as it is sold, before a model is on it."""
    here = None if absent else Device(device)
    card = AbsentCard(
        here.memory() if here else card_memory(absent or 0),
        utilization=utilization,
        limit_bytes=limit_bytes,
        slack=here.slack if here else 0,
    )
    card.held_bytes = here.used_bytes() + STARTED_BYTES if here and here.on_host else CONTEXT_BYTES
    return card


def show_plan(work: Workload, plan: Plan, console: Console) -> None:
    """Prints what is planned for in a line, and the table."""
    dtype = str(work.target.dtype).removeprefix("torch.")
    text = "{} rows of up to {} prompt and {} new tokens, {}"
    logger.info(text, work.config.num_rows, work.longest_prompt, work.config.max_new_tokens, dtype)
    console.print(plan_table(plan))


def _traced_plan(work: Workload, card: AbsentCard) -> tuple[TracedPhases, Fit]:
    traced = TracedPhases(work)
    return traced, plan_by_traces(traced, card)


def plan_by_traces(
    traced: TracedPhases, card: AbsentCard, advice: Callable[[TracedPhases, Fit], DoesNotFit] | None = None
) -> Fit:
    """Plans on a card by traces alone. DoesNotFit where not one row fits; advice: see `check_one_row`."""
    work, loaded = traced.work, copy(card)
    loaded.held_bytes += sum(traced.phases.resident().values())
    fit = Fit(loaded, group_size=work.config.group_size, fixed=work.fixed_rows)
    check_one_row(traced, fit, advice)
    warm_up(fit, work, partial(see_trace, fit, traced), traced_only=True)
    return fit


def choose_recomputing(work: Workload, plan: Callable[[Workload], tuple[T, Fit]]) -> tuple[T, Fit]:
    """Returns the plan that `plan` makes; where the settings leave it open, with layers recomputed or not.

    They are where more rows learn at once then, and without it fewer than make a full pass. The error of
    `plan` is raised where it has one either way.
    """
    if work.config.gradient_checkpointing != "auto":
        return plan(work)
    plain, refused = None, None
    try:
        plain = plan(work.with_settings(gradient_checkpointing="none"))
        if _makes_full_pass(plain[1], work):
            return plain
    except UserError as error:
        refused = error
    try:
        recomputed = plan(work.with_settings(gradient_checkpointing="full"))
    except MODEL_ERRORS as error:  # such as a model that does not say what its layers are
        if plain is None:
            raise refused or error from error
        logger.debug("layers are not recomputed: {}", error)
        return plain
    rows, without = (found[1].planned()["learn"] if found else 0 for found in (recomputed, plain))
    if plain is not None and rows <= without:
        return plain
    logger.info("gradient checkpointing is full: {} rows learn at once, instead of {}", rows, without)
    return recomputed


def _makes_full_pass(fit: Fit, work: Workload) -> bool:
    """Returns whether rows at once are all that are wanted, or of enough tokens; a batch that is auto is then
    as large as they are.
    """
    rows, is_auto = fit.planned()["learn"], work.config.batch_size == "auto"
    wanted = work.fixed_rows.get("learn", work.config.group_size if is_auto else work.rows_here)
    return rows >= wanted or fit.num_tokens(work.size(rows)) >= FULL_PASS_TOKENS
