"""The loop. `Trainer.__iter__` is the whole program; what it calls does one thing each."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from loguru import logger
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config import Config, to_plain
from grpo.config.groups import LossSettings
from grpo.data.load import Rows
from grpo.data.reward_files import RewardFunction
from grpo.data.reward_functions import Scores
from grpo.evaluate import Evaluation
from grpo.learning.advantages import field_credit, group_advantages, zero_variance_groups
from grpo.learning.loss import adaptive_kl, loss_counts
from grpo.learning.objectives import GRPOBatch, finish_grpo
from grpo.learning.optimizer import learning_rate, set_learning_rate
from grpo.learning.step import Stepper
from grpo.memory import Size
from grpo.model.load import end_names
from grpo.phases import PlannedPhases
from grpo.run.checkpoint import Checkpoint
from grpo.run.given import Given
from grpo.run.interrupt import StopRequest, stop_on_signal
from grpo.run.metrics import Doubts, completion_records, reward_metrics, rollout_metrics
from grpo.run.progress import Progress
from grpo.run.screen import StepProgress, held_out_line, in_one_line
from grpo.run.setup import Run, open_run
from grpo.run.tracking import RunTracker
from grpo.run.training_state import restore_optimizer
from grpo.types import Prompt, Rollout, Step


class Trainer:
    """One run: `for step in Trainer(config)`, or `Trainer(config).train()`; one that may not take a step
    stands in a `with`, or is closed.

    model: a name, or a model of transformers', which is trained itself. prompts: a path, or rows of columns.
    rewards: functions in TRL's signature. What is left out the settings name. A `Run` that is open already
    goes on from its checkpoint, if it has one.
    """

    def __init__(
        self,
        run: Config | Run,
        console: Console | None = None,
        *,
        model: str | PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prompts: str | Rows | None = None,
        rewards: Sequence[str | RewardFunction] = (),
        stop: StopRequest | None = None,
    ) -> None:
        self.console = console or Console(quiet=True)
        self.stop = stop or StopRequest()
        with ExitStack() as opened:
            if isinstance(run, Config):
                run = opened.enter_context(open_run(run, Given(model, tokenizer, prompts, rewards)))
            self._take_up(run)
            self._opened = opened.pop_all()  # and they are closed after the last step

    def _take_up(self, run: Run) -> None:
        """At the beginning, or where its checkpoint has it."""
        self.config = run.config
        self.run = run
        self.stepper = Stepper(
            run.policy.model, run.optimizer, self.config.max_grad_norm,
            updating=self._updating,
        )  # fmt: skip
        self.kl_coef = self.config.kl_coef
        self.best_reward: float | None = None
        self.evaluation: Evaluation | None = None
        """The last one, of held-out prompts."""
        self.num_tokens = 0
        self.finished = 0
        self.interrupted = False
        """Whether somebody asked the run to stop before its end."""
        self.progress = Progress(self.config.steps, self.config.minutes)
        self.tracker: RunTracker | None = None
        """Of the first process, while it trains."""
        self.phases = PlannedPhases(run)
        self.source_state = run.source.state()
        run.rewards.state.max_steps = self.config.steps
        if run.checkpoint is not None:
            self._restore(run.checkpoint)
        self.saved = self.finished

    def close(self) -> None:
        """Let go of the run's folder, engine and processes; after the last step that is done already."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> PreTrainedModel:
        """The policy, as the last step left it."""
        return self.run.policy.model

    def train(self, stop: StopRequest | None = None) -> None:
        """All steps. Without a `stop` of the caller's, Ctrl-C ends them after the one in progress."""
        with nullcontext(stop) if stop else stop_on_signal() as self.stop:
            for _ in self:
                pass

    def __iter__(self) -> Iterator[Step]:
        """rollout, reward, advantage, score, learn, log; checkpoint and evaluate in between.

        Whoever stops asking for steps ends the run after the last one, which is saved.
        """
        config, run = self.config, self.run
        self.progress.begin()
        self.stop.begun = True
        self._open_tracker()
        try:
            if self.finished == 0 and not self._anyone_stops():
                self.evaluate(0)
            self.interrupted = self._anyone_stops()
            if self.interrupted and self.finished == 0:
                self.save()  # or there would be nothing to go on from
            done = self.finished > 0 and self.progress.is_over(self.finished, run.world)
            while not done and not self.interrupted:
                step = self.finished + 1
                run.clock.lap()  # what came before is no part of this step's time
                run.device.reset_peak()
                prompts = run.source.draw(config.num_prompts)
                sampled, scores = self.sample_and_reward(step, prompts)
                rewards, old_logp, ref_logp = self.score(sampled, scores)
                advantages = group_advantages(rewards, config.group_size, scale=config.advantage_scale)
                credit = advantages
                if config.credit == "field":
                    judged, scale = run.rewards.judged(scores, sampled.completions), config.advantage_scale
                    tokenizer = run.policy.tokenizer
                    credit = field_credit(advantages, rewards, judged, sampled, tokenizer, scale=scale)
                learned = self.learn(step, sampled, credit, old_logp, ref_logp)
                if run.reference is not None and self._due(step, config.reference_sync):
                    run.reference.sync(run.policy.model)
                self._finish(step, sampled)
                metrics = self.log(step, sampled, scores, advantages, learned)
                yield Step(step, metrics, sampled, rewards, advantages)

                done = self.progress.is_over(step, run.world)
                better = self.evaluate(step) if done or self._due(step, config.eval_interval) else False
                self.interrupted = not done and self._anyone_stops()
                if better or done or self.interrupted or self._due(step, config.checkpoint_interval):
                    self.stepper.keep_together(run.world)
                    self.save(best=better)
        except (Exception, GeneratorExit):
            alone = not self.config.shard  # else the others, who have their parts, may not come to it
            if alone and self.finished > self.saved and not self.stepper.moved:
                self.stepper.skipped_in_a_row = 0
                self.save()  # nothing already learned is lost
            raise
        finally:
            self.close()

    # ------------------------------------------------------------------------------- the phases

    def sample_and_reward(self, step: int, prompts: list[Prompt]) -> tuple[Rollout, Scores]:
        """A step's completions and what the rewards say of them; dull groups are replaced on request."""
        sampled, scores = self._sample(step, prompts, draw=0)
        for draw in range(1, self.config.refill_groups + 1):
            dull = zero_variance_groups(scores.rewards, self.config.group_size).nonzero().flatten().tolist()
            if not dull:
                break
            more, more_scores = self._sample(step, self.run.source.draw(len(dull)), draw=draw)
            sampled = sampled.replace_groups(dull, more)
            scores = scores.replace_groups(dull, more_scores, self.config.group_size)
        return sampled, scores

    def _sample(self, step: int, prompts: list[Prompt], *, draw: int) -> tuple[Rollout, Scores]:
        """Each process its groups; in the end all have everything."""
        run, mine = self.run, None
        share = run.share(len(prompts))
        with run.clock("sample"):
            run.rewards.prepare(share.prompts(prompts))  # the engine works while the model writes
            sampled = self.phases.sample(step, prompts, share, draw=draw) if share else None
        if sampled and share.groups:
            with run.clock("reward"):
                rollout = replace(sampled, prompts=[])  # prompts all have
                mine = {"rollout": vars(rollout), "scores": vars(run.rewards(sampled))}
        with run.clock("wait"):
            made = [part for part in run.world.exchange(f"the sampling of step {step}", mine) if part]
        joined = replace(Rollout.join([Rollout(**part["rollout"]) for part in made]), prompts=prompts)
        return joined, Scores.join([Scores(**part["scores"]) for part in made])

    def score(self, sampled: Rollout, scores: Scores) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rewards (N,), and this process's log-probs (n, C) under the policy so far and the reference."""
        config, run = self.config, self.run
        rewards, old_logp, ref_logp = scores.rewards, None, None
        share = run.share(len(sampled.prompts))
        own = share.rollout(sampled)
        with run.clock("score"):
            if config.num_iterations > 1 or config.kl_in_reward:  # else the first pass of learning serves
                old_logp = self.phases.logprobs(run.policy.model, own)
            if run.reference is not None:
                with run.reference.model() as reference:
                    ref_logp = self.phases.logprobs(reference, own)
        if config.kl_in_reward and old_logp is not None and ref_logp is not None:
            own_kl = ((old_logp - ref_logp) * own.mask).sum(1)[: share.num_rows]  # (n,) k1
            with run.clock("wait"):
                kl = torch.cat(run.world.exchange("scoring", own_kl))  # (N,)
            # A KL that is not finite reaches the loss by way of ref_logp, where the step is skipped.
            rewards = rewards - self.kl_coef * torch.where(kl.isfinite(), kl, 0.0)
        return rewards, old_logp, ref_logp

    def learn(
        self,
        step: int,
        sampled: Rollout,
        advantages: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
    ) -> dict[str, float]:
        """`num_iterations` optimizer steps on a rollout; metrics of the last."""
        config, run = self.config, self.run
        rate = learning_rate(self.progress.position(step - 1), config.steps, config)
        set_learning_rate(run.optimizer, rate)
        mask = sampled.mask
        if config.mask_truncated:
            mask = mask & sampled.terminated.unsqueeze(1)
        counts = loss_counts(mask, config.max_new_tokens)  # of the whole step
        share = run.share(len(sampled.prompts))
        batch = GRPOBatch(
            share.rollout(sampled), share.rows(advantages), share.rows(mask), counts, old_logp, ref_logp
        )
        settings = LossSettings.of(config, kl_coef=0.0 if config.kl_in_reward else self.kl_coef)
        if settings.kl_coef == 0 and not config.shard:  # there all make the same passes
            batch = batch.without_dull_groups()

        def accumulate() -> dict[str, float]:
            sums = self.phases.accumulate(batch, settings)
            with run.clock("wait"):
                parts = run.world.exchange(f"the learning of step {step}", sums)  # all went well
            if not config.shard:  # there the backward passes have done it
                with run.clock("reduce"):
                    run.world.sum_gradients(self.stepper.parameters)
            return finish_grpo(parts, counts)

        with run.clock("learn"):
            metrics = self.stepper.step(accumulate)
            rounding = {name: value for name, value in metrics.items() if name.startswith("sampling/")}
            for _ in range(config.num_iterations - 1):
                if metrics["skipped"]:
                    break  # the rollout is to blame: it would fail again
                metrics = self.stepper.step(accumulate) | rounding  # the policy itself has moved
            run.sampler.refresh()
        metrics |= {"learning_rate": rate, "kl_coef": self.kl_coef}
        if config.kl_target is not None and "kl" in metrics and not metrics["skipped"]:
            self.kl_coef = adaptive_kl(self.kl_coef, metrics["kl"], config.kl_target)
        return metrics

    def evaluate(self, step: int) -> bool:
        """Held-out quality (greedy) into the metrics; whether its reward is the best so far."""
        config, run = self.config, self.run
        if not config.eval_interval or not run.eval_prompts:
            return False
        self.evaluation = result = self.phases.evaluate(step)
        passes, means = self._take_passes(f"the log of the evaluation at step {step}"), result.as_metrics()
        if self.tracker is not None:
            self.tracker.log_memory(step, passes)
            self.tracker.log(step, {**means, **result.interval_metrics()})
        logger.info("held-out at step {}: {}", step, held_out_line(means))
        reward = means.get("eval_reward")
        if reward is None or (self.best_reward is not None and reward <= self.best_reward):
            return False
        self.best_reward = reward
        return step > 0

    # ----------------------------------------------------------------------------- what remains

    def _open_tracker(self) -> None:
        """Where the first process writes what comes; what an earlier try wrote after the checkpoint goes."""
        run, config = self.run, self.config
        if not run.world.is_main:
            return
        self.tracker = RunTracker(
            run.folder, trackers=config.trackers, settings=to_plain(config),
            before_step=self.finished or -1,  # evaluation 0 is done again
        )  # fmt: skip
        self._opened.callback(self.tracker.close)
        self.bar = StepProgress(self.console, self.progress, finished=self.finished)
        self._opened.callback(self.bar.close)
        ends = end_names(run.policy.model, run.policy.tokenizer, config.stop_texts)
        self.doubt = Doubts(config.num_rows, config.max_new_tokens, ends)

    def log(
        self, step: int, sampled: Rollout, scores: Scores, advantages: Tensor, learned: dict[str, float]
    ) -> dict[str, float]:
        """The step's metrics by TRL's names, which the first process writes."""
        config, run = self.config, self.run
        memory, records = run.device.read(), self._take_passes(f"the log of step {step}")
        metrics = {
            **rollout_metrics(sampled),
            **reward_metrics(scores, config.group_size),
            **learned,
            **run.clock.lap(),
            **run.world.take_traffic(),
            **memory.as_metrics(),
            "num_tokens": float(self.num_tokens),
            "progress": self.progress.share(step),
        }
        if self.tracker is not None:
            logger.bind(piped=True).info("{}", memory)
            self.doubt(step, metrics)
            self.tracker.log(step, metrics)
            self.tracker.log_memory(step, records)
            said = completion_records(sampled, scores, advantages, config.logged_completions)
            self.tracker.log_completions(step, said)
            self.bar.update(step, in_one_line(metrics, config.num_rows))
            if self._due(step, config.show_completions):
                self.bar.show(next(completion_records(sampled, scores, advantages, 1, first=step)))
        return metrics

    def _take_passes(self, what: str) -> list[list[dict[str, Any]]]:
        """Of each process, what its phases held since they were last taken."""
        passes = self.run.fit.take_passes()
        self.run.measured.note(passes)
        return self.run.world.exchange(what, [each.as_dict() for each in passes])

    def _finish(self, step: int, sampled: Rollout) -> None:
        """From here on the step is part of the run, whatever happens."""
        self.finished, self.source_state, self.stepper.moved = step, self.run.source.state(), False
        self.run.rewards.state.global_step = step
        prompt_tokens = sum(map(len, sampled.prompt_ids)) * self.config.group_size
        self.num_tokens += prompt_tokens + int(sampled.lengths.sum())

    def save(self, *, best: bool = False) -> None:
        """A checkpoint of the last whole step, which the first process writes."""
        state = {
            "source": self.source_state,
            "kl_coef": self.kl_coef,
            "best_reward": self.best_reward,
            "num_tokens": self.num_tokens,
            **self.progress.state(self.finished),
            **self.stepper.state(),
            "memory": self.run.fit.state(),
            "settings": to_plain(replace(self.config, resume=None)),
        }
        if self.phases.save(self.finished, state, best=best):
            self.saved = self.finished

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        restore_optimizer(self.run.policy.model, self.run.optimizer, checkpoint.tensors, checkpoint.folder)
        self.run.source.restore(state["source"])
        if self.config.kl_target is not None:
            self.kl_coef = state["kl_coef"]
        self.best_reward = state["best_reward"]
        self.num_tokens = state["num_tokens"]
        self.stepper.restore(state)
        self.run.fit.restore(state["memory"])
        self.finished, self.source_state = state["step"], state["source"]
        self.run.rewards.state.global_step = self.finished
        self.progress.restore(state)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        rows = self.run.config.num_rows  # whose gradients are all there
        with self.run.clock("update"), self.run.fit.watch("update", Size(rows)):
            yield

    def _anyone_stops(self) -> bool:
        """Whether any process has been asked to stop: all stop after the same step."""
        return any(self.run.world.exchange("the next step", self.stop.requested))

    def _due(self, step: int, interval: int) -> bool:
        return bool(interval) and step % interval == 0
