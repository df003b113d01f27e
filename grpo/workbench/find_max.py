"""The largest batch that fits this device, by real training steps, each size in a fresh process.

Two sizes that fit make a line of memory over the batch; what it allows is tried next, and halfway where that
runs out. `classic` is the manual recipe: 16 more after a success, half after running out of memory.
"""

import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from loguru import logger
from rich.table import Table

from grpo.config import Config, SettingsError, to_flat
from grpo.config.limits import COUNT, check_limits
from grpo.config.sizes import GB
from grpo.workbench.spec import MadeModel
from grpo.workbench.task import (
    Objective,
    Task,
    alone,
    check_objective,
    model_name,
    model_shape,
    parse_flags,
    settled,
)

TRIAL_STEPS, MAX_TRIALS = 3, 8
INCREMENT = 16
"""Rows more after a success in the classic recipe."""
CHOSEN = ("batch_size", "steps", "minutes", "rollout_rows", "score_rows", "train_rows", "resume", "dry_run",
          "device_memory", "name", "memory_utilization")  # fmt: skip
"""Flags of train_lean.py that a trial sets."""


@dataclass(frozen=True)
class FindMax:
    """The largest batch size that fits this device, by real training steps.

    Other flags are those of train_lean.py, which `--config FILE` holds, too.
    """

    objective: Objective = "grpo"
    """grpo: sample, score and learn, all rows at once. lm: plain language modelling."""
    data: str | None = None
    """Text to learn from (lm); bundled: chess positions and moves, 0.8 MB."""
    strategy: Literal["line", "classic"] = "line"
    """line: what memory over the sizes tried allows, at most 8 trials. classic: 16 more or half."""
    start: Annotated[int, COUNT] = 64
    """Batch size of the first trial."""
    prompt_tokens: Annotated[int | None, COUNT] = None
    """Of all prompts, which are then made up (grpo); None: the prompts of --prompts."""
    output: Path | None = None
    """Folder of the table, JSON and picture; None: runs/max-batch- and the time."""
    made: MadeModel = field(default_factory=MadeModel)
    train: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        check_limits(self)
        check_objective(self.objective, self.made)

    @property
    def multiple(self) -> int:
        """What batches are multiples of."""
        return self.train.group_size if self.objective == "grpo" else 1

    def folder(self) -> Path:
        return self.output or Path("runs") / f"max-batch-{datetime.now():%Y%m%d-%H%M%S}"


def parse_find_max(arguments: Sequence[str] | None = None) -> FindMax:
    """From the command line. SettingsError for what is wrong."""
    return parse_flags(FindMax, Config(), chosen=CHOSEN, arguments=arguments)


@dataclass(frozen=True)
class Trial:
    """One size: how it went, its peaks in bytes, and its steps' losses and seconds."""

    batch_size: int
    status: str
    message: str | None = None
    peak_bytes: int | None = None
    """Most that the process held (on an accelerator: of the device)."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    """By torch's allocator; None on a host."""
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.status == "ok"

    @property
    def line_bytes(self) -> int:
        """What the line is drawn through: the allocator's peak, on a host the process's."""
        return self.allocated_bytes or self.peak_bytes or 0

    @property
    def samples_a_minute(self) -> float:
        return 60 * self.batch_size / min(self.step_s)


# ------------------------------------------------------------------------------------------ search

Search = Generator[int, Trial, None]
"""Yields sizes to try, and is sent what came of each."""


