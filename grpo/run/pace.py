"""How long a step takes with few rows at once, beside all at once: said before the first.

A pass takes a fixed time and one for each row, in a line (docs/measurements.md, "How a step's seconds grow"):
two small passes show what all rows at once would take. What the plan takes instead is seen from one pass of
each phase as it is planned, with the heap as bounded as it will be, and kernels not compiled yet for its
shape. Left out: what is the same whatever the plan, such as rewards and the update.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from loguru import logger

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


@dataclass(frozen=True)
class Pace:
    """Seconds of a phase: of each pass, and of each row in it."""

    pass_s: float
    row_s: float

    def seconds(self, rows: int, at_once: int) -> float:
        return math.ceil(rows / at_once) * self.pass_s + rows * self.row_s


def pace(work: Callable[[int], object], few: int, many: int) -> Pace:
    """Of a phase whose `work` takes rows; each is done twice, as the first time is spent on other things."""
    seconds = [min(_seconds(work, rows) for _ in range(2)) for rows in (few, many)]
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
        """Whether there is anything to say. Not of sharded models, of which nobody may do a pass alone."""
        return not self.work.config.shard and min(self.rows.values()) < self.work.rows_here

    def all_at_once(self) -> float:
        """Seconds of a step, were there room for all its rows; from passes that need less than planned."""
        many = max(2, min(2 * min(self.rows.values()), self.work.config.group_size))
        all_rows = self.work.rows_here
        total = self._lengths * pace(self._sample, 1, many).seconds(all_rows, all_rows)
        for phase in ("score", "learn"):
            if phase in self.rows:  # half the length: a token costs what it does in longer texts
                half = pace(self._passes(phase, (1, many), 0.5), 1, many)
                total += Pace(half.pass_s, 2 * half.row_s).seconds(all_rows, all_rows)
        return total

    def as_planned(self) -> float:
        """Seconds of a step by the plan: one pass of each phase, as often as it is needed."""
        total, all_rows = 0.0, self.work.rows_here
        for phase, rows in self.rows.items():
            passes = math.ceil(all_rows / rows)
            if phase == "sample":
                total += passes * self._lengths * _seconds(self._sample, min(rows, all_rows))
            else:
                total += passes * _seconds(self._passes(phase, (rows,), 1.0), rows)
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
        """Tokens of a completion, in those that a pass samples here."""
        tokens = min(TOKENS, self.work.config.sampling.max_new_tokens)
        return float(self.rehearsal.answers.lengths.double().mean()) / tokens

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

    def _passes(self, phase: str, sizes: Sequence[int], share: float) -> Callable[[int], None]:
        """A pass of each of these sizes, ready made: rows of middling length, or a share of it."""
        config = self.work.config
        step = self.rehearsal.step(self.work.rows_here, config.group_size, share=share)
        every = {rows: list(micro_batches(step, rows)) for rows in sizes}
        return lambda rows: self._pass(phase, every[rows][len(every[rows]) // 2])

    def _pass(self, phase: str, part: MicroBatch) -> None:
        config, learns = self.work.config, phase == "learn"
        checkpointing = choose_checkpointing(config.gradient_checkpointing) if learns else "none"
        with torch.set_grad_enabled(learns):
            logp, _ = micro_batch_logprobs(
                self.policy.model, part, dtype=self.work.target.dtype, entropy=learns,
                temperature=config.sampling.temperature, checkpointing=checkpointing,
            )  # fmt: skip
            if learns:
                logp.sum().backward()  # type: ignore[no-untyped-call]
        self.policy.model.zero_grad(set_to_none=True)


def _seconds(work: Callable[[int], object], rows: int) -> float:
    start = time.perf_counter()
    work(rows)
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        torch.accelerator.synchronize(accelerator)
    return time.perf_counter() - start
