"""The memory plan of a run that is about to start: its cap, and real passes of all phases."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache

from loguru import logger

from grpo.distributed import World
from grpo.memory import Device, DoesNotFit, Fit, PassSize
from grpo.memory.budget import readable
from grpo.model.load import Policy
from grpo.plan.advice import explain
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.tables import Plan, plan_of
from grpo.plan.trace import TracedPhases
from grpo.plan.warm_up import choose_recomputing, largest_batch, see_trace, warm_up
from grpo.plan.workload import Workload

HOST_WORK, CARD_WORK = 2e10, 4e14
"""Tokens times parameters of a pass that is computed only to see what it holds: a second of two cores."""


def plan_run(
    work: Workload,
    world: World,
    device: Device,
    phases_of: Callable[[Workload], PhaseProbe],
    stack: ExitStack,
    *,
    is_trial: bool = False,
) -> tuple[Workload, Fit, Plan]:
    """The first plan; what is auto in the settings is settled by then.

    From here on the budget is enforced, until `stack` is closed. DoesNotFit, with what would be enough,
    where not one row fits.
    """
    with ExitStack() as limited:
        how = limited.enter_context(device.capped())
        if work.config.memory_limit:
            logger.info("memory limit {}: {}", work.config.memory_limit, how)
        try:
            if (beyond := device.used_bytes() - device.budget().usable_bytes) > 0:
                raise DoesNotFit(f"{readable(beyond)} more are held than may be.")
            work, fit = _try_out(work, world, device, phases_of, is_trial)
        except DoesNotFit as error:
            limited.close()  # to say what would be enough takes memory, too
            if work.config.memory_limit and not work.config.shard:  # whose passes want all processes
                _make_first_passes(work, phases_of(work))
            raise explain(TracedPhases(work), Fit(device)) from error
        stack.push(limited.pop_all())
    return work, fit, plan_of(fit, phases_of(work))


def _make_first_passes(work: Workload, phases: PhaseProbe) -> None:
    """Have a process that was refused hold what a first pass leaves for good: threads, kernels, libraries.

    On 16 cores they take 70 MB, and a limit that is named without them would be refused again.
    """
    for phase in work.phases:
        with suppress(Exception):  # it only makes a figure better
            phases.run(phase, work.size(1))
        phases.drop_gradients()


def _try_out(
    work: Workload, world: World, device: Device, phases_of: Callable[[Workload], PhaseProbe], is_trial: bool
) -> tuple[Workload, Fit]:
    """Makes passes of each phase, with layers recomputed where that is wanted, see `choose_recomputing`."""
    shard = work.config.shard

    def fewest(rows: int) -> int:
        return min(world.exchange("the rows at once", rows)) if shard else rows

    def plan(tried: Workload) -> tuple[Workload, Fit]:
        fit = Fit(
            device,
            group_size=work.config.group_size,
            fixed=work.fixed_rows,
            replays=not (shard or is_trial),
            sync_rows=fewest,
            force_fixed_rows=is_trial,
        )
        warm_up(fit, tried, _passes(tried, fit, phases_of(tried)))
        return tried, fit

    tried, fit = plan(work) if shard else choose_recomputing(work, plan)
    if work.config.batch_size == "auto":
        largest = min(world.exchange("the batch size", largest_batch(fit, tried)))
        tried = tried.with_settings(batch_size=world.size * largest)
        for phase in tried.phases:
            fit.discard_plan(phase)
            fit.plan(phase, tried.size(tried.rows_here, phase))
    fit.take_passes()
    return tried, fit


def _passes(work: Workload, fit: Fit, phases: PhaseProbe) -> Callable[[str, PassSize], bool]:
    """Real ones, in which kernels are loaded and the process is seen to grow; traces where they take long."""
    most = (HOST_WORK if work.target.on_cpu else CARD_WORK) / phases.policy.num_parameters()
    traced = cache(lambda: TracedPhases(work))

    def pass_at(phase: str, size: PassSize) -> bool:
        if size.rows <= work.config.group_size or fit.num_tokens(size) <= most:
            fit.run(
                phase,
                lambda rows: phases.run(phase, size._replace(rows=rows)),
                size,
                rollback=phases.drop_gradients,
                is_warmup=True,
            )
            return True
        if work.config.shard:
            return False
        try:
            return see_trace(fit, traced(), phase, size)
        except Exception as error:  # a model that only real tensors run, or no memory to trace in
            logger.debug("{} of {} rows is not traced: {}", phase, size.rows, error)
            return False

    return pass_at


def stays_gathered(world: World, fit: Fit, work: Workload, policy: Policy) -> bool:
    """Sample with all weights of a sharded model gathered, where every process has room for as many rows."""
    weights = work.target.dtype.itemsize * policy.model.num_parameters()
    rows = fit.planned()["sample"]
    room = fit.needs("sample", work.size(rows, "sample")) + weights <= fit.room_bytes()
    if not all(world.exchange("the room for gathered weights", room)):
        return False
    logger.info("all weights stay gathered while sampling, as there is room for them")
    return True
