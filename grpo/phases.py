"""The phases of a step as one process does them: its share of the groups, as many rows at once as fit.

Each phase runs through `Fit.run`, which chooses the rows. If memory runs out, it drops what the phase has
done and repeats it from the same inputs with fewer rows; the result is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.data.reward_functions import Scores
from grpo.data.tokens import tokenize
from grpo.distributed import largest_share
from grpo.distributed.share import Share
from grpo.evaluate import Evaluation, interleave
from grpo.evaluate.heldout import Answers, answer_heldout, score_answers
from grpo.evaluate.scores import Column
from grpo.learning.advantages import zero_variance_groups
from grpo.learning.loss import StepCounts
from grpo.learning.objectives import Sums, accumulate_grpo, finish_grpo, with_advantage
from grpo.memory import PassSize
from grpo.memory.recovery import release_cache
from grpo.rollout.decoder import has_static_cache, joins_rows
from grpo.rollout.sample import begin_rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.setup import Run
from grpo.scoring.logprobs import score
from grpo.scoring.packing import largest_stream
from grpo.types import Batch, Prompt

EVAL_ROWS = 256
"""Held-out prompts answered at once, at most."""


class Phases:
    """The phases of one run. Processes exchange here what they have to, after a phase and never within."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.fit.keeps("sample", run.arena)
        run.fit.keeps("evaluate", run.eval_arena)
        run.fit.borrow_formula("evaluate", "sample")
        self._longest_prompt = run.longest_prompt
        self.cache_plan = run.work.cache_plan()
        """The tokens that rows at once are planned to hold in pages while they are sampled."""
        self.tokens_twice = 0.0
        """Share of the last sampling's tokens that were sampled twice, as their rows had been given up."""
        self._padding: Batch | None = None
        """Groups without tokens that this process goes through as the others of a sharded model have more."""

    def sample_and_reward(self, step: int, prompts: list[Prompt]) -> tuple[Batch | None, Scores]:
        """Returns this process's completions, None for no groups, and what is known of all of the step's.

        With `--refill-groups`, groups whose rewards are all equal are replaced by those of further prompts,
        by the process that has them.
        """
        config, run = self._run.config, self._run
        batch, scores = self._sample(step, prompts, range(len(prompts)), draw=0)
        for draw in range(1, config.refill_groups + 1):
            zero_variance = (
                zero_variance_groups(scores.rewards, config.group_size).nonzero().flatten().tolist()
            )
            if not zero_variance:
                break
            drawn = run.source.draw(len(zero_variance))
            more, more_scores = self._sample(step, drawn, zero_variance, draw=draw)
            if batch is not None and more is not None:
                mine = list(run.share().groups)
                replaced = [mine.index(group) for group in run.share(zero_variance).groups]
                batch = batch.replace_groups(replaced, more)
            scores = scores.replace_groups(zero_variance, more_scores, config.group_size)
        return batch, scores

    def _sample(
        self, step: int, prompts: list[Prompt], groups: Sequence[int], *, draw: int
    ) -> tuple[Batch | None, Scores]:
        """Samples and judges this process's groups; all processes exchange the scores.

        prompts: of groups with these numbers. draw: see `step_uniforms`.
        """
        config, run = self._run.config, self._run
        share, place = run.share(groups), {group: number for number, group in enumerate(groups)}
        mine = Share([place[group] for group in share.groups], config.group_size, share.padding_groups)
        with run.clock("sample"):
            run.rewards.prepare(mine.of_groups(prompts))  # the engine works while the model writes
            if share:
                uniforms = step_uniforms(
                    len(prompts) * config.group_size,
                    config.max_new_tokens,
                    seed=config.seed,
                    step=step,
                    draw=draw,
                )  # (N, max_new_tokens)
                sampled = self._rollout(*self._with_padding(mine, prompts, uniforms), judged=len(mine.groups))
                if draw == 0:
                    padding = range(len(mine.groups), len(mine.groups) + mine.padding_groups)
                    self._padding = sampled.select_groups(padding).without_tokens() if padding else None
        batch, part = None, None
        if share.groups:
            with run.clock("reward"):
                batch = sampled.select_groups(range(len(share.groups))) if share.padding_groups else sampled
                part = vars(run.rewards(batch))  # the fields of `Scores`, which can be sent
        with run.clock("wait"):
            parts = run.world.exchange(f"the sampling of step {step}", part)
        return batch, Scores.join([Scores(**part) for part in parts if part])

    def _with_padding(
        self, share: Share, prompts: list[Prompt], uniforms: Tensor
    ) -> tuple[list[Prompt], Tensor]:
        """Prompts and uniforms of a share, the first prompts once more for its padding."""
        padding = torch.zeros(share.padding_groups * share.group_size, uniforms.shape[1])
        padded = torch.cat([uniforms[share.rows], padding])
        return share.of_groups(prompts) + prompts[: share.padding_groups], padded

    def _rollout(self, prompts: list[Prompt], uniforms: Tensor, *, judged: int) -> Batch:
        """Samples completions. Rewards begin with a group once it has ended, of the first `judged` groups."""
        config, run = self._run.config, self._run
        num_rows, plan = len(uniforms), self.cache_plan
        prompt_ids = tokenize(prompts, run.policy.tokenizer)
        kv_growth: list[tuple[int, int]] = []
        run.rewards.forget_begun()

        def work(rows: int) -> Batch:
            sampling = begin_rollout(
                run.sampler.model,
                run.policy.tokenizer,
                prompts,
                uniforms,
                config,
                rows=rows,
                cache_tokens=plan.tokens,
                reusable=run.arena if run.records else None,
                stay_gathered=run.stays_gathered,
            )
            for groups in sampling.whole_groups():
                for group in groups:
                    if group < judged:
                        run.rewards.begin(sampling.batch(prompts, [group]))
            kv_growth[:] = sampling.kv_growth
            self.tokens_twice = sampling.share_given_up
            return sampling.batch(prompts)

        def took(rows: int, sampled: Batch) -> PassSize:
            is_static = has_static_cache(run.sampler.model.config)
            tokens = int(plan.tokens) if is_static else int(sampled.lengths.max())
            return PassSize(
                min(rows, num_rows), tokens, max(map(len, sampled.context_ids)), batch_rows=num_rows
            )

        sampled = run.fit.run(
            "sample",
            work,
            self._sample_size(num_rows, prompt_ids),
            took=took,
            kv_growth=kv_growth,
            rollback=self._release_arenas,
        )
        rows = run.fit.planned().get("sample", num_rows)
        if joins_rows(run.sampler.model) and (why := plan.see(sampled.lengths.tolist(), rows)):
            run.fit.reopen("sample", why)
        for arena in (run.eval_arena, run.arena):
            if run.fit.room_bytes() < self._needed_bytes("score", "learn"):
                arena.release()
        return sampled

    def _sample_size(self, rows: int, prompt_ids: Sequence[Sequence[int]] = ()) -> PassSize:
        """Returns the size of so many rows that decode at once."""
        size = self._worst_case(rows, prompt_ids)
        return size._replace(
            completion_tokens=int(self.cache_plan.tokens), batch_rows=self._run.work.rows_here
        )

    def _needed_bytes(self, *phases: str) -> float:
        """Returns the most bytes that one of these phases adds as planned: so much has to be free for it."""
        planned = self._run.fit.planned().items()
        needs = [
            self._run.fit.needs(phase, (self._sample_size if phase == "sample" else self._worst_case)(rows))
            for phase, rows in planned
            if phase in phases
        ]
        return max(needs, default=0.0)

    def _release_arenas(self) -> None:
        self._run.arena.release()
        self._run.eval_arena.release()

    def _worst_case(self, rows: int, prompt_ids: Sequence[Sequence[int]] = ()) -> PassSize:
        """Returns the size of a batch of the longest texts there may be: rows are planned for those."""
        self._longest_prompt = max([self._longest_prompt, *map(len, prompt_ids)])
        return PassSize(rows, self._run.config.max_new_tokens, self._longest_prompt)

    def _packing(self, batch: Batch) -> dict[str, Any]:
        """How `streams` fills what so many rows of the longest texts take.

        The processes of a sharded model all have to make the same passes.
        """
        size = self._worst_case(1, batch.context_ids)
        return {
            "longest": (size.prompt_tokens, size.completion_tokens),
            "of_equal_rows": self._run.config.shard,
        }

    def score(self, batch: Batch | None) -> Batch | None:
        """Returns the batch with log-probs under the policy so far and the reference, where they are wanted.

        In the first pass of learning the policy is what it was, and so is not scored for that.
        """
        config, run, columns = self._run.config, self._run, dict[str, Tensor]()
        with run.clock("score"):
            if config.scores_policy:
                columns["old_logp"] = self._logprobs(run.policy.model, batch)
            if run.reference is not None:
                with run.reference.model() as reference:
                    columns["ref_logp"] = self._logprobs(reference, batch)
        return None if batch is None else batch.with_columns(**columns)

    def _logprobs(self, model: PreTrainedModel, batch: Batch | None) -> Tensor:
        """Log-probs (K,) of a batch's tokens, through which padding groups go, too."""
        run = self._run
        rows_of = _with_padding_rows(batch, self._padding)
        if rows_of is None:
            return torch.zeros(0)
        packing = self._packing(rows_of)
        return run.fit.run(
            "score",
            lambda rows: score(model, rows_of, rows=rows, **packing, **run.work.scoring()),
            self._worst_case(len(rows_of), rows_of.context_ids),
            took=lambda rows, _: largest_stream(rows_of, rows, **packing),
            rollback=self._release_arenas,
        )

    def kl(self, batch: Batch | None) -> Tensor:
        """Returns the KL (k1) of each of the step's completions, (N,), from each process's log-probs."""
        mine = torch.zeros(0)
        if batch is not None:
            assert batch.old_logp is not None and batch.ref_logp is not None
            mine = batch.sum_by_row(batch.old_logp - batch.ref_logp)  # (n,)
        with self._run.clock("wait"):
            parts = self._run.world.exchange("scoring", mine)
        return torch.cat([part for part in parts if len(part)])

    def gradients(
        self, step: int, batch: Batch | None, scores: Scores, *, kl_coef: float
    ) -> Callable[[], dict[str, float]]:
        """Returns a function that makes the step's gradients, summed over processes, and gives its metrics.

        batch: this process's, with credit, scored. scores: of the whole step.
        """
        config, run = self._run.config, self._run
        counted = scores.lengths
        if config.mask_truncated:
            counted = counted * scores.terminated
            if batch is not None:
                batch = batch.with_columns(learned=batch.learned & batch.terminated[batch.row])
        counts = StepCounts(len(scores.lengths), int(counted.sum()), config.max_new_tokens)
        if batch is not None and kl_coef == 0 and not config.shard:  # there all make the same passes
            batch = with_advantage(batch)
        batch = _with_padding_rows(batch, self._padding)

        def accumulate() -> dict[str, float]:
            sums = self.accumulate(batch, counts, kl_coef)
            with run.clock("wait"):
                parts = run.world.exchange(f"the learning of step {step}", sums)  # all went well
            if not config.shard:  # there the backward passes have done it
                with run.clock("reduce"):
                    run.world.sum_gradients(p for p in run.policy.model.parameters() if p.requires_grad)
            return finish_grpo(parts, counts)

        return accumulate

    def accumulate(self, batch: Batch | None, counts: StepCounts, kl_coef: float) -> Sums:
        """Adds this process's gradients to the policy's; returns what `finish_grpo` makes metrics of."""
        run = self._run
        if batch is None:
            return {}
        packing, options = self._packing(batch), run.work.learning(kl_coef)
        loss_scale = 1.0 if run.loss_scale is None else run.loss_scale.value

        def work(rows: int) -> Sums:
            return accumulate_grpo(
                run.policy.model, batch, counts, rows=rows, loss_scale=loss_scale, **packing, **options
            )

        def rollback() -> None:
            run.optimizer.zero_grad(set_to_none=True)
            self._release_arenas()

        return run.fit.run(
            "learn",
            work,
            self._worst_case(len(batch), batch.context_ids),
            took=lambda rows, _: largest_stream(batch, rows, **packing),
            rollback=rollback,
        )

    def evaluate(self, step: int) -> Evaluation:
        """The greedy policy's answers to the held-out prompts; every process answers some of them."""
        config, run = self._run.config, self._run
        mine = run.eval_prompts[run.world.rank :: run.world.size]
        # The processes of a sharded model make the same passes.
        padding = largest_share(len(run.eval_prompts), run.world.size) - len(mine) if config.shard else 0
        prompts = mine + run.eval_prompts[:padding]

        def work(rows: int) -> Answers:
            return answer_heldout(
                run.sampler.model,
                run.policy.tokenizer,
                prompts,
                settings=SamplingSettings.of(config, temperature=0.0),
                rows=rows,
                seed=config.seed,
                engine=run.engine,
                reusable=run.eval_arena if run.records else None,
            )

        scores: dict[str, Column] = {}
        if prompts:
            tokens = self._longest_prompt + config.max_new_tokens  # each row has a prompt of its own
            rows = min(len(prompts), config.rollout_rows or EVAL_ROWS)
            answers = run.fit.run("evaluate", work, PassSize(rows, tokens), rollback=self._release_arenas)
            if run.fit.room_bytes() + run.arena.nbytes < self._needed_bytes("sample", "score", "learn"):
                run.eval_arena.release()
            release_cache()  # of rows that are no step's
            scores = score_answers(answers, engine=run.engine, judge=run.rewards)
        columns = {name: torch.from_numpy(column[: len(mine)]) for name, column in scores.items()}
        parts = run.world.exchange(f"the evaluation at step {step}", columns)
        everybodys = [{name: column.numpy() for name, column in part.items()} for part in parts]
        return Evaluation.of(run.eval_prompts, interleave(everybodys))


def _with_padding_rows(batch: Batch | None, padding: Batch | None) -> Batch | None:
    """Puts padding groups, if there are any, behind a batch, with the same columns."""
    if padding is None:
        return batch
    columns = [
        name
        for name in ("credit", "old_logp", "ref_logp")
        if batch is None or getattr(batch, name) is not None
    ]
    padding = padding.with_columns(**{name: torch.zeros(0) for name in columns})
    return padding if batch is None else Batch.cat([batch, padding])
