"""The largest batch that fits this device, by real training steps, each size in a fresh process.

Two sizes that fit make a line of memory over the batch; what it allows is tried next, and halfway where that
runs out. `classic` is the manual recipe: 16 more after a success, half after running out of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from loguru import logger

from grpo.config import SettingsError
from grpo.data.reward_files import resolve_max_new_tokens
from grpo.errors import UserError
from grpo.logs.tables import Row
from grpo.memory.budget import GB, readable
from grpo.model.load import context_length, load_tokenizer
from grpo.plan.workload import longest_prompt
from grpo.run.loading import load_source
from grpo.workbench.corpus import open_corpus
from grpo.workbench.line import LEAST_FOR_A_LINE, fit_line
from grpo.workbench.machine import resolve_auto
from grpo.workbench.models import model_shape, num_parameters
from grpo.workbench.settings import FindMax
from grpo.workbench.sizes import SizeResult, read_size, size_folder
from grpo.workbench.trial import PRINTED_FILE, run_task

TRIAL_STEPS, MAX_TRIALS = 3, 8
INCREMENT = 16
"""Rows more after a success in the classic recipe."""


def line_bytes(trial: SizeResult) -> int:
    """The peak that the line is fitted to: the allocator's on an accelerator, the process's on a host."""
    return trial.allocated_bytes or trial.peak_bytes or 0


def trial_row(trial: SizeResult) -> Row:
    """A row of the table of trials: batch, status, memory in GB, loss (of language modelling) and speed.

    Speed is that of the last step, as the first ones load kernels.
    """
    sizes = {"peak": trial.peak_bytes, "allocated": trial.allocated_bytes, "reserved": trial.reserved_bytes}
    step_s = trial.steady_s if trial.is_finished else None
    return {
        "batch": trial.batch_size,
        "status": trial.status,
        **{f"{name}, GB": f"{size / GB:.3f}" if size else None for name, size in sizes.items()},
        "loss": f"{trial.steps[-1]['loss']:.4f}" if step_s and not trial.higher_is_better else None,
        "s a step": f"{step_s:.2f}" if step_s else None,
        "samples/min": f"{60 * trial.batch_size / step_s:,.0f}" if step_s else None,
    }


def next_size(settings: FindMax, trials: Sequence[SizeResult], usable_bytes: float) -> int:
    """The batch size to try after these trials, in whole groups; 0 when the search is done.

    By the line: a first size, twice or half of it, then what their line allows of `usable_bytes`; last, sizes
    between those that fit, until there are enough to tell whether it is a line.
    """
    multiple, classic = settings.multiple, settings.strategy == "classic"

    def whole(size: float) -> int:
        return int(size // multiple) * multiple

    at_most = whole(settings.max_batch_size)
    peaks = {trial.batch_size: float(line_bytes(trial)) for trial in trials if trial.is_finished}
    fitted, beyond = max(peaks, default=0), at_most + multiple
    failed = min((trial.batch_size for trial in trials if not trial.is_finished), default=beyond)
    if not trials:
        return min(at_most, max(multiple, whole(settings.start)))
    if not classic and len(trials) == MAX_TRIALS:
        return 0
    if not fitted:
        return whole(failed / 2)
    if classic:
        size = min(at_most, fitted + max(multiple, whole(INCREMENT)))
        return size if fitted < size < failed else 0
    if failed < fitted:
        return 0  # what is free has changed meanwhile
    halfway, line, allowed = whole((fitted + failed) / 2), fit_line(peaks), beyond
    if len(peaks) == 1:
        allowed = 2 * fitted
    elif line is not None:
        allowed = whole(line.largest(usable_bytes))
    if failed < beyond and (allowed >= failed or len(peaks) == 1):
        allowed = halfway  # it ran out where the line saw room: the truth lies between, nobody knows where
    if (size := min(allowed, failed - multiple)) > fitted:
        return size
    gaps = [(high - low, whole((low + high) / 2)) for low, high in pairwise([0, *sorted(peaks)])]
    between = [size for _, size in sorted(gaps, reverse=True) if size and size not in peaks]
    return between[0] if between and len(peaks) < LEAST_FOR_A_LINE else 0


@dataclass(frozen=True)
class Checked:
    """The settings after the checks; a trial may use `usable_bytes`: what is free, or the limit."""

    settings: FindMax
    rows: Sequence[Row]
    """A row of the printed table for each check."""
    device_type: str
    usable_bytes: int
    no_command: str | None = None
    """Why train_lean.py cannot do what is tried, if it cannot."""


def check(settings: FindMax) -> Checked:
    """Check device, memory, neighbours, model, and lengths or corpus, in this order.

    The settings that come back name the device, the precision, and the most that a trial may hold (on a host
    what is free, lest the system ends something). ValueError for what a user can mend.
    """
    settings, machine = resolve_auto(settings)
    shape, no_command = model_shape(settings), None
    known = {
        "device": f"{machine.device_name}, {machine.precision}",
        "memory": f"{readable(machine.usable_bytes)} to use, of {readable(machine.total_bytes)}",
        "held by others": machine.others,
        "model": f"{settings.model_name}: {num_parameters(shape):,} parameters",
    }
    if settings.objective == "lm":
        known["data"] = (
            f"{settings.data}: {len(open_corpus(settings).ids):,} tokens, windows of {settings.context}"
        )
        no_command = "it trains with GRPO alone, and this is language modelling"
    else:
        settings = resolve_max_new_tokens(settings, context_length(shape))
        asked, new, reach = settings.prompt_tokens or 0, settings.max_new_tokens, context_length(shape)
        if asked + new > reach:
            raise SettingsError(
                f"prompt_tokens and max_new_tokens are {asked} and {new}, but the model reaches {reach} "
                "tokens in all: give less."
            )
        longest = longest_prompt(load_source(settings), load_tokenizer(settings.model))
        known["lengths"] = f"{asked or longest} prompt and {new} new tokens"
        if 0 < asked < longest:
            no_command = (
                f"its prompts have up to {longest} tokens, unlike --prompt-tokens {asked}; leave it out"
            )
    if settings.memory_limit is None and machine.device == "cpu":
        settings = replace(settings, memory_limit=str(machine.usable_bytes))
    return Checked(
        settings,
        [{"check": name, "found": value} for name, value in known.items()],
        machine.device.partition(":")[0],
        machine.usable_bytes,
        no_command,
    )


def find(checked: Checked, folder: Path) -> list[SizeResult]:
    """Search for the largest batch; all trials, each of which leaves a run's files in `folder`.

    ValueError where one fails, and not for want of memory: a smaller one would fail as well.
    """
    settings, trials = checked.settings, list[SizeResult]()
    while size := next_size(settings, trials, checked.usable_bytes):
        logger.info("batch {}: {} training steps in a new process", size, TRIAL_STEPS)
        trial = try_size(settings, size, folder)
        if trial.status not in ("ok", "out of memory"):
            raise UserError(
                f"batch {size} {trial.status}, and not for want of memory: {trial.message}; its log is "
                f"{size_folder(folder, size) / PRINTED_FILE}"
            )
        trials.append(trial)
    return trials


def try_size(settings: FindMax, batch_size: int, folder: Path) -> SizeResult:
    """Take real steps of full length at this size in a fresh process, whose run is in `folder`."""
    task = settings.task(
        batch_size=batch_size, steps=TRIAL_STEPS, eval_interval=0, ignore_ends=True, logged_completions=0
    )
    ended = run_task(task, size_folder(folder, batch_size))
    logger.info("batch {}: {}", batch_size, ended)
    return read_size(folder, batch_size, {"objective": settings.objective})