def classic_sizes(start: int, *, multiple: int, at_most: int) -> Search:
    """`start`, then INCREMENT more after each success and half after each failure, until both are known."""
    size = min(at_most, _rounded(max(start, multiple), multiple))
    fitted, failed = 0, at_most + 1
    while size not in (fitted, failed):
        result = yield size
        if result.fits:
            fitted = max(fitted, size)
            size = min(at_most, size + max(multiple, _rounded(INCREMENT, multiple)))
        else:
            failed = min(failed, size)
            size = fitted or _rounded(size // 2, multiple)
        if size >= failed or not size:
            return


def sizes_by_line(
    usable_bytes: float, *, start: int, multiple: int, at_most: int, max_trials: int = MAX_TRIALS
) -> Search:
    """A first size and twice or half of it, then what their line allows; last, sizes that make it a line."""
    from grpo.workbench.line import LEAST_FOR_A_LINE

    peaks: dict[int, float] = {}
    at_most = _rounded(at_most, multiple)
    failed, size = at_most + multiple, min(at_most, _rounded(max(start, multiple), multiple))
    trials = 0
    while size and size not in peaks and size < failed and trials < max_trials:
        result = yield size
        trials += 1
        if result.fits:
            peaks[size] = result.line_bytes
        else:
            failed = size
        size = _next(peaks, failed, usable_bytes, multiple=multiple, is_tried=failed <= at_most)
    between = sorted(peaks)
    while between and len(peaks) < LEAST_FOR_A_LINE and trials < max_trials:
        gaps = [(high - low, _rounded((low + high) // 2, multiple))
                for low, high in zip([0, *between], between, strict=False)]  # fmt: skip
        size = next((size for _, size in sorted(gaps, reverse=True) if size and size not in peaks), 0)
        if not size:
            return
        result = yield size
        trials += 1
        if not result.fits:
            return  # what is free has changed meanwhile
        peaks[size] = result.line_bytes
        between = sorted(peaks)


def _next(
    peaks: Mapping[int, float], failed: int, usable_bytes: float, *, multiple: int, is_tried: bool
) -> int:
    """What to try after these. failed: the least size that did not fit (is_tried) or is not to be tried."""
    from grpo.workbench.line import fit_line

    largest, ceiling = max(peaks, default=0), failed - multiple
    between = _rounded((largest + failed) // 2, multiple)
    if not largest:
        return between
    if len(peaks) == 1:
        return between if is_tried else min(ceiling, 2 * largest)
    line = fit_line(peaks)
    allowed = line.largest(usable_bytes, multiple=multiple) if line else ceiling
    if is_tried and allowed >= failed:
        return between  # it ran out where the line saw room: the truth lies between, nobody knows where
    return max(largest, min(allowed, ceiling))


def _rounded(size: int, multiple: int) -> int:
    return size // multiple * multiple


def run_search(search: Search, attempt: Callable[[int], Trial]) -> list[Trial]:
    """All trials of a search, in order."""
    trials: list[Trial] = []
    try:
        size = next(search)
        while True:
            logger.info("batch {}: {} training steps in a new process", size, TRIAL_STEPS)
            trials.append(attempt(size))
            logger.info("batch {}: {}", size, _said(trials[-1]))
            size = search.send(trials[-1])
    except StopIteration:
        return trials


def _said(trial: Trial) -> str:
    if not trial.fits:
        return f"{trial.status} ({trial.message})" if trial.message else trial.status
    peak = (trial.peak_bytes or 0) / GB
    return f"peak {peak:.2f} GB, loss {trial.losses[-1]:.4f}, {min(trial.step_s):.2f} s a step"


# ------------------------------------------------------------------------------------------ trials


@dataclass(frozen=True)
class Checked:
    """What the checks found: a trial may use `usable_bytes`, what is free or the limit."""

    settings: FindMax
    table: Table
    device_type: str
    usable_bytes: int
    no_command: str | None = None
    """Why there is no command of train_lean.py for what is tried."""


def check(settings: FindMax) -> Checked:
    """Device, memory, neighbours, model, lengths or corpus: in this order, each a line of a table.

    The settings that come back name the device, the precision, and the most that a trial may hold (on a host
    what is free, lest the system ends something). ValueError for what a user can mend.
    """
    from grpo.memory.budget import readable
    from grpo.workbench.lm import num_parameters
    from grpo.workbench.machine import look

    settings = replace(settings, train=settled(settings.train, settings.made))
    train = settings.train
    table = Table("check", "found", title="Before the first trial", title_justify="left")
    machine = look(train.device, train.precision, train.memory_limit)
    table.add_row("device", f"{machine.device_name}, {machine.precision}")
    usable, total = readable(machine.usable_bytes), readable(machine.total_bytes)
    table.add_row("memory", f"{usable} to use, of {total}")
    table.add_row("held by others", machine.others)
    count = num_parameters(model_shape(train, settings.made))
    table.add_row("model", f"{model_name(train, settings.made)}: {count:,} parameters")
    no_command = "it trains with GRPO alone, and this is language modelling"
    if settings.objective == "lm":
        from grpo.workbench.corpus import open_corpus

        corpus = open_corpus(settings.data, train, settings.made)
        what = f"{settings.data}: {len(corpus.ids):,} tokens, windows of {settings.made.context}"
        table.add_row("data", what)
    else:
        longest = _longest_prompt(settings)
        prompt = settings.prompt_tokens or longest
        table.add_row("lengths", f"{prompt} prompt and {train.sampling.max_new_tokens} new tokens")
        no_command = (
            f"its prompts have up to {longest} tokens, and this is --prompt-tokens {prompt}; leave that out"
        ) if longest > prompt else ""  # fmt: skip
    limit = train.memory_limit
    if limit is None and machine.device == "cpu":
        limit = str(machine.usable_bytes)
    train = replace(train, device=machine.device, precision=machine.precision, memory_limit=limit)
    return Checked(
        replace(settings, train=train), table, machine.device.partition(":")[0], machine.usable_bytes,
        no_command or None,
    )  # fmt: skip


def _longest_prompt(settings: FindMax) -> int:
    """Tokens, of the prompts of --prompts. SettingsError where texts go beyond what the model reaches."""
    from grpo.model.load import context_length, load_tokenizer
    from grpo.plan.workload import longest_prompt
    from grpo.run.loading import load_source

    train = settings.train
    reach, new = context_length(model_shape(train, settings.made)), train.sampling.max_new_tokens
    if (settings.prompt_tokens or 0) + new > reach:
        raise SettingsError(
            f"prompt_tokens and max_new_tokens are {settings.prompt_tokens} and {new}, but the model reaches "
            f"{reach} tokens in all: give less."
        )
    return longest_prompt(load_source(train), load_tokenizer(train.model), train)


def find(checked: Checked, folder: Path) -> list[Trial]:
    """All trials, the search done; each leaves a run's files in `folder`."""
    settings = checked.settings
    limits = {"multiple": settings.multiple, "at_most": settings.train.max_batch_size}
    if settings.strategy == "classic":
        search = classic_sizes(settings.start, **limits)
    else:
        search = sizes_by_line(checked.usable_bytes, start=settings.start, **limits)
    return run_search(search, lambda size: try_size(settings, size, folder / f"batch-{size:05d}"))


def try_size(settings: FindMax, batch_size: int, folder: Path) -> Trial:
    """Real steps of full length at this size, in a fresh process."""
    from grpo.workbench.trial import run_task

    sampling = replace(settings.train.sampling, ignore_ends=True)
    train = alone(settings.train, steps=TRIAL_STEPS, eval_interval=0, sampling=sampling, logged_completions=0)
    task = Task(
        settings.objective, train, batch_size, settings.made, settings.data,
        prompt_tokens=settings.prompt_tokens,
    )  # fmt: skip
    ended = run_task(task, folder)
    return read_trial(folder, batch_size, ended.status, ended.message)


def read_trial(folder: Path, batch_size: int, status: str, message: str | None) -> Trial:
    """What a trial's files say."""
    from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines

    steps = [line for line in read_lines(folder / METRICS_FILE) if "step_time" in line]
    on_card = [line for line in steps if "memory/reserved_gb" in line]

    def most(name: str) -> int | None:
        return max((int(GB * line[name]) for line in on_card), default=None)

    held = (line["process_bytes"] for line in read_lines(folder / MEMORY_FILE) if line["step"])
    return Trial(
        batch_size, status, message, max(held, default=None), most("memory/peak_gb"),
        most("memory/reserved_gb"), [line["loss"] for line in steps], [line["step_time"] for line in steps],
    )  # fmt: skip


def trials_table(trials: Sequence[Trial]) -> Table:
    """A row a trial."""
    table = Table(title="Trials", title_justify="left")
    on_card = any(trial.reserved_bytes for trial in trials)
    columns = ["peak, GB", *(["allocated", "reserved"] if on_card else []), "loss", "s a step", "samples/min"]
    for column in ("batch", "status", *columns):
        table.add_column(column, justify="left" if column == "status" else "right")
    for trial in trials:
        cells = [""] * len(columns)
        if trial.fits:
            sizes = [trial.peak_bytes, *([trial.allocated_bytes, trial.reserved_bytes] if on_card else [])]
            cells = [f"{(size or 0) / GB:.3f}" for size in sizes]
            speed = (f"{min(trial.step_s):.2f}", f"{trial.samples_a_minute:,.0f}")
            cells += [f"{trial.losses[-1]:.4f}", *speed]
        table.add_row(str(trial.batch_size), trial.status, *cells)
    return table


def flags_of(train: Config) -> str:
    """What train_lean.py has to be given besides the batch size, to do what was tried."""
    defaults = to_flat(Config())
    told = {name: value for name, value in to_flat(train).items() if value != defaults[name]}

    def word(name: str, value: Any) -> str:
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            return f" --{flag}" if value else f" --no-{flag}"
        values = value if isinstance(value, list) else [value]
        return f" --{flag} {' '.join(shlex.quote(str(each)) for each in values)}"

    return "".join(word(name, value) for name, value in told.items() if name not in CHOSEN)


def as_json(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    return [asdict(trial) for trial in trials]
