"""GRPO at one batch size: a run of the trainer, read while it writes. Its checkpoints are not kept."""

import shutil
from math import fsum
from typing import Any

from grpo.run.setup import Run, open_run
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, NewLines
from grpo.trainer import Trainer
from grpo.workbench.sweep.settings import run_config
from grpo.workbench.sweep.worker import Say, SizeTask, point, predicted_facts, time_facts

Z95 = 1.96


def train_grpo(task: SizeTask, say: Say) -> None:
    """All steps of one size. MemoryError where the batch would have to be split and that is not asked for."""
    shutil.rmtree(task.folder, ignore_errors=True)  # of a try that was cut short
    config = run_config(
        task.settings, task.batch_size, total=task.total, rate=task.learning_rate, folder=task.folder,
        evaluations=task.evaluations,
    )  # fmt: skip
    try:
        with open_run(config) as run:
            say({"row": predicted_facts(run.plan.largest)})
            run.fit.count_no_tensors()  # which would take up the time that is to be compared
            reader = _Reader(task, run, say)
            for step in Trainer(run):
                reader.read(step.number)
            reader.read(config.steps)
    finally:
        shutil.rmtree(task.folder / "checkpoints", ignore_errors=True)


class _Reader:
    """Turns what the trainer has logged since into records of the sweep."""

    def __init__(self, task: SizeTask, run: Run, say: Say) -> None:
        self._task, self._run, self._say = task, run, say
        self._metrics = NewLines(run.folder / METRICS_FILE)
        self._memory = NewLines(run.folder / MEMORY_FILE)
        self._seconds: list[float] = []
        self._rate = task.learning_rate
        self._peak = 0
        self._check_rows()

    def read(self, step: int) -> None:
        for line in self._memory():
            self._peak = max(self._peak, line["process_bytes"])
            if line["retries"]:
                self._split(f"{line['phase']} ran out of memory with the whole batch at once")
        for line in self._metrics():
            self._say_point(line)
        if self._seconds:
            facts = time_facts(self._seconds, self._task.batch_size)
            self._say({"row": {**facts, "peak_bytes": self._peak}})
        if step < self._task.updates:
            self._check_rows()

    def _say_point(self, line: dict[str, Any]) -> None:
        done = line["step"] * self._task.batch_size
        if line.get("eval_reward") is not None:
            self._say({"row": {"heldout_stderr": _standard_error(line)}})
            self._say(point(line["step"], done, fsum(self._seconds), self._rate, heldout=line["eval_reward"]))
        if "reward" in line:
            self._seconds.append(line["step_time"])
            self._rate = line["learning_rate"]
            self._say(point(line["step"], done, fsum(self._seconds), self._rate, train=line["reward"]))

    def _check_rows(self) -> None:
        """A size is what it says: the plan may not split it, unless rows are asked for."""
        for phase, rows in self._run.fit.planned().items():
            if rows < self._task.batch_size and phase != "evaluate":
                self._split(f"{phase} is planned with {rows} rows at once in {self._run.plan.budget}")

    def _split(self, reason: str) -> None:
        if self._task.settings.train_rows is None:
            raise MemoryError(f"{reason}; --train-rows lets the batch be split")


def _standard_error(line: dict[str, Any]) -> float | None:
    """From the 95 % interval that the trainer logs beside a mean."""
    low, high = (line.get(f"eval_reward/{end}") for end in ("low", "high"))
    if low is None or high is None:
        return None
    return float(high - low) / (2 * Z95)
