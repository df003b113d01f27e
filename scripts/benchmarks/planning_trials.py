"""The planner at work: the rows it chooses against trying them out, and the time it takes of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loguru import logger
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig, Qwen2Config

from grpo.config import Config
from grpo.config.groups import LoraSettings
from grpo.memory import largest_rows
from grpo.memory.budget import CONTEXT_BYTES, GB, card_memory
from grpo.memory.rows import even_rows
from grpo.model.load import default_shape
from grpo.model.target import make_target
from grpo.plan.absent import plan_without_weights
from grpo.plan.trace import Card, TracedPhases
from grpo.plan.workload import Workload
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

LEAST_SHARE = 0.9
"""Of the rows that fit."""
LONGEST_PROMPT = 120
QWEN_HALF_B = Qwen2Config(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip

# ------------------------------------------------------------------------------- rows on a card


@dataclass(frozen=True)
class RowsTrial:
    """One phase on a card that is not there. most: rows that fit; even: in as many passes, of like size."""

    model: str
    batch_size: int
    card_gb: int
    phase: str
    planned: int
    most: int
    even: int
    seconds: float
    """That the plan of all phases took."""

    @property
    def share(self) -> float:
        return self.planned / max(1, self.even)


def rows_trials(quick: bool) -> Iterator[RowsTrial]:
    """Two models, batches of 64 and 512, cards of 8 to 80 GB: ten of these, or two."""
    models: dict[str, tuple[PretrainedConfig, LoraSettings]] = {
        "GPT-2 124 M": (default_shape(), LoraSettings()),
        "Qwen's 0.5 B, LoRA": (QWEN_HALF_B, LoraSettings(lora_rank=16)),
    }
    settings = ((64, 8), (512, 8), (512, 16), (512, 24), (512, 80))
    for name, (model, lora) in models.items():
        traced: dict[str, TracedPhases] = {}
        for batch_size, card_gb in settings[:1] if quick else settings:
            yield from _on_card(name, model, lora, batch_size, card_gb, traced)


def _on_card(
    name: str, model: PretrainedConfig, lora: LoraSettings, batch_size: int, card_gb: int,
    traced: dict[str, TracedPhases],
) -> Iterator[RowsTrial]:  # fmt: skip
    """traced: by the kind of checkpointing, for the next card."""
    config = Config(device="cuda", batch_size=batch_size, lora=lora)
    work = Workload(config, make_target(model, torch.device("cuda"), "bf16"), LONGEST_PROMPT)
    card = Card(card_memory(card_gb * GB), utilization=config.memory_utilization)
    card.held_bytes, start = CONTEXT_BYTES, time.perf_counter()
    work, plan = plan_without_weights(work, card)
    seconds = time.perf_counter() - start
    truth = traced.setdefault(work.config.gradient_checkpointing, TracedPhases(work.phase_settings()))
    resident = work.resident(truth.num_parameters, truth.trained_sizes, truth.frozen_bytes)
    room = card.budget().usable_bytes - card.used_bytes() - sum(resident.values())
    for phase, size in plan.sizes.items():

        def fits(rows: int, phase: str = phase) -> bool:
            return truth.added_bytes(phase, work.size(rows)) <= room

        most = largest_rows(fits, batch_size=batch_size, group_size=config.group_size) or 0
        even = even_rows(most, batch_size=batch_size, group_size=config.group_size)
        yield RowsTrial(name, batch_size, card_gb, phase, size.rows, most, even, seconds)
    logger.info("{}, {} rows, {} GB: planned in {:.0f} s", name, batch_size, card_gb, seconds)


def rows_table(trials: Sequence[RowsTrial]) -> Table:
    columns = "model", "rows", "card", "phase", "planned", "fit", "of even size", "seconds"
    table = Table(*columns, title="Rows at once", title_justify="left", box=box.MARKDOWN)
    for each in trials:
        numbers = each.planned, each.most, each.even, round(each.seconds)
        table.add_row(each.model, str(each.batch_size), f"{each.card_gb} GB", each.phase, *map(str, numbers))
    return table


def rows_verdicts(trials: Sequence[RowsTrial]) -> dict[str, bool]:
    least = min((each.share for each in trials), default=0.0)
    return {
        f"{len(trials)} plans, and none is of more rows than fit": all(t.planned <= t.most for t in trials),
        f"at least {least:.0%} of what fits is planned (bar {LEAST_SHARE:.0%})": least >= LEAST_SHARE,
    }


# ------------------------------------------------------------------------------------- its own cost


class _Timed:
    """Another object, the seconds of whose methods are added up, without what they call back."""

    def __init__(self, wrapped: Any, names: Sequence[str], seconds: dict[str, float]) -> None:
        self._wrapped, self._names, self._seconds = wrapped, names, seconds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        if name not in self._names:
            return value

        def call(*args: Any, **options: Any) -> Any:
            with self._clock(name):
                return value(*map(self._uncounted, args), **options)

        return call

    @contextmanager
    def watch(self, *args: Any) -> Iterator[None]:
        """Of `Fit`."""
        with self._clock("watch"), self._wrapped.watch(*args), self._clock("watch", -1):
            yield

    def _uncounted(self, value: Any) -> Any:
        if not callable(value):
            return value

        def inner(*args: Any) -> Any:
            with self._clock("run", -1):
                return value(*args)

        return inner

    @contextmanager
    def _clock(self, name: str, sign: int = 1) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += sign * (time.perf_counter() - start)


@dataclass(frozen=True)
class OverheadStep:
    """Seconds of one training step, and of what measures and plans its memory, by method."""

    step: int
    step_s: float
    parts_s: dict[str, float]


def overhead_steps(config: Config, console: Console, *, skip: int) -> list[OverheadStep]:
    """Train, and time every step after the first `skip`, in which tensors are counted one by one."""
    seconds: dict[str, float] = defaultdict(float)
    steps: list[OverheadStep] = []
    with open_run(config) as run:
        methods = ("run", "take_passes", "needs", "planned", "room_bytes")
        run.fit = _Timed(run.fit, methods, seconds)  # type: ignore[assignment]
        run.device = _Timed(run.device, ("read", "reset_peak", "memory"), seconds)  # type: ignore[assignment]
        run.measured = _Timed(run.measured, ("note",), seconds)  # type: ignore[assignment]
        trainer, start = Trainer(run, console), time.perf_counter()
        trainer.phases._batch = _Timed(trainer.phases, ("_batch",), seconds)._batch  # type: ignore[method-assign]
        log = trainer.log

        def logged(step: int, *rest: Any) -> dict[str, float]:
            nonlocal start
            tracker = trainer.tracker
            if not isinstance(tracker, _Timed):
                trainer.tracker = _Timed(tracker, ("log_memory",), seconds)  # type: ignore[assignment]
            metrics, now = log(step, *rest), time.perf_counter()
            steps.append(OverheadStep(step, now - start, dict(seconds)))
            seconds.clear()
            start = now
            return metrics

        trainer.log = logged  # type: ignore[assignment,method-assign]
        trainer.train(StopRequest())
    return steps[skip:]


def overhead_table(steps: Sequence[OverheadStep]) -> Table:
    table = Table("", "ms a step", "share", box=box.MARKDOWN)
    whole = float(np.mean([step.step_s for step in steps]))
    for name in sorted({name for step in steps for name in step.parts_s}):
        spent = float(np.mean([step.parts_s.get(name, 0.0) for step in steps]))
        table.add_row(name, f"{1e3 * spent:.2f}", f"{spent / whole:.3%}")
    table.add_row("step", f"{1e3 * whole:.2f}", "100%")
    return table


def overhead_verdicts(steps: Sequence[OverheadStep], *, bar: float = 0.01) -> dict[str, bool]:
    share = sum(sum(step.parts_s.values()) for step in steps) / sum(step.step_s for step in steps)
    return {f"measuring and planning take {share:.3%} of {len(steps)} steps (bar {bar:.0%})": share <= bar}
