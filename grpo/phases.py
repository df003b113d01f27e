"""The phases of a step as one process does them: its share of the groups, as many rows at once as fit.

Each is a transaction: where memory runs out it is done again with fewer rows, to the same end. What it
depends on is fixed before it begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import LossSettings, SamplingSettings
from grpo.data.reward_functions import Scores
from grpo.data.tokens import tokenize
from grpo.distributed import largest_share
from grpo.evaluate import Evaluation, interleave
from grpo.evaluate.heldout import Answers, answer_heldout, score_answers
from grpo.evaluate.scores import Column
from grpo.learning.advantages import zero_variance_groups
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import GRPOBatch, Sums, accumulate_grpo, finish_grpo
from grpo.memory import Size
from grpo.memory.recovery import release_cache
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.rollout.decoder import has_static_cache
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.setup import Run
from grpo.scoring.logprobs import score
from grpo.scoring.stream import largest_stream
from grpo.types import Prompt, Rollout

EVAL_ROWS = 256
"""Held-out prompts answered at once, at most."""


class Phases:
    """Of one run. What several processes exchange is exchanged here, after a phase and never within one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.fit.keeps("sample", run.arena)
        run.fit.keeps("evaluate", run.eval_arena)
        self._longest_prompt = run.longest_prompt

    def sample_and_reward(self, step: int, prompts: list[Prompt]) -> tuple[Rollout, Scores]:
        """The step's completions and what the rewards say of them, all of them in every process.

        With `--refill-groups`, groups whose rewards are all equal are replaced by those of further prompts.
        """
        config = self._run.config
        sampled, scores = self._sample(step, prompts, draw=0)
        for draw in range(1, config.refill_groups + 1):
            zero_variance = (
                zero_variance_groups(scores.rewards, config.group_size).nonzero().flatten().tolist()
            )
            if not zero_variance:
                break
            more, more_scores = self._sample(step, self._run.source.draw(len(zero_variance)), draw=draw)
            sampled = sampled.replace_groups(zero_variance, more)
            scores = scores.replace_groups(zero_variance, more_scores, config.group_size)
        return sampled, scores

    def _sample(self, step: int, prompts: list[Prompt], *, draw: int) -> tuple[Rollout, Scores]:
        """This process samples and judges its groups, and gets the others'. draw: see `step_uniforms`."""
        config, run, mine = self._run.config, self._run, None
        share = run.share(len(prompts))
        with run.clock("sample"):
            run.rewards.prepare(share.prompts(prompts))  # the engine works while the model writes
            if share:
                uniforms = step_uniforms(
                    len(prompts) * config.group_size, config.max_new_tokens,
                    seed=config.seed, step=step, draw=draw,
                )  # (N, max_new_tokens)  # fmt: skip
                sampled = self._rollout(share.prompts(prompts) + prompts[: share.idle], share.rows(uniforms))
        if share.groups:
            with run.clock("reward"):
                sampled = sampled.groups(range(len(share.groups)))
                texts = replace(sampled, prompts=[])  # which every process has
                mine = {"rollout": vars(texts), "scores": vars(run.rewards(sampled))}
        with run.clock("wait"):
            parts = [part for part in run.world.exchange(f"the sampling of step {step}", mine) if part]
        joined = replace(Rollout.join([Rollout(**part["rollout"]) for part in parts]), prompts=prompts)
        return joined, Scores.join([Scores(**part["scores"]) for part in parts])

    def _rollout(self, prompts: list[Prompt], uniforms: Tensor) -> Rollout:
        config, run = self._run.config, self._run
        num_rows, max_tokens = uniforms.shape
        prompt_ids = tokenize(prompts, run.policy.tokenizer)
        kv_growth: list[tuple[int, int]] = []

        def work(rows: int) -> Rollout:
            kv_growth.clear()
            return rollout(
                run.sampler.model, run.policy.tokenizer, prompts, uniforms, config,
                rows=rows, reusable=run.arena if run.records else None, stay_gathered=run.stays_gathered,
                watch_cache=lambda *seen: kv_growth.append(seen),
            )  # fmt: skip

        def took(rows: int, sampled: Rollout) -> Size:
            tokens = max_tokens if has_static_cache(run.policy.model.config) else int(sampled.lengths.max())
            return Size(min(rows, num_rows), tokens, max(map(len, sampled.prompt_ids)))

        sampled = run.fit.run(
            "sample", work, self._batch(num_rows, prompt_ids), took=took, kv_growth=kv_growth,
            discard=self._release_arenas,
        )  # fmt: skip
        for arena in (run.eval_arena, run.arena):
            if run.fit.room_bytes() < self._needed_bytes("score", "learn"):
                arena.release()
        return sampled

    def _needed_bytes(self, *phases: str) -> float:
        """What these phases add in their plans: what decoding keeps stays where there is room beside."""
        planned = self._run.fit.planned().items()
        needs = [self._run.fit.needs(phase, self._batch(rows)) for phase, rows in planned if phase in phases]
        return max(needs, default=0.0)

    def _release_arenas(self) -> None:
        self._run.arena.release()
        self._run.eval_arena.release()

    def _batch(self, rows: int, prompt_ids: Sequence[Sequence[int]] = ()) -> Size:
        """With texts as long as there may be: rows are planned for those, and so seldom change."""
        self._longest_prompt = max([self._longest_prompt, *map(len, prompt_ids)])
        return Size(rows, self._run.config.max_new_tokens, self._longest_prompt)

    def _packing(self, sampled: Rollout) -> dict[str, Any]:
        """How `streams` fills what so many rows of the longest texts take.

        The processes of a sharded model all have to make the same passes.
        """
        size = self._batch(1, sampled.prompt_ids)
        return {"longest": (size.shared, size.tokens), "of_equal_rows": self._run.config.shard}

    def score(self, sampled: Rollout) -> tuple[Tensor | None, Tensor | None]:
        """Log-probs (n, C) of this process's n rows under the policy so far, and under the reference.

        None where the loss does without them: in the first pass of learning the policy is what it was.
        """
        config, run, old_logp, ref_logp = self._run.config, self._run, None, None
        mine = run.share(len(sampled.prompts)).rollout(sampled)
        with run.clock("score"):
            if config.num_iterations > 1 or config.kl_in_reward:
                old_logp = self._logprobs(run.policy.model, mine)
            if run.reference is not None:
                with run.reference.model() as reference:
                    ref_logp = self._logprobs(reference, mine)
        return old_logp, ref_logp

    def _logprobs(self, model: PreTrainedModel, sampled: Rollout) -> Tensor:
        config, run = self._run.config, self._run
        if not sampled.prompts:
            return torch.zeros(sampled.completion_ids.shape)
        packing = self._packing(sampled)
        return run.fit.run(
            "score",
            lambda rows: score(
                model, sampled, rows=rows, temperature=config.temperature, dtype=run.policy.target.dtype,
                **packing,
            ),
            self._batch(len(sampled.completion_ids), sampled.prompt_ids),
            took=lambda rows, _: largest_stream(sampled, rows, **packing),
            discard=self._release_arenas,
        )  # fmt: skip

    def kl(self, sampled: Rollout, old_logp: Tensor, ref_logp: Tensor) -> Tensor:
        """The KL (k1) of each of the step's completions, (N,), from the log-probs of each process's rows."""
        share = self._run.share(len(sampled.prompts))
        mine = ((old_logp - ref_logp) * share.rollout(sampled).mask).sum(1)[: share.num_rows]  # (n,)
        with self._run.clock("wait"):
            return torch.cat(self._run.world.exchange("scoring", mine))

    def gradients(
        self,
        step: int,
        sampled: Rollout,
        advantages: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        *,
        kl_coef: float,
    ) -> Callable[[], dict[str, float]]:
        """What makes the step's gradients, summed over the processes, and gives its metrics; any time again.

        advantages: (N,) or (N, C). old_logp, ref_logp: of `score`.
        """
        config, run = self._run.config, self._run
        mask = sampled.mask  # (N, C)
        if config.mask_truncated:
            mask = mask & sampled.terminated.unsqueeze(1)
        counts = loss_counts(mask, config.max_new_tokens)  # of the whole step
        share = run.share(len(sampled.prompts))
        batch = GRPOBatch(
            share.rollout(sampled), share.rows(advantages), share.rows(mask), counts, old_logp, ref_logp
        )
        settings = LossSettings.of(config, kl_coef=kl_coef)
        if kl_coef == 0 and not config.shard:  # there all make the same passes
            batch = batch.without_zero_variance_groups()

        def accumulate() -> dict[str, float]:
            sums = self.accumulate(batch, settings)
            with run.clock("wait"):
                parts = run.world.exchange(f"the learning of step {step}", sums)  # all went well
            if not config.shard:  # there the backward passes have done it
                with run.clock("reduce"):
                    run.world.sum_gradients(p for p in run.policy.model.parameters() if p.requires_grad)
            return finish_grpo(parts, counts)

        return accumulate

    def accumulate(self, batch: GRPOBatch, settings: LossSettings) -> Sums:
        """Add this process's gradients to the policy's; what `finish_grpo` makes metrics of."""
        config, run = self._run.config, self._run
        if not batch.rollout.prompts:
            return {}
        packing = self._packing(batch.rollout)

        def work(rows: int) -> Sums:
            return accumulate_grpo(
                run.policy.model, batch, settings=settings, temperature=config.temperature,
                dtype=run.policy.target.dtype, rows=rows, importance_cap=config.importance_cap,
                checkpointing=choose_checkpointing(config.gradient_checkpointing), **packing,
            )  # fmt: skip

        def discard() -> None:
            run.optimizer.zero_grad(set_to_none=True)
            self._release_arenas()

        return run.fit.run(
            "learn", work, self._batch(len(batch.mask), batch.rollout.prompt_ids),
            took=lambda rows, _: largest_stream(batch.rollout, rows, **packing),
            discard=discard,
        )  # fmt: skip

    def evaluate(self, step: int) -> Evaluation:
        """The greedy policy's answers to the held-out prompts; every process answers some of them."""
        config, run = self._run.config, self._run
        mine = run.eval_prompts[run.world.rank :: run.world.size]
        idle = largest_share(len(run.eval_prompts), run.world.size) - len(mine) if config.shard else 0
        prompts = mine + run.eval_prompts[:idle]  # the processes of a sharded model make the same passes

        def work(rows: int) -> Answers:
            return answer_heldout(
                run.sampler.model, run.policy.tokenizer, prompts,
                settings=SamplingSettings.of(config, temperature=0.0), rows=rows,
                seed=config.seed, engine=run.engine, reusable=run.eval_arena if run.records else None,
            )  # fmt: skip

        scores: dict[str, Column] = {}
        if prompts:
            tokens = self._longest_prompt + config.max_new_tokens  # each row has a prompt of its own
            rows = min(len(prompts), config.rollout_rows or EVAL_ROWS)
            answers = run.fit.run(
                "evaluate", work, Size(rows, tokens), like="sample", discard=self._release_arenas
            )
            if run.fit.room_bytes() + run.arena.nbytes < self._needed_bytes("sample", "score", "learn"):
                run.eval_arena.release()
            release_cache()  # of rows that are no step's
            scores = score_answers(answers, engine=run.engine, judge=run.rewards)
        columns = {name: torch.from_numpy(column[: len(mine)]) for name, column in scores.items()}
        parts = run.world.exchange(f"the evaluation at step {step}", columns)
        everybodys = [{name: column.numpy() for name, column in part.items()} for part in parts]
        return Evaluation.of(run.eval_prompts, interleave(everybodys))
