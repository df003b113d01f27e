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
from grpo.memory.budget import GB, readable
from grpo.model.load import context_length, load_tokenizer
from grpo.plan.workload import longest_prompt
from grpo.run.loading import load_source
from grpo.workbench.corpus import open_corpus
from grpo.workbench.line import LEAST_FOR_A_LINE, fit_line
from grpo.workbench.lm import num_parameters
from grpo.workbench.machine import look
from grpo.workbench.settings import FindMax
from grpo.workbench.sizes import Size, read_size, size_folder
from grpo.workbench.tables import Row
from grpo.workbench.task import Task, alone, model_name, model_shape, settled
from grpo.workbench.trial import run_task

TRIAL_STEPS, MAX_TRIALS = 3, 8
INCREMENT = 16
"""Rows more after a success in the classic recipe."""


def line_bytes(trial: Size) -> int:
    """What the line is drawn through: the allocator's peak, on a host the process's."""
    return trial.allocated_bytes or trial.peak_bytes or 0


def trial_row(trial: Size) -> Row:
    """For people: rows, status, what they held in GB, samples a minute."""
    sizes = {"peak": trial.peak_bytes, "allocated": trial.allocated_bytes, "reserved": trial.reserved_bytes}
    row: Row = {"batch": trial.batch_size, "status": trial.status}
    row |= {f"{name}, GB": f"{size / GB:.3f}" if size else None for name, size in sizes.items()}
    row |= {"loss": None, "s a step": None, "samples/min": None}
    if trial.is_finished:
        fastest_s, loss = min(trial.step_s), trial.steps[-1]["loss"]
        speed = f"{60 * trial.batch_size / fastest_s:,.0f}"
        row |= {"loss": f"{loss:.4f}", "s a step": f"{fastest_s:.2f}", "samples/min": speed}
    return row


def next_size(
    trials: Sequence[Size], usable_bytes: float, *, start: int, multiple: int, at_most: int, classic: bool
) -> int:
    """What to try after these trials; 0 where the search is done. Sizes are multiples, and none is above.

    By the line: a first size, twice or half of it, then what their line allows of `usable_bytes`; last, sizes
    between those that fit, until there are enough to tell whether it is a line.
    """

    def whole(size: float) -> int:
        return int(size // multiple) * multiple

    at_most = whole(at_most)
    peaks = {trial.batch_size: float(line_bytes(trial)) for trial in trials if trial.is_finished}
    fitted, beyond = max(peaks, default=0), at_most + multiple
    failed = min((trial.batch_size for trial in trials if not trial.is_finished), default=beyond)
    if not trials:
        return min(at_most, max(multiple, whole(start)))
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
    """What the checks found: a trial may use `usable_bytes`, what is free or the limit."""

    settings: FindMax
    rows: Sequence[Row]
    """For people."""
    device_type: str
    usable_bytes: int
    no_command: str | None = None
    """Why there is no command of train_lean.py for what is tried."""


def check(settings: FindMax) -> Checked:
    """Device, memory, neighbours, model, lengths or corpus: in this order, each a row.

    The settings that come back name the device, the precision, and the most that a trial may hold (on a host
    what is free, lest the system ends something). ValueError for what a user can mend.
    """
    settings = replace(settings, train=settled(settings.train, settings.made))
    train, made = settings.train, settings.made
    machine = look(train.device, train.precision, train.memory_limit)
    shape = model_shape(train, made)
    known = {
        "device": f"{machine.device_name}, {machine.precision}",
        "memory": f"{readable(machine.usable_bytes)} to use, of {readable(machine.total_bytes)}",
        "held by others": machine.others,
        "model": f"{model_name(train, made)}: {num_parameters(shape):,} parameters",
    }
    no_command = None
    if settings.objective == "lm":
        corpus = open_corpus(settings.data, train, made)
        known["data"] = f"{settings.data}: {len(corpus.ids):,} tokens, windows of {made.context}"
        no_command = "it trains with GRPO alone, and this is language modelling"
    else:
        reach, new = context_length(shape), train.max_new_tokens
        if (settings.prompt_tokens or 0) + new > reach:
            raise SettingsError(
                f"prompt_tokens and max_new_tokens are {settings.prompt_tokens} and {new}, but the model "
                f"reaches {reach} tokens in all: give less."
            )
        longest = longest_prompt(load_source(train), load_tokenizer(train.model))
        prompt = settings.prompt_tokens or longest
        known["lengths"] = f"{prompt} prompt and {new} new tokens"
        if longest > prompt:
            no_command = (
                f"its prompts have up to {longest} tokens, unlike --prompt-tokens {prompt}; leave it out"
            )
    limit = train.memory_limit
    if limit is None and machine.device == "cpu":
        limit = str(machine.usable_bytes)
    train = replace(train, device=machine.device, precision=machine.precision, memory_limit=limit)
    return Checked(
        replace(settings, train=train), [{"check": name, "found": value} for name, value in known.items()],
        machine.device.partition(":")[0], machine.usable_bytes, no_command,
    )  # fmt: skip


def find(checked: Checked, folder: Path) -> list[Size]:
    """All trials, the search done; each leaves a run's files in `folder`."""
    settings, trials = checked.settings, list[Size]()
    limits = {
        "multiple": settings.multiple,
        "at_most": settings.train.max_batch_size,
        "start": settings.start,
    }
    classic = settings.strategy == "classic"
    while size := next_size(trials, checked.usable_bytes, classic=classic, **limits):
        logger.info("batch {}: {} training steps in a new process", size, TRIAL_STEPS)
        trials.append(try_size(settings, size, folder))
    return trials


def try_size(settings: FindMax, batch_size: int, folder: Path) -> Size:
    """Real steps of full length at this size, in a fresh process, whose run is in `folder`."""
    train = alone(settings.train, steps=TRIAL_STEPS, eval_interval=0, ignore_ends=True, logged_completions=0)
    task = Task(
        settings.objective, train, batch_size, settings.made, settings.data,
        prompt_tokens=settings.prompt_tokens,
    )  # fmt: skip
    run_task(task, size_folder(folder, batch_size))
    trial = read_size(folder, batch_size, {"objective": settings.objective})
    logger.info("batch {}: {}{}", batch_size, trial.status, f" ({trial.message})" if trial.message else "")
    return trial
