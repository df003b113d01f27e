"""What a run writes down and shows of its steps: numbers, completions, memory, doubts, a line each."""

from collections.abc import Mapping, Sequence
from typing import Any

from loguru import logger
from rich.console import Console
from torch import Tensor

from grpo.config import to_flat
from grpo.data.reward_functions import Scores
from grpo.evaluate import Evaluation
from grpo.memory.device import MemoryReading
from grpo.model.load import end_names
from grpo.run.metrics import Doubts, completion_records
from grpo.run.progress import Progress
from grpo.run.screen import StepProgress, held_out_line, in_one_line
from grpo.run.setup import Run
from grpo.run.tracking import NoTracker, RunTracker
from grpo.types import Rollout


class Journal:
    """One run's, from `finished` steps on; what another process keeps is empty."""

    def __init__(self, run: Run, console: Console, progress: Progress, *, finished: int) -> None:
        config = run.config
        self._run, self._config = run, config
        ends = end_names(run.policy.model, run.policy.tokenizer, config.sampling.stop_texts)
        self._doubt = Doubts(config.num_rows, config.sampling.max_new_tokens, ends)
        self.tracker = NoTracker()
        if run.world.is_main:
            self.tracker = RunTracker(
                run.folder, trackers=config.trackers, settings=to_flat(config),
                before_step=finished or -1,  # evaluation 0 is done again
            )  # fmt: skip
        self._bar = StepProgress(console, progress, finished=finished)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        memory: MemoryReading,
        records: Sequence[Sequence[Mapping[str, Any]]],
        sampled: Rollout,
        scores: Scores,
        advantages: Tensor,
    ) -> None:
        """records: of each process, what its phases held."""
        if not self._run.world.is_main:
            return
        logger.bind(piped=True).info("{}", memory)
        self._doubt(step, metrics)
        self.tracker.log(step, metrics)
        self.tracker.log_memory(step, records)
        said = completion_records(sampled, scores, advantages, self._config.logged_completions)
        self.tracker.log_completions(step, said)
        self._bar.update(step, in_one_line(metrics, self._config.num_rows))
        if (shown := self._config.show_completions) and step % shown == 0:
            self._bar.show(next(completion_records(sampled, scores, advantages, 1, first=step)))

    def evaluation(
        self, step: int, result: Evaluation, records: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """records: as of `step`."""
        means = result.as_metrics()
        self.tracker.log_memory(step, records)
        self.tracker.log(step, {**means, **result.interval_metrics()})
        logger.info("held-out at step {}: {}", step, held_out_line(means))

    def close(self) -> None:
        self._bar.close()
        self.tracker.close()
