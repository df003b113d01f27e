"""The first plan: passes at the longest texts, a group and then more, until the plan is known.

Passes are real before a run's first step, traced where they would take long or for a card that is not there.
"""

from collections.abc import Callable, Sequence

from loguru import logger

from grpo.config import SettingsError
from grpo.memory import Fit, Size, largest_multiple
from grpo.plan.workload import Workload

MOST_PASSES = 12
"""Of a phase."""
JUST = 1.2
"""Times the room, by a formula that may be that much too high."""


def warm_up(
    fit: Fit,
    work: Workload,
    pass_at: Callable[[str, Size], bool],
    *,
    phases: Sequence[str] = (),
    bold: bool = False,
) -> None:
    """See each phase, and plan it. phases: if not a run's.

    pass_at: makes `fit` see a pass, or one of fewer rows; False where such a pass is not to be had. bold: see
    a pass of more rows, too, that may just fit: where none can run out of memory.
    """
    longest, room = work.size(1), fit.room_bytes()
    for phase in phases or work.phase_settings().phases:
        rows = min(work.rows_here, work.config.group_size, work.fixed_rows.get(phase, work.rows_here))
        seen: list[int] = []
        while rows not in seen and len(seen) < MOST_PASSES:
            if not pass_at(phase, longest._replace(rows=rows)):
                break
            seen.append(rows)
            fit.reconsider(phase)  # what was seen last tells more
            rows = fit.plan(phase, longest._replace(rows=work.rows_here))
            if bold and phase not in work.fixed_rows and fit.needs(phase, work.size(work.rows_here)) <= room:
                rows = work.rows_here  # in proportion to what was seen: rather too much
        while bold and (more := _fewer_passes(rows, work)) and more not in seen and len(seen) < MOST_PASSES:
            if fit.needs(phase, work.size(more)) > JUST * room:
                break
            pass_at(phase, work.size(more))
            seen.append(more)
            fit.reconsider(phase)
            rows = fit.plan(phase, longest._replace(rows=work.rows_here))


def _fewer_passes(rows: int, work: Workload) -> int:
    """The rows with which a step takes one pass less; 0 where it takes one, or less than a group at once."""
    batch, group = work.rows_here, work.config.group_size
    passes = -(-batch // rows) - 1
    return -(-batch // (passes * group)) * group if passes and rows >= group else 0


def largest_batch(fit: Fit, work: Workload) -> int:
    """The largest multiple of the group size, up to one process's share, that no phase has to split."""
    config, room = work.config, fit.room_bytes()
    size = max(1, config.max_batch_size // config.group_size // work.processes) * config.group_size
    for phase in work.phase_settings().phases:

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
