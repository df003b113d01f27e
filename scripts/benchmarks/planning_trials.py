"""The planner at work: the rows it chooses against trying every size, and the time it takes of a step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from loguru import logger
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from benchmarks.memory_trials import gpt2_config
from benchmarks.out_of_memory import replaced
from benchmarks.real_phases import CPU, RealPhases, Setting, allocator_peak
from grpo.config import Config
from grpo.memory import AdaptiveMemory, Budget, DoesNotFit, MemoryMonitor, Shape
from grpo.memory.phase import OUTSIDE
from grpo.memory.process import NO_SLACK
from grpo.model.load import load_config
from grpo.plan import build
from grpo.plan.build import make_memory
from grpo.plan.trace import split_name
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

MAX_TRIALS = 3
"""Real steps that calibration may take, those that run out of memory among them."""
MANY_GROUPS = 20
"""From here on at least LEAST_SHARE of the largest batch must be found."""
LEAST_SHARE = 0.95


# ------------------------------------------------------------------------------- the largest batch


@dataclass(frozen=True)
class LargestTrial:
    """One phase under one budget. Groups at once, bytes beyond what exists between phases."""

    setting: str
    phase: str
    room_bytes: int
    true_groups: int
    true_bytes: int
    uncalibrated_groups: float
    calibrated_groups: float
    margin_bytes: float
    """The error that the calibrated planner allowed for, at the true maximum."""
    trials: int
    out_of_memory: int

    @property
    def is_close(self) -> bool:
        """Whether the bar is met: nearly all of many groups, or one less than the few within the margin."""
        if self.true_groups >= MANY_GROUPS:
            return self.calibrated_groups >= LEAST_SHARE * self.true_groups
        within = self.true_bytes + self.margin_bytes > self.room_bytes
        return self.calibrated_groups >= self.true_groups - (1 if within else 0)


@dataclass(frozen=True)
class Case:
    """Rows of one shape, in 1 to `groups` groups at once."""

    setting: Setting
    phases: Sequence[str]
    prompt_tokens: int
    new_tokens: int
    groups: int
    budgets: int


def cases(quick: bool = False) -> Iterator[Case]:
    tiny = load_config("rook-tiny")
    if quick:
        yield Case(Setting("rook-tiny", tiny, group_size=4), ("score",), 24, 48, groups=5, budgets=2)
        return
    small = gpt2_config(n_layer=3, n_embd=96, n_head=4, vocab_size=200, n_positions=256)
    llama = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    every = ("sample", "score", "learn")
    bf16 = Setting("3 x 96 bf16, checkpointing", small, torch.bfloat16, checkpointing="full", group_size=4)
    yield Case(Setting("3 x 96 fp32", small, group_size=4), every, 24, 16, 30, 12)
    yield Case(bf16, ("sample", "learn"), 48, 24, 30, 12)
    yield Case(Setting("Llama 3 x 128 fp32", llama, group_size=4), every, 40, 12, 30, 12)
    yield Case(Setting("rook-tiny fp32", tiny, group_size=4), ("learn",), 24, 16, 30, 12)


def largest_trials(every: Iterator[Case]) -> Iterator[LargestTrial]:
    """The planner's rows under budgets between the true peaks of all sizes."""
    for case in every:
        real = RealPhases(case.setting)
        for phase in case.phases:
            logger.info("{} {}: all sizes up to {} groups", case.setting.name, phase, case.groups)
            peaks = _true_peaks(case, phase, real)
            for place in np.linspace(2, case.groups - 1, case.budgets):
                groups, share = int(place), (0.02, 0.5, 0.98)[int(place) % 3]
                room = peaks[groups - 1] + share * (peaks[groups] - peaks[groups - 1])
                yield _planned(case, phase, real, int(room), peaks)


def _true_peaks(case: Case, phase: str, real: RealPhases) -> list[int]:
    """Bytes added by 1, 2, … groups at once, in a batch of more than that."""
    name = split_name(phase)
    return [allocator_peak(real.prepare(name, _shape(case, groups))) for groups in range(1, case.groups + 1)]


def _shape(case: Case, groups: int) -> Shape:
    return Shape(groups * case.setting.group_size, case.prompt_tokens, case.new_tokens)


