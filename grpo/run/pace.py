"""How long a step takes with few rows at once, beside all at once: said before the first.

A pass takes a fixed time and one for each row, in a line (docs/measurements.md, "How a step's seconds grow"):
two small passes show what all rows at once would take. What the plan takes instead is seen from some passes
of each phase as it is planned, with the heap as bounded as it will be, and kernels not compiled yet for their
shapes. Left out: what is the same whatever the plan, such as rewards and the update.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from loguru import logger
from torch import Tensor

from grpo.memory import AdaptiveMemory, Budget, is_out_of_memory
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.load import Policy, RolloutModel
from grpo.plan.workload import Workload
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.rehearsal import Rehearsal
from grpo.scoring.micro_batches import MicroBatch, micro_batch_logprobs, micro_batches

TOKENS = 16
"""New ones of the passes that show how fast sampling is."""
WORTH_SAYING = 1.1
"""Times as long."""
ENOUGH_S = 0.1
"""So long a small pass is done again and again: its time is multiplied by the rows of a step."""
_LONG_S = 1.0
"""A pass as planned that takes so long is not done twice."""
_GROUPS = 2
"""Of the largest pass that shows how long all rows take at once; what more leave behind tears the heap."""
_LOOKED_AT = 4
"""Passes of a phase, of many, whose mean is that of all."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a phase: of each pass, and of each row in it."""

    pass_s: float
    row_s: float

    def seconds(self, rows: int, at_once: int) -> float:
        return math.ceil(rows / at_once) * self.pass_s + rows * self.row_s


def pace(work: Callable[[int], object], few: int, many: int) -> Pace:
    """Of a phase whose `work` takes rows; the first time is spent on other things, and later ones vary."""
    seconds = [_least_seconds(work, rows) for rows in (few, many)]
    row_s = max(0.0, seconds[1] - seconds[0]) / (many - few)
    return Pace(max(0.0, seconds[0] - few * row_s), row_s)


