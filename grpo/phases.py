"""Sampling, scoring, learning, evaluating and saving of one run, as its memory plan says."""

from collections.abc import Sequence
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import LossSettings, SamplingSettings
from grpo.data.tokens import tokenize
from grpo.distributed import largest_share
from grpo.distributed.share import Share
from grpo.evaluate import Evaluation, interleave, score_heldout
from grpo.evaluate.scores import Column
from grpo.learning.objectives import GRPOBatch, Sums, accumulate_grpo
from grpo.memory import DoesNotFit, Size, survive
from grpo.memory.recovery import release_cache
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.rollout.decoder import has_static_cache
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.setup import Run
from grpo.run.training_state import take_snapshot
from grpo.scoring.micro_batches import largest_pass, score
from grpo.types import Prompt, Rollout

EVAL_ROWS = 256
"""Held-out prompts answered at once, at most."""


class PlannedPhases:
    """Each is a transaction: when memory runs out it is done again, with fewer rows, to the same end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._longest_prompt = run.longest_prompt

    def _batch(self, rows: int, prompt_ids: Sequence[Sequence[int]] = ()) -> Size:
        """With texts as long as there may be: rows are planned for them, and so stay what they are."""
        self._longest_prompt = max([self._longest_prompt, *map(len, prompt_ids)])
        return Size(rows, self._run.config.max_new_tokens, self._longest_prompt)

    def sample(self, step: int, prompts: list[Prompt], share: Share, *, draw: int) -> Rollout:
        """`group_size` completions of each of the step's prompts that this process has a share in.

        draw: see `step_uniforms`.
        """
        config = self._run.config
        uniforms = step_uniforms(
            len(prompts) * config.group_size, config.max_new_tokens,
            seed=config.seed, step=step, draw=draw,
        )  # fmt: skip
        sampled = self._rollout(share.prompts(prompts) + prompts[: share.idle], share.rows(uniforms))
        return sampled.groups(range(len(share.groups)))

    def _rollout(self, prompts: list[Prompt], uniforms: Tensor) -> Rollout:
        config, run = self._run.config, self._run
        num_rows, longest = uniforms.shape
        prompt_ids = tokenize(prompts, run.policy.tokenizer)
        kv_growth: list[tuple[int, int]] = []

        def work(rows: int) -> Rollout:
            kv_growth.clear()
            return rollout(
                run.sampler.model, run.policy.tokenizer, prompts, uniforms, config,
                rows=rows, kept=run.kept, stay_gathered=run.stays_gathered,
                watch_cache=lambda *seen: kv_growth.append(seen),
            )  # fmt: skip

        def took(rows: int, made: Rollout) -> Size:
            tokens = longest if has_static_cache(run.policy.model.config) else int(made.lengths.max())
            return Size(min(rows, num_rows), tokens, max(map(len, made.prompt_ids)))

        made = run.fit.run(
            "sample", work, self._batch(num_rows, prompt_ids), took=took, kv_growth=kv_growth,
            discard=self._release, reused=lambda: run.kept.nbytes if run.kept else 0,
        )  # fmt: skip
        self._keep_what_has_room()
        return made

    def _release(self) -> None:
        if self._run.kept is not None:
            self._run.kept.release()

    def _keep_what_has_room(self) -> None:
        """Of what decoding has recorded, for the next rollout, unless another phase needs the room."""
        run = self._run
        if run.kept is None:
            return
        others = [
            run.fit.needs(phase, self._batch(rows))
            for phase, rows in run.fit.planned().items()
            if phase in ("score", "learn")
        ]
        if run.fit.room_bytes() < max(others, default=0.0):
            run.kept.release()

    def logprobs(self, model: PreTrainedModel, sampled: Rollout) -> Tensor:
        """Log-probs (N, C) of a rollout's tokens under the policy or the reference, without gradients."""
        config, run, pass_tokens = self._run.config, self._run, self._pass_tokens()
        if not sampled.prompts:
            return torch.zeros(sampled.completion_ids.shape)
        return run.fit.run(
            "score",
            lambda rows: score(
                model, sampled, rows=rows, pass_tokens=pass_tokens,
                temperature=config.temperature, dtype=run.policy.target.dtype,
            ),
            self._batch(len(sampled.completion_ids), sampled.prompt_ids),
            took=lambda rows, _: largest_pass(sampled, rows, pass_tokens=pass_tokens),
            discard=self._release,
        )  # fmt: skip

    def _pass_tokens(self) -> int | None:
        """See `micro_batches`; the processes of a sharded model make the same passes."""
        return None if self._run.config.shard else self._run.policy.target.pass_tokens

    def accumulate(self, batch: GRPOBatch, settings: LossSettings) -> Sums:
        """Add a step's gradients to the policy's; what `finish_grpo` makes metrics of."""
        config, run = self._run.config, self._run
        if not batch.rollout.prompts:
            return {}
        checkpointing = choose_checkpointing(config.gradient_checkpointing)
        pass_tokens = self._pass_tokens()

        def work(rows: int) -> Sums:
            return accumulate_grpo(
                run.policy.model, batch, settings=settings, temperature=config.temperature,
                dtype=run.policy.target.dtype, rows=rows, pass_tokens=pass_tokens,
                importance_cap=config.importance_cap, checkpointing=checkpointing,
            )  # fmt: skip

        def discard() -> None:
            run.optimizer.zero_grad(set_to_none=True)
            self._release()

        return run.fit.run(
            "learn", work, self._batch(len(batch.mask), batch.rollout.prompt_ids),
            took=lambda rows, _: largest_pass(batch.rollout, rows, pass_tokens=pass_tokens),
            discard=discard,
        )  # fmt: skip

    def evaluate(self, step: int) -> Evaluation:
        """The greedy policy's answers to the held-out prompts; every process answers some of them."""
        config, run = self._run.config, self._run
        own = run.eval_prompts[run.world.rank :: run.world.size]
        idle: list[Prompt] = []
        if config.shard:  # the same passes everywhere
            idle = run.eval_prompts[: largest_share(len(run.eval_prompts), run.world.size) - len(own)]

        def work(rows: int) -> dict[str, Column]:
            return score_heldout(
                run.sampler.model, run.policy.tokenizer, own + idle,
                settings=SamplingSettings.of(config, temperature=0.0), rows=rows,
                seed=config.seed, engine=run.engine, judge=run.rewards,
            )  # fmt: skip

        scores: dict[str, Column] = {}
        if own + idle:
            longest = self._longest_prompt + config.max_new_tokens  # each has a prompt of its own
            rows = min(len(own + idle), config.rollout_rows or EVAL_ROWS)
            scores = run.fit.run("evaluate", work, Size(rows, longest), like="sample", discard=self._release)
            release_cache()  # of rows that are no step's
        mine = {name: torch.from_numpy(column[: len(own)]) for name, column in scores.items()}
        parts = run.world.exchange(f"the evaluation at step {step}", mine)
        everybodys = [{name: column.numpy() for name, column in part.items()} for part in parts]
        return Evaluation.of(run.eval_prompts, interleave(everybodys))

    def save(self, step: int, state: dict[str, Any], *, best: bool) -> bool:
        """A checkpoint of the run, which the first process writes; whether this one has written it."""
        run, snapshot = self._run, None
        if run.is_trial:
            return True  # nothing is wanted
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
