"""Finding the largest batch, from a person's settings to what was found: checks, trials, the line.

The checks come first and are quick: a missing corpus or a model that does not build shows before any
trial. What is made of the trials is in `findings.py`.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from loguru import logger
from rich.table import Table

from grpo.config import Config, SettingsError, to_flat
from grpo.config.groups import LoraSettings, SamplingSettings
from grpo.config.sizes import parse_size
from grpo.memory.budget import readable
from grpo.model.load import load_tokenizer
from grpo.plan.workload import longest_prompt
from grpo.run.loading import load_source
from grpo.workbench.corpus import open_corpus
from grpo.workbench.machine import Machine, look
from grpo.workbench.maximum.findings import Findings
from grpo.workbench.maximum.law import unseen_margin
from grpo.workbench.maximum.search import (
    INCREMENT,
    MAX_TRIALS,
    TrialResult,
    classic_sizes,
    correction,
    predicted_sizes,
    run_search,
    try_size,
)
from grpo.workbench.maximum.settings import FindSettings
from grpo.workbench.maximum.trial import TRIAL_STEPS, TrialTask
from grpo.workbench.models import num_parameters
from grpo.workbench.performance.measure import matmul_rate
from grpo.workbench.predict import StepMemory, StepSettings, bytes_at_start, step_settings

START_UP_S = 10.0
"""Of a trial's process: libraries, model, a first small step."""
SHARE_OF_RATE = 0.3
"""Of a large matrix product's rate, what a training step reaches; for the estimate of time only."""


@dataclass(frozen=True)
class Checked:
    """What the checks found. Bytes; a trial may use `total_bytes`: what is free, or the limit."""

    machine: Machine
    step: StepSettings
    num_parameters: int
    total_bytes: int
    table: Table

    limit_bytes: int | None
    """What a trial may hold, enforced. On a host it is what is free, lest the system ends something."""
    no_command: str | None = None
    """Why there is no command of train_lean.py for what is tried."""

    @property
    def device_type(self) -> str:
        return torch.device(self.machine.device).type


def check(settings: FindSettings) -> Checked:
    """Device, memory, neighbours, lengths, model, corpus: in this order, each a line of a table.

    ValueError for what a user can mend.
    """
    table = Table("check", "found", title="Before the first trial", title_justify="left")
    limit = parse_size(settings.memory_limit) if settings.memory_limit is not None else None
    machine = look(settings.device, settings.precision, limit)
    usable, total = readable(machine.usable_bytes), readable(machine.total_bytes)
    table.add_row("device", f"{machine.device_name}, {machine.precision}")
    table.add_row("memory", f"{usable} to use, of {total}")
    table.add_row("held by others", machine.others)

    step = step_settings(
        settings.model, machine.compute_dtype, torch.device(machine.device).type,
        objective=settings.objective, prompt_tokens=settings.prompt_tokens,
        max_new_tokens=settings.max_new_tokens, group_size=settings.group_size, kl=settings.kl,
        checkpointing=settings.gradient_checkpointing, lora=LoraSettings(settings.lora_rank),
    )  # fmt: skip
    count = num_parameters(step.model)
    table.add_row("model", f"{settings.model.name}: {count:,} parameters")
    if settings.objective == "lm":
        corpus = open_corpus(settings.data, settings.model)
        table.add_row("data", f"{settings.data}: {len(corpus.ids):,} tokens, windows of {step.new_tokens}")
    if limit is None and step.device_type == "cpu":
        limit = machine.usable_bytes
    return Checked(machine, step, count, machine.usable_bytes, table, limit, why_no_command(settings))


def find(settings: FindSettings, checked: Checked) -> list[TrialResult]:
    """All trials, the search done."""
    memory = StepMemory(checked.step, overhead_bytes=bytes_at_start(checked.device_type))
    limits = {"multiple": settings.multiple, "at_most": settings.max_batch_size}
    _say_how_long(settings, checked, memory)
    if settings.strategy == "classic":
        search = classic_sizes(settings.start, **limits)
    else:
        search = predicted_sizes(memory, checked.machine.usable_bytes, start=settings.start, **limits)

    def attempt(batch_size: int, before: Sequence[TrialResult]) -> TrialResult:
        factor, offset = correction(memory, before)
        predicted = factor * memory.largest_phase(batch_size)[1].peak_bytes + offset
        return try_size(_task(settings, checked, batch_size, predicted))

    return run_search(search, attempt)


def _task(settings: FindSettings, checked: Checked, batch_size: int, predicted_bytes: float) -> TrialTask:
    return TrialTask(
        settings.objective, asdict(settings.model), batch_size, checked.machine.device,
        checked.machine.precision, settings.prompt_tokens, checked.step.new_tokens, settings.group_size,
        settings.kl, checked.step.checkpointing, settings.data, checked.limit_bytes, predicted_bytes,
        lora_rank=settings.lora_rank,
    )  # fmt: skip


