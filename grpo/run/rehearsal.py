"""A small try of the phases before the plan, which then finds kernels and workspaces there, and knows how
long completions are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.config import Config
from grpo.data import PromptSource
from grpo.data.tokens import tokenize
from grpo.memory import MemoryMonitor, Shape, survive
from grpo.memory.planner import PhasePlan
from grpo.model.load import Policy, RolloutModel
from grpo.rollout.decoder import has_static_cache
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.micro_batches import micro_batch_logprobs, micro_batch_shapes, micro_batches
from grpo.types import Prompt, Rollout
from grpo.waiting import waiting

ROWS = 8
"""Prompts that are answered, once each; one of the answers is learned from."""


@dataclass(frozen=True)
class Rehearsal:
    """What it has shown. grown_bytes: that the process holds more since; prompts: of the first step."""

    answers: Rollout
    prompts: list[Prompt]
    prompt_tokens: list[int]
    grown_bytes: int

    def expected_shapes(
        self, plan: Mapping[str, PhasePlan], config: Config, *, rows_here: int, policy: Policy
    ) -> dict[str, Sequence[Shape]]:
        """Of each phase's parts, were the first step's completions as long as these."""
        step = self.step(rows_here, config.group_size)
        tokens = config.sampling.max_new_tokens
        if not has_static_cache(policy.model):
            tokens = int(step.lengths.max())
        longest = max(map(len, step.prompt_ids))
        pass_tokens = None if config.shard else policy.target.pass_tokens
        shapes: dict[str, Sequence[Shape]] = {
            "sample": [Shape(min(plan["sample"].rows, rows_here), longest, tokens)],
            "update": [Shape(plan["update"].rows, 0, 0)],
        }
        for phase in ("score", "learn"):
            if phase in plan:
                shapes[phase] = micro_batch_shapes(step, plan[phase].rows, pass_tokens=pass_tokens)
        return shapes

    def step(self, rows: int, group_size: int, *, share: float = 1.0) -> Rollout:
        """A whole step, its completions as long as those of prompts of the same task, or a share of it."""
        tasks = [prompt.task for prompt in self.answers.prompts]
        lengths: list[int] = []
        prompt_ids = []
        for group in range(rows // group_size):
            place = group % len(self.prompts)
            prompt_ids.append([0] * self.prompt_tokens[place])
            like = [row for row, task in enumerate(tasks) if task == self.prompts[place].task]
            like = like or list(range(len(tasks)))
            answered = [int(self.answers.lengths[like[row % len(like)]]) for row in range(group_size)]
            lengths += [max(1, int(share * length)) for length in answered]
        width = max(lengths)
        return Rollout(
            prompts=[self.prompts[group % len(self.prompts)] for group in range(rows // group_size)],
            prompt_ids=prompt_ids,
            completion_ids=torch.zeros(rows, width, dtype=torch.long), lengths=torch.tensor(lengths),
            terminated=torch.ones(rows, dtype=torch.bool), sampler_logp=torch.zeros(rows, width),
            completions=[""] * rows,
        )  # fmt: skip


def rehearse(
    config: Config, policy: Policy, sampler: RolloutModel, source: PromptSource, monitor: MemoryMonitor
) -> Rehearsal:
    """Answer some of the first step's prompts, and take one answer's gradient, which is dropped.

    The source stays where it is. DoesNotFit where memory runs out with one row.
    """
    state = source.state()
    prompts = source.draw(ROWS if config.batch_size == "auto" else config.num_prompts)
    source.restore(state)
    uniforms = step_uniforms(ROWS, config.sampling.max_new_tokens, seed=config.seed, step=0)
    some = prompts[:ROWS]
    before = monitor.in_use_bytes()

    def work(rows: int) -> Rollout:
        with waiting("a small try") as done:
            made = rollout(
                sampler.model, policy.tokenizer, some, uniforms[: len(some)], config.sampling, rows=rows,
                watch_rows=done,
            )  # fmt: skip
        batch = next(iter(micro_batches(made, 1)))
        logp, _ = micro_batch_logprobs(
            policy.model, batch, temperature=config.sampling.temperature, dtype=policy.target.dtype,
            loss=Tensor.sum,
        )  # fmt: skip
        logp.sum().backward()  # type: ignore[no-untyped-call]
        return made

    def undo() -> None:
        policy.model.zero_grad(set_to_none=True)

    answers, _ = survive(work, len(some), phase="rehearsal", discard=undo, replays=not config.shard)
    undo()
    ids = tokenize(prompts, policy.tokenizer)
    return Rehearsal(answers, prompts, [*map(len, ids)], monitor.in_use_bytes() - before)
