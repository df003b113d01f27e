"""What is recorded of a run's steps: metrics, completions and memory on the disk, a line on the screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loguru import logger
from rich.console import Console
from torch import Tensor

from grpo.config import to_plain
from grpo.data.reward_functions import Scores
from grpo.evaluate import Evaluation
from grpo.model.load import end_names
from grpo.run.metrics import completion_records, reward_metrics, rollout_metrics, warnings_of
from grpo.run.progress import Progress
from grpo.run.screen import StepProgress, held_out_line, in_one_line
from grpo.run.setup import Run
from grpo.run.tracking import RunTracker
from grpo.types import Rollout


class RunLog:
    """Every process takes part in it, as memory is told of each; the first one writes and shows all."""

    def __init__(self, run: Run, console: Console, progress: Progress) -> None:
        self._run, self._config, self._console, self._progress = run, run.config, console, progress
        self._tracker: RunTracker | None = None
        self._ends = end_names(run.policy.model, run.policy.tokenizer, run.config.stop_texts)
        self._warned: set[str] = set()

    @property
    def unwritten(self) -> list[str]:
        """Files and trackers that could not be written to, at least once."""
        return self._tracker.unwritten if self._tracker else []

    @contextmanager
    def opened(self, finished: int) -> Iterator[None]:
        """While the run trains; what an earlier try wrote of steps after `finished` goes."""
        if not self._run.world.is_main:
            yield
            return
        self._tracker = RunTracker(
            self._run.folder, trackers=self._config.trackers, settings=to_plain(self._config),
            before_step=finished or -1,  # evaluation 0 is done again
        )  # fmt: skip
        self._bar = StepProgress(self._console, self._progress, finished=finished)
        try:
            yield
        finally:
            self._bar.close()
            self._tracker.close()

    def step(
        self, step: int, sampled: Rollout, scores: Scores, advantages: Tensor, learned: dict[str, float]
    ) -> dict[str, float]:
        """Record a step; its metrics by TRL's names."""
        run, config = self._run, self._config
        memory, passes = run.device.read(), self._take_passes(f"the log of step {step}")
        metrics = {
            **rollout_metrics(sampled),
            **reward_metrics(scores, config.group_size),
            **learned,
            **run.clock.lap(),
            **run.world.take_traffic(),
            **memory.as_metrics(),
            "progress": self._progress.share(step),
        }
        if self._tracker is None:
            return metrics
        logger.bind(piped=True).info("{}", memory)
        warnings = warnings_of(
            step, metrics, num_rows=config.num_rows, max_new_tokens=config.max_new_tokens, ends=self._ends
        )
        for kind in warnings.keys() - self._warned:  # once a run
            logger.warning("{}", warnings[kind])
        self._warned |= warnings.keys()
        self._tracker.log(step, metrics)
        self._tracker.log_memory(step, passes)
        completions = completion_records(sampled, scores, advantages, config.logged_completions)
        self._tracker.log_completions(step, completions)
        self._bar.update(step, in_one_line(metrics, config.num_rows))
        if config.show_completions and step % config.show_completions == 0:
            self._bar.show(next(completion_records(sampled, scores, advantages, 1, first=step)))
        return metrics

    def evaluation(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Record an evaluation; the means of its columns."""
        passes, means = (
            self._take_passes(f"the log of the evaluation at step {step}"),
            evaluation.as_metrics(),
        )
        if self._tracker is not None:
            self._tracker.log_memory(step, passes)
            self._tracker.log(step, {**means, **evaluation.interval_metrics()})
        logger.info("held-out at step {}: {}", step, held_out_line(means))
        return means

    def _take_passes(self, what: str) -> list[list[dict[str, Any]]]:
        """Of each process, what its phases held since they were last taken."""
        passes = self._run.fit.take_passes()
        self._run.measured.note(passes)
        self._run.device.mind_fragments(max((done_pass.expected_bytes for done_pass in passes), default=0))
        return self._run.world.exchange(what, [done_pass.as_dict() for done_pass in passes])
