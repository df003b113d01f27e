"""How long a step takes with few rows at once, beside all at once: said before the first.

A pass takes a fixed time and one for each row, in a line (docs/measurements.md, "How a step's seconds grow").
Two small passes show both. Left out: what is the same whatever the plan, such as rewards and the update.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from loguru import logger

from grpo.memory import AdaptiveMemory, Budget
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.load import Policy, RolloutModel
from grpo.plan.workload import Workload
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.rehearsal import Rehearsal
from grpo.scoring.micro_batches import micro_batch_logprobs, micro_batches

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


def say_how_slow(
    work: Workload,
    memory: AdaptiveMemory,
    policy: Policy,
    sampler: RolloutModel,
    rehearsal: Rehearsal,
    budget: Budget,
) -> None:
    """One line, where doing rows in parts makes a step longer. Nothing of sharded models."""
    rows = {phase: plan.rows for phase, plan in memory.plan.items() if phase != "update"}
    group_size, all_rows = work.config.group_size, work.rows_here
    fewest = min(rows.values())
    if work.config.shard or group_size == 1 or fewest >= all_rows:
        return
    if work.target.on_cpu and work.target.is_lower and fewest < group_size:
        logger.warning(
            "only {} rows fit at once, and in bf16 each shape has its kernels compiled: steps will take many "
            "times as long as with more memory; --precision fp32 is faster here", fewest,
        )  # fmt: skip
        return
    at_once = min(2 * fewest, group_size)  # of half the length: no more than is planned for
    paces = {
        "sample": _sampling_pace(work, policy, sampler, rehearsal, at_once),
        "score": _pass_pace(work, policy, rehearsal, at_once, learns=False),
        "learn": _pass_pace(work, policy, rehearsal, at_once, learns=True),
    }
    seconds, least = (
        sum(paces[phase].seconds(all_rows, at) for phase, at in plan.items())
        for plan in (rows, dict.fromkeys(rows, all_rows))
    )
    if seconds > WORTH_SAYING * least:
        logger.info(
            "{} of {} rows at once ({}): about {:.3g} samples/s, and {:.1f} times as long a step as with all",
            ", ".join(f"{phase} {count}" for phase, count in rows.items() if count < all_rows), all_rows,
            budget, all_rows / seconds, seconds / least,
        )  # fmt: skip


def _sampling_pace(
    work: Workload, policy: Policy, sampler: RolloutModel, rehearsal: Rehearsal, many: int
) -> Pace:
    config = work.config
    tokens = min(TOKENS, config.sampling.max_new_tokens)
    uniforms = step_uniforms(many, tokens, seed=config.seed, step=0)
    settings = replace(config.sampling, max_new_tokens=tokens)

    def sample(rows: int) -> None:
        rollout(sampler.model, policy.tokenizer, rehearsal.prompts[:1], uniforms[:rows], settings, rows=rows)

    few = pace(sample, 1, many)
    steps = float(rehearsal.answers.lengths.double().mean()) / tokens
    return Pace(steps * few.pass_s, steps * few.row_s)


def _pass_pace(work: Workload, policy: Policy, rehearsal: Rehearsal, many: int, *, learns: bool) -> Pace:
    """Of scoring or learning a group, of half the length: a token costs what it does in longer texts."""
    group = rehearsal.step(work.config.group_size, work.config.group_size, share=0.5)

    def run(rows: int) -> None:
        with torch.set_grad_enabled(learns):
            logp, _ = micro_batch_logprobs(
                policy.model, next(iter(micro_batches(group, rows))),
                temperature=work.config.sampling.temperature, dtype=work.target.dtype, entropy=learns,
                checkpointing=choose_checkpointing(work.config.gradient_checkpointing) if learns else "none",
            )  # fmt: skip
            if learns:
                logp.sum().backward()  # type: ignore[no-untyped-call]
        policy.model.zero_grad(set_to_none=True)

    half = pace(run, 1, many)
    return Pace(half.pass_s, 2 * half.row_s)


def _seconds(work: Callable[[int], object], rows: int) -> float:
    start = time.perf_counter()
    work(rows)
    if accelerator := torch.accelerator.current_accelerator():
        torch.accelerator.synchronize(accelerator)
    return time.perf_counter() - start
