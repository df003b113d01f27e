"""Records of a run's steps: metrics, completions and memory on the disk, a line on the screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loguru import logger
from rich.console import Console
from torch import Tensor

from grpo.config import to_plain
from grpo.data.reward_functions import Scores
from grpo.evaluate import Evaluation
from grpo.logs.metrics import (
    chosen_rows,
    completion_records,
    length_metrics,
    reward_metrics,
    warnings_of,
)
from grpo.logs.progress import Progress
from grpo.logs.screen import StepProgress, held_out_line, in_one_line
from grpo.logs.tracking import RunTracker
from grpo.model.load import end_names
from grpo.run.setup import Run
from grpo.types import Batch


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
            self._run.folder,
            trackers=self._config.trackers,
            settings=to_plain(self._config),
            before_step=finished or -1,  # evaluation 0 is done again
        )
        self._bar = StepProgress(self._console, self._progress, finished=finished)
        try:
            yield
        finally:
            self._bar.close()
            self._tracker.close()

    def step(
        self,
        step: int,
        batch: Batch | None,
        scores: Scores,
        advantages: Tensor,
        learned: dict[str, float],
    ) -> dict[str, float]:
        """Records a step; its metrics by TRL's names. batch: this process's; the rest is the step's."""
        run, config = self._run, self._config
        num_rows, shows = len(scores.lengths), config.show_completions and step % config.show_completions == 0
        chosen = chosen_rows(config.logged_completions, num_rows)
        shown = chosen_rows(1, num_rows, first=step) if shows else []
        records = []
        if batch is not None:
            first_row, wanted = int(run.share().rows[0]), sorted({*chosen, *shown})
            records = completion_records(batch, first_row, scores, advantages, wanted)
        memory, (passes, everybodys) = run.device.read(), self._exchange(f"the log of step {step}", records)
        metrics = {
            **length_metrics(scores),
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
        by_row = {record["row"]: record for record in everybodys}
        self._tracker.log_completions(step, [by_row[row] for row in chosen])
        self._bar.update(step, in_one_line(metrics, config.num_rows))
        for row in shown:
            self._bar.show(by_row[row])
        return metrics

    def evaluation(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Record an evaluation; the means of its columns."""
        passes, _ = self._exchange(f"the log of the evaluation at step {step}", [])
        means = evaluation.as_metrics()
        if self._tracker is not None:
            self._tracker.log_memory(step, passes)
            self._tracker.log(step, {**means, **evaluation.interval_metrics()})
        logger.info("held-out at step {}: {}", step, held_out_line(means))
        return means

    def _exchange(
        self, what: str, records: list[dict[str, Any]]
    ) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
        """Returns what each process's phases held since they were last taken, and all processes' records."""
        passes = self._run.fit.take_passes()
        self._run.measured.note(passes)
        self._run.device.choose_malloc_policy(
            max((done_pass.expected_bytes for done_pass in passes), default=0)
        )
        mine = {"passes": [done_pass.as_dict() for done_pass in passes], "records": records}
        parts = self._run.world.exchange(what, mine)
        return [part["passes"] for part in parts], [record for part in parts for record in part["records"]]