def _say_how_long(settings: FindSettings, checked: Checked, memory: StepMemory) -> None:
    """About how long it will take, from a matrix product's rate here; a card's steps are short beside."""
    largest = memory.largest_batch(checked.machine.usable_bytes, at_most=settings.max_batch_size)
    trials = MAX_TRIALS
    if settings.strategy == "classic":
        trials = max(2, abs(largest - settings.start) // INCREMENT + 2)
    step_s = 0.0
    if checked.device_type == "cpu":
        passes = 10 if settings.objective == "grpo" else 6  # 2 forward, 4 backward; 2 to sample, 2 to score
        tokens = checked.step.new_tokens + (settings.prompt_tokens if settings.objective == "grpo" else 0)
        rate = SHARE_OF_RATE * matmul_rate(torch.device("cpu"), checked.machine.compute_dtype)
        step_s = passes * checked.num_parameters * tokens * largest / rate
    seconds = trials * (START_UP_S + (TRIAL_STEPS + 1) * step_s)
    logger.info(
        "at most {} trials of {} steps, up to about {} rows: some {:.0f} s in all",
        trials, TRIAL_STEPS, largest, seconds,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- findings


def findings(settings: FindSettings, checked: Checked, results: Sequence[TrialResult]) -> Findings:
    """What follows from trials. ValueError where no size fitted."""
    on_host = checked.device_type == "cpu"
    peaks = {r.batch_size: (r.peak_bytes if on_host else r.allocated_bytes) or 0 for r in results if r.fits}
    broken = next((result for result in results if result.status == "failed"), None)
    if broken is not None:
        raise ValueError(f"batch {broken.batch_size} failed, and not for want of memory: {broken.message}")
    if not peaks:
        phase, needed = StepMemory(checked.step).largest_phase(settings.multiple)
        parts = ", ".join(f"{name} {readable(size)}" for name, size in needed.items() if size)
        raise ValueError(
            f"not even a batch of {min(result.batch_size for result in results)} fits in "
            f"{readable(checked.machine.usable_bytes)}: {phase} of {settings.multiple} rows needs {parts}, "
            "and the process itself; give a smaller model, shorter texts, --gradient-checkpointing full, or "
            "more memory."
        )
    total = float(checked.total_bytes)
    return Findings(
        peaks, [r.batch_size for r in results if not r.fits], total,
        unseen_margin(total, checked.device_type), settings.multiple,
        settings.max_batch_size, flags=train_lean_flags(settings), no_command=checked.no_command,
    )  # fmt: skip


def train_lean_flags(settings: FindSettings) -> str:
    """What train_lean.py has to be given besides the batch size, to do what was tried."""
    defaults = to_flat(Config())
    twins = {
        "model": settings.model.name, "group_size": settings.group_size,
        "max_new_tokens": settings.max_new_tokens, "kl_coef": defaults["kl_coef"] if settings.kl else 0,
        "lora_rank": settings.lora_rank, "gradient_checkpointing": settings.gradient_checkpointing,
        "device": settings.device, "precision": settings.precision, "memory_limit": settings.memory_limit,
    }  # fmt: skip
    return "".join(
        f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in twins.items()
        if value != defaults[name]
    )


def why_no_command(settings: FindSettings) -> str | None:
    """Why no command of train_lean.py does what is tried, with the remedy; None where one does."""
    if settings.objective == "lm":
        return "it trains with GRPO alone, and this is language modelling"
    if settings.model.arch is not None:
        return "it trains no model made by --arch; give a hub id or a folder as --model"
    try:
        sampling = SamplingSettings(max_new_tokens=settings.max_new_tokens)
        config = Config(model=settings.model.name, sampling=sampling)
        longest = longest_prompt(load_source(config), load_tokenizer(config.model), config)
    except ValueError as error:
        return str(error)
    if longest > settings.prompt_tokens:
        return (
            f"its bundled prompts have up to {longest} tokens, and this is --prompt-tokens "
            f"{settings.prompt_tokens}; give --prompt-tokens {longest}"
        )
    return None


def findings_elsewhere(settings: FindSettings) -> Findings:
    """The same from peaks that a person gives. ValueError for what cannot be read."""
    peaks: dict[int, float] = {}
    failed: list[int] = []
    for item in settings.measured:
        size, _, peak = item.partition("=")
        if not (size.isdecimal() and int(size) and peak):
            raise SettingsError(f"measured has {item!r}: write BATCH=PEAK, such as 64=14.8GB or 208=oom.")
        if peak == "oom":
            failed.append(int(size))
        else:
            peaks[int(size)] = parse_size(peak)
    if len(peaks) < 2:
        raise SettingsError(f"measured has {len(peaks)} sizes that fitted: a line takes two.")
    total = float(parse_size(settings.device_memory or ""))
    margin = unseen_margin(total, "cuda")
    return Findings(
        peaks, failed, total, margin, settings.multiple,
        no_command="the peaks were measured elsewhere; give it the settings that they were measured with",
    )  # fmt: skip
