"""How well memory is predicted and planned, and what that costs: four benchmarks on the CPU."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import tyro
from benchmarks.accuracy import accuracy_runs, accuracy_table, accuracy_verdicts
from benchmarks.limits import How, ladder, ladder_table, ladder_verdicts, without_passes
from benchmarks.planning_trials import (
    overhead_steps,
    overhead_table,
    overhead_verdicts,
    rows_table,
    rows_trials,
    rows_verdicts,
)
from benchmarks.random_gpt2 import SHAPE_OF_30M, make_random_gpt2
from benchmarks.verdicts import conclude
from loguru import logger
from rich.table import Table

from grpo.commands.screen import screen
from grpo.config import Config
from grpo.environment import restart_without_thread_cache, set_library_defaults
from grpo.run.screen import configure_logging

T = TypeVar("T")
CONSOLE = screen(width=160)  # the tables are for docs/measurements.md, whatever the terminal


def accuracy(quick: bool = False, output: Path | None = None) -> None:
    """What tensors add in whole runs of the command, against what was said before their first step.

    Args:
        quick: Four runs of small models, not 24.
        output: A JSON file for every phase.
    """
    with TemporaryDirectory() as folder:
        done = _until_stopped(accuracy_runs(Path(folder), quick=quick))
    runs, found = [run for run, _ in done], [each for _, some in done for each in some]
    _conclude(accuracy_table(found), accuracy_verdicts(runs, found), found, output)


def rows(quick: bool = False, output: Path | None = None) -> None:
    """The rows that a plan for a card that is not there chooses, against trying them out.

    Args:
        quick: Two settings, not ten.
        output: A JSON file for every phase.
    """
    trials = _until_stopped(rows_trials(quick))
    _conclude(rows_table(trials), rows_verdicts(trials), trials, output)


def overhead(steps: int = 20, skip: int = 2, batch_size: int = 64, output: Path | None = None) -> None:
    """What measuring and planning cost of a training step on the bundled model.

    Args:
        steps: Steps that are timed.
        skip: Steps before, in which tensors are counted one by one.
        batch_size: Completions a step.
        output: A JSON file for every step.
    """
    with TemporaryDirectory() as folder:
        config = Config(
            steps=skip + steps, batch_size=batch_size, model="rook-tiny", engine="off", eval_interval=0,
            checkpoint_interval=0, runs_dir=Path(folder),
        )  # fmt: skip
        timed = overhead_steps(config, CONSOLE, skip=skip)
    _conclude(overhead_table(timed), overhead_verdicts(timed), timed, output)


def limits(
    how: How = "--memory-limit", batch_size: int = 256, rungs: int = 8, large: bool = True,
    quick: bool = False, output: Path | None = None,
) -> None:  # fmt: skip
    """A ladder of limits: from the smallest that is not refused to twice the need. Some 20 minutes.

    Args:
        how: Who sets the limit. A cgroup needs root.
        batch_size: Completions a step.
        rungs: Limits a model and precision, two or more.
        large: A GPT-2 of 30 M as well, at an eighth of the batch.
        quick: Let a step at twice the need take 15 % longer, not 5 %, as few are timed.
        output: A JSON file for every run.
    """
    import torch

    from grpo.model.target import compute_dtype

    # Where bf16 is not native, a step in it takes minutes.
    native = compute_dtype("auto", torch.device("cpu")) == torch.bfloat16
    precisions = ["bf16", "fp32"] if native else ["fp32"]
    with TemporaryDirectory() as folder:
        found = _until_stopped(ladder(["rook-tiny"], precisions, batch_size=batch_size, how=how, rungs=rungs))
        if large:
            model = str(make_random_gpt2(Path(folder) / "30m", **SHAPE_OF_30M))
            found += _until_stopped(
                ladder([model], precisions, batch_size=batch_size // 8, how=how, rungs=rungs)
            )
    verdicts = ladder_verdicts(found, bar=0.15 if quick else 0.05)
    _conclude(ladder_table(found, how), verdicts, without_passes(found), output)


def _until_stopped(trials: Iterator[T]) -> list[T]:
    """All of them, or those before Ctrl-C."""
    done = []
    try:
        for trial in trials:
            done.append(trial)
    except KeyboardInterrupt:
        logger.warning("stopped: this is what was measured so far")
    return done


def _conclude(table: Table, verdicts: Mapping[str, bool], rows: Sequence[Any], output: Path | None) -> None:
    CONSOLE.print(table)
    status = conclude(verdicts, CONSOLE)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"verdicts": verdicts, "rows": [asdict(row) for row in rows]}, indent=1))
    sys.exit(status)


if __name__ == "__main__":
    restart_without_thread_cache()  # seconds and bytes are to be those of train_lean.py
    set_library_defaults()
    configure_logging("INFO", CONSOLE)
    tyro.extras.subcommand_cli_from_dict(
        {
            "accuracy": accuracy,
            "limits": limits,
            "rows": rows,
            "overhead": overhead,
        },
        description=__doc__,
    )
