"""The loop: `Trainer.__iter__` is a run from its first step to its last; what it calls does one thing each.

`scripts/minimal_grpo.py` has the algorithm alone, on one page. Shapes: see `grpo/types.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config import Config, to_plain
from grpo.data.load import Rows
from grpo.data.reward_files import RewardFunction
from grpo.data.reward_functions import Scores
from grpo.distributed import ProcessLost
from grpo.evaluate import Evaluation
from grpo.learning.advantages import field_credit, group_advantages
from grpo.learning.loss import adaptive_kl
from grpo.learning.optimizer import learning_rate, set_learning_rate
from grpo.learning.step import GuardedOptimizer
from grpo.logs.progress import Progress
from grpo.phases import Phases
from grpo.run.checkpoint import Checkpoint
from grpo.run.inputs import Inputs
from grpo.run.interrupt import StopRequest, stop_on_signal
from grpo.run.log import RunLog
from grpo.run.setup import Run, open_run
from grpo.run.training_state import restore_optimizer
from grpo.types import Batch, Step


class Trainer:
    """One run: `for step in Trainer(config)`, or `Trainer(config).train()`.

    If it may be that no step is taken, use it in a `with` statement, or call `close`.

    model: a name, or a model of transformers', which is trained in place. prompts: a path, or rows of
    columns. rewards: functions in TRL's signature. Each of them that is not given comes from the settings.
    Given an open `Run`, the trainer goes on from its checkpoint, if it has one.
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
        self.stop = stop or StopRequest()
        with ExitStack() as opened:
            if isinstance(run, Config):
                run = opened.enter_context(open_run(run, Inputs(model, tokenizer, prompts, rewards)))
            self.run, self.config = run, run.config
            self.phases = Phases(run)
            self.guarded = GuardedOptimizer(
                run.policy.model,
                run.optimizer,
                self.config.max_grad_norm,
                updating=lambda: run.clock("update"),
                loss_scale=run.loss_scale,
            )
            self.progress = Progress(self.config.steps, self.config.minutes)
            self.logs = RunLog(run, console or Console(quiet=True), self.progress)
            self.finished = self.num_tokens = 0
            self.kl_coef = self.config.kl_coef
            self.source_state = run.source.state()  # after the last step that is finished
            self.evaluation: Evaluation | None = None  # the last one, of held-out prompts
            self.best_reward: float | None = None
            self.interrupted = False  # whether somebody asked the run to stop before its end
            run.rewards.state.max_steps = self.config.steps
            if run.checkpoint is not None:
                self._restore(run.checkpoint)
                run.checkpoint = None
            self.saved = self.finished
            self._opened = opened.pop_all()  # and they are closed after the last step

    def close(self) -> None:
        """Let go of the run's folder, engine and processes; after the last step that is done already."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)  # which other processes are told

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
        """rollout, reward, score, advantage, learn, log; checkpoint and evaluate in between.

        Whoever stops asking for steps ends the run after the last one, which is saved.
        """
        self.progress.begin()
        self.stop.begun = True
        with self._opened:
            self._opened.enter_context(self.logs.opened(self.finished))
            try:
                yield from self._steps()
            except GeneratorExit:
                self._save_before_the_end()
                self.close()  # as at the end of all steps
                raise
            except Exception as error:
                self._save_before_the_end(error)
                raise

    def _steps(self) -> Iterator[Step]:
        """All steps that are left, with what is done in between."""
        config, run = self.config, self.run
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
            batch, scores = self.phases.sample_and_reward(step, prompts)
            batch = self.phases.score(batch)
            rewards = self.rewards_less_kl(batch, scores)
            advantages = group_advantages(rewards, config.group_size, scale=config.advantage_scale)
            if batch is not None:
                batch = batch.with_columns(credit=self.credit(batch, scores, rewards, advantages))
            learned = self.learn(step, batch, scores)
            if run.reference is not None and self._due(step, config.reference_sync):
                run.reference.sync(run.policy.model)
            self._finish(step, scores)
            metrics = self.log(step, batch, scores, advantages, learned)
            yield Step(step, metrics, batch or Batch.empty(), rewards, advantages)

            done = self.progress.is_over(step, run.world)
            better = self.evaluate(step) if done or self._due(step, config.eval_interval) else False
            self.interrupted = not done and self._anyone_stops()
            if better or done or self.interrupted or self._due(step, config.checkpoint_interval):
                self.guarded.keep_together(run.world)
                run.sampler.refresh()  # of what may have been copied from another process
                self.save(best=better, last=done)

    def _save_before_the_end(self, error: Exception | None = None) -> None:
        """Nothing that was learned is lost, whatever ends the run before its last step.

        error: None where the caller asks for no more steps. A sharded model is saved by all processes
        together, which they come to only then; where the first process is lost the second one saves.
        """
        run = self.run
        stands_in = isinstance(error, ProcessLost) and error.rank == 0 and run.world.rank == 1
        if self.finished <= self.saved or self.guarded.moved or (self.config.shard and error is not None):
            return
        if self.config.shard:
            run.world.exchange("the end of this run", self.finished)  # ProcessLost where others go on
        self.guarded.skipped_in_a_row = 0
        self.save(stands_in=stands_in)

    def rewards_less_kl(self, batch: Batch | None, scores: Scores) -> Tensor:
        """Returns the step's rewards (N,), less the KL with `kl_in_reward`. batch: this process's."""
        rewards = scores.rewards
        if self.config.kl_in_reward and self.run.reference is not None:
            kl = self.phases.kl(batch)  # (N,)
            # A KL that is not finite reaches the loss by way of ref_logp, where the step is skipped.
            rewards = rewards - self.kl_coef * torch.where(kl.isfinite(), kl, 0.0)
        return rewards

    def credit(self, batch: Batch, scores: Scores, rewards: Tensor, advantages: Tensor) -> Tensor:
        """Returns the advantage (K,) of each of the batch's tokens: its row's, or its field's.

        rewards, advantages: (N,) of the whole step.
        """
        config, run, rows = self.config, self.run, self.run.share().rows
        if config.credit != "field":
            return advantages[rows][batch.row]
        judged, scale = run.rewards.judged(scores, batch.texts), config.advantage_scale
        tokenizer, first_row = run.policy.tokenizer, int(rows[0])
        return field_credit(advantages, rewards, judged, batch, tokenizer, scale=scale, first_row=first_row)

    def learn(self, step: int, batch: Batch | None, scores: Scores) -> dict[str, float]:
        """`num_iterations` optimizer steps on a batch with credit; metrics of the last."""
        config, run = self.config, self.run
        rate = learning_rate(self.progress.position(step - 1), config.steps, config)
        set_learning_rate(run.optimizer, rate)
        kl_coef = 0.0 if config.kl_in_reward else self.kl_coef
        gradients = self.phases.gradients(step, batch, scores, kl_coef=kl_coef)
        with run.clock("learn"):
            metrics = self.guarded.step(gradients)
            # Sampler and scorer can be compared in the first iteration alone: later the policy has moved.
            rounding = {name: value for name, value in metrics.items() if name.startswith("sampling/")}
            for _ in range(config.num_iterations - 1):
                if metrics["skipped"]:
                    break  # the batch is to blame: it would fail again
                metrics = self.guarded.step(gradients) | rounding
            run.sampler.refresh()
        metrics |= {"learning_rate": rate, "kl_coef": self.kl_coef}
        metrics["memory/tokens_twice"] = self.phases.tokens_twice
        if config.kl_target is not None and "kl" in metrics and not metrics["skipped"]:
            self.kl_coef = adaptive_kl(self.kl_coef, metrics["kl"], config.kl_target)
        return metrics

    def _finish(self, step: int, scores: Scores) -> None:
        """From here on the step is part of the run, whatever happens."""
        self.finished, self.source_state, self.guarded.moved = step, self.run.source.state(), False
        self.run.rewards.state.global_step = step
        self.num_tokens += int(scores.prompt_lengths.sum() + scores.lengths.sum())

    def log(
        self, step: int, batch: Batch | None, scores: Scores, advantages: Tensor, learned: dict[str, float]
    ) -> dict[str, float]:
        """The step's metrics by TRL's names, which the first process writes."""
        learned = {**learned, "num_tokens": float(self.num_tokens)}
        return self.logs.step(step, batch, scores, advantages, learned)

    def evaluate(self, step: int) -> bool:
        """Held-out quality (greedy) into the metrics; whether its reward is the best so far."""
        if not self.config.eval_interval or not self.run.eval_prompts:
            return False
        self.evaluation = self.phases.evaluate(step)
        reward = self.logs.evaluation(step, self.evaluation).get("eval_reward")
        if reward is None or (self.best_reward is not None and reward <= self.best_reward):
            return False
        self.best_reward = reward
        return step > 0

    def save(self, *, best: bool = False, last: bool = False, stands_in: bool = False) -> None:
        """A checkpoint of the last whole step, which the first process writes.

        stands_in: this process writes it instead, as the first one is lost.
        """
        state = {
            "source": self.source_state,
            "kl_coef": self.kl_coef,
            "best_reward": self.best_reward,
            "num_tokens": self.num_tokens,
            **self.progress.state(self.finished),
            **self.guarded.state(),
            "memory": self.run.fit.state(),
            "cache": self.phases.cache_plan.state(),
            "settings": to_plain(replace(self.config, resume=None)),
        }
        if self.run.save(self.finished, state, best=best, last=last, writes=stands_in):
            self.saved = self.finished

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        with checkpoint.tensors() as tensors:
            restore_optimizer(self.run.policy.model, self.run.optimizer, tensors, checkpoint.folder)
        self.run.source.restore(state["source"])
        if self.config.kl_target is not None:
            self.kl_coef = state["kl_coef"]
        self.best_reward, self.num_tokens = state["best_reward"], state["num_tokens"]
        self.guarded.restore(state)
        self.run.fit.restore(state["memory"])
        self.phases.cache_plan.restore(state.get("cache", {}))
        self.finished, self.source_state = state["step"], state["source"]
        self.run.rewards.state.global_step = self.finished
        self.progress.restore(state)

    def _anyone_stops(self) -> bool:
        """Whether any process has been asked to stop: all stop after the same step."""
        return any(self.run.world.exchange("the next step", self.stop.requested))

    def _due(self, step: int, interval: int) -> bool:
        return bool(interval) and step % interval == 0
