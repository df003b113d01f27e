"""A run in a process of its own: started, watched, and read from the files that it wrote.

    python -m grpo.workbench.trial FOLDER

FOLDER holds the task; the run's files come into it, and how it ended. Running out of memory spoils nothing
but its own process, whether that raises, or the system ends it.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
from rich.console import Console

from grpo.config import Config, from_plain, to_plain
from grpo.config.groups import PromptSettings
from grpo.files import write_whole
from grpo.learning.step import Diverged
from grpo.logs.screen import configure_logging
from grpo.logs.tracking import METRICS_FILE, NewLines
from grpo.memory import DoesNotFit, is_out_of_memory
from grpo.model.load import load_tokenizer
from grpo.model.target import choose_device, choose_model
from grpo.run.inputs import Inputs
from grpo.run.setup import open_run
from grpo.trainer import Trainer
from grpo.workbench.lm import train_lm
from grpo.workbench.settings import Task
from grpo.workbench.sizes import ENDED_FILE, HELDOUT_FILE, TASK_FILE, read_json

PRINTED_FILE = "printed.txt"
"""All that the process printed."""
WATCHED_EVERY_S = 0.2
_TAIL_LINES = 3
_THREADS_NEED_MEMORY = ("Thread creation failed", "can't start new thread", "std::bad_alloc")


class TrialStatus(NamedTuple):
    """How a run ended (ok, out of memory, diverged, failed), and why, if it did not end well."""

    status: str
    message: str | None = None

    def __str__(self) -> str:
        return f"{self.status} ({self.message})" if self.message else self.status


def run_task(
    task: Task,
    folder: Path,
    watch: Callable[[Mapping[str, Any]], None] = lambda line: None,
    tuned: Sequence[Mapping[str, float | None]] = (),
) -> TrialStatus:
    """Do `task` in a process of its own, which Ctrl-C ends as well. folder, tuned: see `write_task`.

    watch: given each line of metrics.jsonl as it comes.
    """
    write_task(task, folder, tuned)
    new_lines, code = NewLines(folder / METRICS_FILE), None
    with (folder / PRINTED_FILE).open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)], stdout=printed, stderr=printed
        )
        try:
            while code is None:
                time.sleep(WATCHED_EVERY_S)
                code = process.poll()
                for line in new_lines():
                    watch(line)
        finally:
            process.kill()
            process.wait()
    if content := read_json(folder / ENDED_FILE):
        return TrialStatus(**content)
    ended = _death(
        code, (folder / PRINTED_FILE).read_text(encoding="utf-8"), limited=task.memory_limit is not None
    )
    return write_ended(folder, ended)


def write_task(task: Task, folder: Path, tuned: Sequence[Mapping[str, float | None]] = ()) -> None:
    """Write the settings of a process into a folder, which is emptied of an earlier try.

    tuned: learning rates that were tried before, with their held-out quality.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_whole(folder / TASK_FILE, json.dumps({**to_plain(task), "tuned": tuned}, indent=1))


def read_task(folder: Path) -> Task:
    """Read what `write_task` wrote."""
    values = read_json(folder / TASK_FILE)
    values.pop("tuned")
    task: Any = from_plain(values, Task())
    return task


def write_ended(folder: Path, ended: TrialStatus) -> TrialStatus:
    """Write into a run's folder how it ended."""
    write_whole(folder / ENDED_FILE, json.dumps(ended._asdict()) + "\n")
    return ended


def _death(code: int, text: str, *, limited: bool) -> TrialStatus:
    """How a run ended whose process died without writing it."""
    last = "; ".join(text.strip().splitlines()[-_TAIL_LINES:])
    if code == -signal.SIGKILL:
        return TrialStatus(
            "out of memory", "the system ended the process (SIGKILL), as it does when memory runs out"
        )
    if limited and (code < 0 or any(words in text for words in _THREADS_NEED_MEMORY)):
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return TrialStatus("out of memory", f"ended under its limit of memory ({name}) {last}".strip())
    return TrialStatus("failed", last or f"exit status {code}")


# ------------------------------------------------------------------------------- within the process


def do_task(folder: Path) -> TrialStatus:
    """Do the task of a folder in this process; whatever ends it is a result."""
    ended = TrialStatus("ok")
    try:
        task = read_task(folder)
        torch.backends.cuda.matmul.allow_tf32 |= task.tf32
        (train_lm if task.objective == "lm" else train_grpo)(task, folder)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, DoesNotFit | MemoryError) or is_out_of_memory(error):
            ended = TrialStatus("out of memory", reason)
        elif isinstance(error, FloatingPointError | Diverged):
            ended = TrialStatus("diverged", reason)
        else:
            ended = TrialStatus("failed", f"{type(error).__name__}: {reason}")
            logger.opt(exception=error).error("the task failed")
    return write_ended(folder, ended)


def train_grpo(task: Task, folder: Path) -> None:
    """A run of the trainer, whose every phase has to take all rows at once, but learning `train_rows`.

    Memory may run out.
    """
    config = replace(
        task.train,
        rollout_rows=task.num_rows,
        score_rows=task.num_rows,
        train_rows=task.rows,
        runs_dir=folder.parent,
        name=folder.name,
    )
    inputs = Inputs(is_trial=True)
    if task.prompt_tokens is not None:
        inputs = replace(inputs, prompts=made_up_prompts(config, task.prompt_tokens), rewards=[by_chance])
        config = replace(
            config,
            **vars(PromptSettings()),
            reward_weights=(),
            engine="off",
            heldout_share=0.0,
            credit="whole",
        )
    with open_run(config, inputs) as run:
        trainer = Trainer(run)
        for _ in trainer:
            pass
        if trainer.evaluation is not None and "reward" in trainer.evaluation.scores:
            values = trainer.evaluation.scores["reward"].tolist()
            write_whole(folder / HELDOUT_FILE, json.dumps({"step": trainer.finished, "values": values}))


def made_up_prompts(config: Config, num_tokens: int) -> list[dict[str, str]]:
    """Prompts for a step, each of `num_tokens` tokens, or a few less if the tokenizer makes no such text."""
    tokenizer = load_tokenizer(choose_model(config.model, choose_device(config.device)))
    text = "a b c d e f g h " * num_tokens
    letters = bisect_right(
        range(len(text)), num_tokens, key=lambda end: len(tokenizer(text[:end])["input_ids"])
    )
    return [{"prompt": text[: max(1, letters - 1)]} for _ in range(config.num_prompts)]


def by_chance(completions: list[str], **_: Any) -> list[float]:
    """A random reward: it differs within a group, and teaches nothing."""
    return torch.rand(len(completions)).tolist()


def main() -> None:
    """Do the task whose folder is named on the command line; Ctrl-C ends it without a message."""
    configure_logging("INFO", Console(stderr=True, markup=False))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(do_task(Path(sys.argv[1])).status != "ok")


if __name__ == "__main__":
    main()