@dataclass
class StepPace:
    """Of one run's steps. The models take small passes for it, and are left as they were."""

    work: Workload
    memory: AdaptiveMemory
    policy: Policy
    sampler: RolloutModel
    rehearsal: Rehearsal

    @property
    def rows(self) -> dict[str, int]:
        """At once, by phase that has passes."""
        return {phase: plan.rows for phase, plan in self.memory.plan.items() if phase != "update"}

    @property
    def in_parts(self) -> bool:
        """Whether there is anything to say: some rows are few, and not because that was asked for.

        Not of sharded models, of which nobody may do a pass alone.
        """
        planned = (rows for phase, rows in self.rows.items() if self.memory.phases[phase].rows is None)
        return not self.work.config.shard and any(rows < self.work.rows_here for rows in planned)

    def all_at_once(self) -> float:
        """Seconds of a step, were there room for all its rows; from passes that need less than planned."""
        all_rows = self.work.rows_here
        few, many = self._few_and_many(self.rows["sample"])
        total = self._lengths * pace(self._sample, few, many).seconds(all_rows, all_rows)
        for phase in ("score", "learn"):
            if phase in self.rows:  # half the length: a token costs what it does in longer texts
                few, many = self._few_and_many(2 * self.rows[phase])
                half = pace(self._passes(phase, (few, many), 0.5), few, many)
                total += Pace(half.pass_s, 2 * half.row_s).seconds(all_rows, all_rows)
        return total

    def _few_and_many(self, rows: int) -> tuple[int, int]:
        """Two sizes up to so many rows, and no more than some groups: larger ones take as long a row."""
        size = self.work.config.group_size
        many = max(2, min(rows, self.work.rows_here, _GROUPS * size))
        few = many // 2
        return few - few % size if few > size else few, many

    def as_planned(self) -> float:
        """Seconds of a step by the plan: some passes of each phase, as often as they are needed."""
        total, all_rows = 0.0, self.work.rows_here
        target = self.work.target
        compiles = target.on_cpu and target.is_lower  # in each step, as in the first time that this is done
        taken = _seconds if compiles else _second_time
        for phase, rows in self.rows.items():
            passes = math.ceil(all_rows / rows)
            if phase == "sample":
                total += passes * self._lengths * taken(self._sample, min(rows, all_rows))
            else:
                looked_at = max(1, min(_LOOKED_AT, passes // _LOOKED_AT))
                work = self._passes(phase, (rows,), 1.0, looked_at)
                total += passes / looked_at * taken(work, rows)
        return total

    def say(self, budget: Budget, all_at_once: float) -> None:
        """One line, where doing rows in parts makes a step longer."""
        try:
            seconds = self.as_planned()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return  # the plan will see to it
        few = ", ".join(f"{phase} {rows}" for phase, rows in self.rows.items() if rows < self.work.rows_here)
        if seconds > WORTH_SAYING * all_at_once:
            lower = self.work.target.on_cpu and self.work.target.is_lower
            remedy = "; --precision fp32 may be faster here, as kernels are compiled for each shape in bf16"
            logger.info(
                "{} of {} rows at once ({}): about {:.3g} samples/s, and {:.1f} times as long a step as with "
                "all{}",
                few, self.work.rows_here, budget, self.work.rows_here / seconds, seconds / all_at_once,
                remedy if lower and min(self.rows.values()) < self.work.config.group_size else "",
            )  # fmt: skip

    @property
    def _lengths(self) -> float:
        """Tokens that a group goes on for, which are its longest row's, in those that a pass samples here."""
        size = self.work.config.group_size
        lengths = self.rehearsal.step(self.work.rows_here, size).lengths.view(-1, size)
        tokens = min(TOKENS, self.work.config.sampling.max_new_tokens)
        return float(lengths.amax(1).double().mean()) / tokens

    def _sample(self, rows: int) -> None:
        config = self.work.config
        tokens = min(TOKENS, config.sampling.max_new_tokens)
        groups = max(1, rows // config.group_size)
        prompts = [self.rehearsal.prompts[group % len(self.rehearsal.prompts)] for group in range(groups)]
        rollout(
            self.sampler.model, self.policy.tokenizer, prompts,
            step_uniforms(rows, tokens, seed=config.seed, step=0),
            replace(config.sampling, max_new_tokens=tokens), rows=rows,
        )  # fmt: skip

    def _passes(
        self, phase: str, sizes: Sequence[int], share: float, looked_at: int = 1
    ) -> Callable[[int], None]:
        """Passes of each of these sizes, ready made: rows of middling length, or a share of it.

        looked_at: so many, from among all of a step; one is the middle one.
        """
        config = self.work.config
        step = self.rehearsal.step(self.work.rows_here, config.group_size, share=share)
        every = {rows: list(micro_batches(step, rows)) for rows in sizes}

        def work(rows: int) -> None:
            for place in range(looked_at):
                self._pass(phase, every[rows][(2 * place + 1) * len(every[rows]) // (2 * looked_at)])

        return work

    def _pass(self, phase: str, part: MicroBatch) -> None:
        config, learns = self.work.config, phase == "learn"
        checkpointing = choose_checkpointing(config.gradient_checkpointing) if learns else "none"
        with torch.set_grad_enabled(learns):
            logp, _ = micro_batch_logprobs(
                self.policy.model, part, dtype=self.work.target.dtype, entropy=learns,
                temperature=config.sampling.temperature, checkpointing=checkpointing, loss=Tensor.sum,
            )  # fmt: skip
            if learns:
                logp.sum().backward()  # type: ignore[no-untyped-call]
        self.policy.model.zero_grad(set_to_none=True)


def _least_seconds(work: Callable[[int], object], rows: int) -> float:
    taken = [_seconds(work, rows)]
    while len(taken) < 2 or sum(taken) < ENOUGH_S:
        taken.append(_seconds(work, rows))
    return min(taken)


def _second_time(work: Callable[[int], object], rows: int) -> float:
    first = _seconds(work, rows)
    return first if first > _LONG_S else min(first, _seconds(work, rows))


def _seconds(work: Callable[[int], object], rows: int) -> float:
    start = time.perf_counter()
    work(rows)
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        torch.accelerator.synchronize(accelerator)
    return time.perf_counter() - start