def _planned(case: Case, phase: str, real: RealPhases, room: int, peaks: Sequence[int]) -> LargestTrial:
    """Plan, take the trial steps, plan again. What does not fit by the true peaks runs out of memory."""
    group_size, attempts, failures = case.setting.group_size, 0, 0

    def work(rows: int) -> object:
        nonlocal attempts, failures
        attempts += 1
        if rows >= group_size and peaks[rows // group_size - 1] > room:
            failures += 1
            raise torch.OutOfMemoryError("more than the budget of this trial")
        name = split_name(phase)
        return real.prepare(name, Shape(rows, case.prompt_tokens, case.new_tokens))()

    def plan() -> int:
        try:
            return memory.replan(case.prompt_tokens, case.new_tokens)[phase].rows
        except DoesNotFit:
            return 0

    memory = _memory(case, phase, room)
    calibrated = uncalibrated = plan()
    while calibrated and attempts < MAX_TRIALS:
        memory.run(
            phase, work, shapes=lambda rows, _: [Shape(rows, case.prompt_tokens, case.new_tokens)],
            undo=lambda: real.model.zero_grad(set_to_none=True),
        )  # fmt: skip
        calibrated = plan()
    true_groups = sum(peak <= room for peak in peaks)
    return LargestTrial(
        case.setting.name, phase, room, true_groups, peaks[true_groups - 1], uncalibrated / group_size,
        calibrated / group_size, memory.footprint(phase, _shape(case, true_groups)).error_bytes,
        attempts, failures,
    )  # fmt: skip


def _memory(case: Case, phase: str, room: int) -> AdaptiveMemory:
    """A planner of this phase only, whose budget leaves `room` beside all that exists anyway."""
    # A batch of so many groups that dividing it into equal passes never costs one.
    work = case.setting.workload(_shape(case, 10_000))

    def budget() -> Budget:
        parts = memory.footprint(phase, _shape(case, 1)).parts
        return Budget(int(resident + parts[OUTSIDE]) + room, "this trial's")

    with replaced(build, usual_slack=lambda work, phase: NO_SLACK):  # tensors are counted, not malloc's gaps
        memory = make_memory(work, MemoryMonitor(CPU), budget, overhead_bytes=0)
    memory.process.learn_slack = lambda: None  # type: ignore[method-assign]
    memory.phases = {phase: replace(memory.phases[phase], parts=lambda _: {})}
    memory.process.phases = memory.phases
    parts = memory.footprint(phase, _shape(case, 1)).parts
    resident = sum(size for name, size in parts.items() if name not in (OUTSIDE, "activations"))
    return memory


def largest_table(trials: Sequence[LargestTrial]) -> Table:
    table = Table(
        "setting", "phase", "room, MB", "true", "uncalibrated", "calibrated", "margin, MB", "trials",
        "out of memory", "", box=box.MARKDOWN, title="Groups at once", title_justify="left",
    )  # fmt: skip
    for trial in trials:
        table.add_row(
            trial.setting, trial.phase, f"{trial.room_bytes / 1e6:.2f}", str(trial.true_groups),
            f"{trial.uncalibrated_groups:g}", f"{trial.calibrated_groups:g}",
            f"{trial.margin_bytes / 1e6:.2f}", str(trial.trials), str(trial.out_of_memory),
            "" if trial.is_close else "MISSED",
        )  # fmt: skip
    return table


def largest_verdicts(trials: Sequence[LargestTrial]) -> dict[str, bool]:
    many = [trial for trial in trials if trial.true_groups >= MANY_GROUPS]
    few = [trial for trial in trials if trial.true_groups < MANY_GROUPS]
    return {
        "never unsafe before calibration": all(t.uncalibrated_groups <= t.true_groups for t in trials),
        "never unsafe after calibration": all(t.calibrated_groups <= t.true_groups for t in trials),
        f"{LEAST_SHARE:.0%} of {MANY_GROUPS} groups and more ({len(many)} cells)": all(
            trial.is_close for trial in many
        ),
        f"fewer groups: all, or one less within the margin ({len(few)} cells)": all(
            trial.is_close for trial in few
        ),
        f"at most {MAX_TRIALS} trial steps": all(trial.trials <= MAX_TRIALS for trial in trials),
    }


# ------------------------------------------------------------------------------------- its own cost


class _Timed:
    """Another object, whose methods' time is added up; what they call back is not theirs."""

    def __init__(self, wrapped: Any, names: Sequence[str], seconds: dict[str, float]) -> None:
        self._wrapped, self._names, self._seconds = wrapped, names, seconds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        return self._timed(name, value) if name in self._names else value

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

        return call


class _TimedMemory(_Timed):
    """An `AdaptiveMemory`: `run` and `watch` without the work inside them."""

    def run(self, phase: str, work: Callable[[int], Any], **options: Any) -> Any:
        def inner(rows: int) -> Any:
            start = time.perf_counter()
            try:
                return work(rows)
            finally:
                self._seconds["run"] = self._seconds.get("run", 0.0) - (time.perf_counter() - start)

        return self._timed("run", self._wrapped.run)(phase, inner, **options)

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._wrapped.watch(phase):
            inside = time.perf_counter()
            yield
            inside = time.perf_counter() - inside
        spent = time.perf_counter() - start - inside
        self._seconds["watch"] = self._seconds.get("watch", 0.0) + spent


@dataclass(frozen=True)
class OverheadStep:
    """Seconds of one training step, and of what watches and plans its memory, by method."""

    step: int
    step_s: float
    parts_s: dict[str, float]

    @property
    def share(self) -> float:
        return sum(self.parts_s.values()) / self.step_s


def overhead_steps(config: Config, console: Console, *, skip: int) -> list[OverheadStep]:
    """Train, and time every step after the first `skip`, in which memory is measured exactly."""
    seconds: dict[str, float] = {}
    steps: list[OverheadStep] = []
    with open_run(config) as run:
        run.memory = _TimedMemory(run.memory, ("take_records",), seconds)  # type: ignore[assignment]
        run.monitor = _Timed(run.monitor, ("read", "reset_peak"), seconds)  # type: ignore[assignment]
        trainer = Trainer(run, console)
        trainer.phases.plan = _Timed(trainer.phases, ("plan",), seconds).plan  # type: ignore[method-assign]
        log, start = trainer.log, time.perf_counter()

        def logged(step: int, *rest: Any) -> dict[str, float]:
            nonlocal start
            journal = trainer.journal
            if not isinstance(journal.tracker, _Timed):
                journal.tracker = _Timed(journal.tracker, ("log_memory",), seconds)  # type: ignore[assignment]
            metrics = log(step, *rest)
            now = time.perf_counter()
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
    return {f"monitor and planner take {share:.3%} of {len(steps)} steps (bar {bar:.0%})": share <= bar}
