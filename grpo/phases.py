"""Sampling, scoring, learning, evaluating and saving of one run, as its memory plan says."""

from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from grpo.data.tokens import tokenize
from grpo.distributed.share import Share
from grpo.evaluate import Evaluation, interleave, score_heldout
from grpo.evaluate.scores import Column
from grpo.learning.loss import LossSettings
from grpo.learning.objectives import GRPOBatch, Sums, accumulate_grpo
from grpo.memory import DoesNotFit, Shape, survive
from grpo.memory.recovery import release_cache
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.rollout.decoder import has_static_cache
from grpo.rollout.sample import rollout
from grpo.rollout.slots import KeptSlots
from grpo.rollout.tokens import step_uniforms
from grpo.run.setup import Run
from grpo.run.training_state import take_snapshot
from grpo.scoring.micro_batches import micro_batch_shapes, score
from grpo.types import Prompt, Rollout

EVAL_ROWS = 256
"""Held-out prompts answered at once, at most."""


class PlannedPhases:
    """Each is a transaction: when memory runs out it is done again, with fewer rows, to the same end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._longest_prompt = run.longest_prompt
        self._eval_rows = EVAL_ROWS

    def plan(self, prompts: list[Prompt]) -> None:
        """Rows at once in each phase, for prompts this long and completions as long as they may be.

        The processes of a sharded model make the same passes: all plan with the rows of the one that has
        least room.
        """
        run = self._run
        ids = tokenize(prompts, run.policy.tokenizer)
        self._longest_prompt = max(self._longest_prompt, *map(len, ids))
        run.memory.replan(self._longest_prompt, run.config.sampling.max_new_tokens)
        if run.config.shard:
            rows = {phase: plan.rows for phase, plan in run.memory.plan.items()}
            plans = run.world.exchange("the plan", rows)
            run.memory.lower({phase: min(plan[phase] for plan in plans) for phase in rows})

    def sample(self, step: int, prompts: list[Prompt], share: Share, *, draw: int) -> Rollout:
        """`group_size` completions of each of the step's prompts that this process has a share in.

        draw: see `step_uniforms`.
        """
        config = self._run.config
        uniforms = step_uniforms(
            len(prompts) * config.group_size, config.sampling.max_new_tokens,
            seed=config.seed, step=step, draw=draw,
        )  # fmt: skip
        sampled = self._rollout(share.prompts(prompts) + prompts[: share.idle], share.rows(uniforms))
        return sampled.groups(range(len(share.groups)))

    def _rollout(self, prompts: list[Prompt], uniforms: Tensor) -> Rollout:
        config, run = self._run.config, self._run
        num_rows, longest = uniforms.shape
        kv_growth: list[tuple[int, int]] = []
        kept = cast(KeptSlots | None, run.memory.kept) if run.memory.process.left_bytes else None

        def work(rows: int) -> Rollout:
            kv_growth.clear()
            return rollout(
                run.sampler.model, run.policy.tokenizer, prompts, uniforms, config.sampling,
                rows=rows, kept=kept, stay_gathered=run.stays_gathered,
                watch_cache=lambda tokens, size: kv_growth.append((tokens, size.held + size.growing)),
            )  # fmt: skip

        def shapes(rows: int, made: Rollout) -> list[Shape]:
            tokens = longest if has_static_cache(run.policy.model) else int(made.lengths.max())
            return [Shape(min(rows, num_rows), max(map(len, made.prompt_ids)), tokens)]

        return run.memory.run("sample", work, shapes=shapes, kv_growth=kv_growth)

    def logprobs(self, model: PreTrainedModel, sampled: Rollout) -> Tensor:
        """Log-probs (N, C) of a rollout's tokens under the policy or the reference, without gradients."""
        config, run = self._run.config, self._run
        if not sampled.prompts:
            return torch.zeros(sampled.completion_ids.shape)
        return run.memory.run(
            "score",
            lambda rows: score(
                model, sampled, rows=rows, pass_tokens=self._pass_tokens(),
                temperature=config.sampling.temperature, dtype=run.policy.target.dtype,
            ),
            shapes=lambda rows, _: micro_batch_shapes(sampled, rows, pass_tokens=self._pass_tokens()),
        )  # fmt: skip

    def _pass_tokens(self) -> int | None:
        """See `micro_batches`; the processes of a sharded model make the same passes."""
        return None if self._run.config.shard else self._run.policy.target.pass_tokens

    def accumulate(
        self, batch: GRPOBatch, settings: LossSettings, *, noise_share: float | None = None
    ) -> Sums:
        """Add a step's gradients to the policy's; what `finish_grpo` makes metrics of."""
        config, run = self._run.config, self._run
        if not batch.rollout.prompts:
            return {}
        checkpointing = choose_checkpointing(config.gradient_checkpointing)
        halves = noise_share == 1

        @cache
        def spared(rows: int) -> int | None:
            """Gradients of one part are there while the next learns: all at once may take less memory."""
            if rows < config.group_size:  # no part is smaller, and the fits know whole groups
                return None
            parted = micro_batch_shapes(batch.rollout, rows, pass_tokens=self._pass_tokens(), halves=halves)
            return self._pass_tokens() if run.memory.is_planned_for("learn", parted) else None

        def work(rows: int) -> Sums:
            return accumulate_grpo(
                run.policy.model, batch, settings=settings, temperature=config.sampling.temperature,
                dtype=run.policy.target.dtype, rows=rows, pass_tokens=spared(rows),
                importance_cap=config.importance_cap, checkpointing=checkpointing,
                noise_share=noise_share,
            )  # fmt: skip

        return run.memory.run(
            "learn",
            work,
            shapes=lambda rows, _: micro_batch_shapes(
                batch.rollout, rows, pass_tokens=spared(rows), halves=halves
            ),
            undo=lambda: run.optimizer.zero_grad(set_to_none=True),
        )  # fmt: skip

    def evaluate(self, step: int) -> Evaluation:
        """The greedy policy's answers to the held-out prompts; every process answers some of them."""
        config, run = self._run.config, self._run
        own = run.eval_prompts[run.world.rank :: run.world.size]
        rows = config.rollout_rows or self._rows_of_evaluation()
        idle: list[Prompt] = []
        if config.shard:  # the same passes everywhere
            rows = min(run.world.exchange("rows of the evaluation", rows))
            idle = run.eval_prompts[: run.world.largest_share(len(run.eval_prompts)) - len(own)]

        def work(rows: int) -> dict[str, Column]:
            return score_heldout(
                run.sampler.model, run.policy.tokenizer, own + idle,
                settings=replace(config.sampling, temperature=0.0), rows=rows,
                seed=config.seed, engine=run.engine, judge=run.rewards,
            )  # fmt: skip

        scores: dict[str, Column] = {}
        if own + idle:
            scores, self._eval_rows = survive(work, rows, phase="evaluation", replays=not config.shard)
            release_cache()  # of rows that are in no plan
        mine = {name: column[: len(own)] for name, column in scores.items()}
        parts = run.world.exchange(f"the evaluation at step {step}", mine)
        return Evaluation.of(run.eval_prompts, interleave(parts))

    def _rows_of_evaluation(self) -> int:
        """As many as fit in what the phases of a step are expected to need, so that it is not exceeded.

        Each has a prompt of its own, whose tokens cost what new ones do.
        """
        run = self._run
        tokens = self._longest_prompt + run.config.sampling.max_new_tokens
        most = run.memory.expected_bytes
        return run.memory.rows_within(most, "sample", self._eval_rows, 1, tokens) or run.config.group_size

    def save(self, step: int, state: dict[str, Any], *, best: bool) -> bool:
        """A checkpoint of the run, which the first process writes; whether this one has written it."""
        run, snapshot = self._run, None
        if run.config.shard:  # here all take part
            snapshot = take_snapshot(run.policy.model, run.optimizer, keep=run.world.is_main)
        reference = run.reference.tensors() if run.reference and (run.world.is_main or snapshot) else None
        if not run.world.is_main:
            return False
        try:
            written, _ = survive(
                lambda _: run.checkpoints.save(
                    step, run.policy.model, run.policy.tokenizer, run.optimizer, state,
                    reference=reference, best=best, snapshot=snapshot,
                ),
                1, phase="checkpoint",
            )  # fmt: skip
        except DoesNotFit as error:
            logger.warning("no checkpoint of step {}: {}", step, error)
            return False
        return bool(written)
