"""How well memory is predicted and planned, and what that costs: six benchmarks on the CPU."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import tyro
from benchmarks.checkpointing_cost import (
    checkpointing_costs,
    cost_table,
    cost_verdicts,
    cost_works,
)
from benchmarks.limit_ladder import ladder, ladder_table, ladder_verdicts
from benchmarks.limited_runs import How
from benchmarks.memory_trials import (
    full_grid,
    predict_trials,
    prediction_table,
    prediction_verdicts,
    quick_grid,
)
from benchmarks.planning_trials import (
    cases,
    largest_table,
    largest_trials,
    largest_verdicts,
    overhead_steps,
    overhead_table,
    overhead_verdicts,
)
from benchmarks.random_gpt2 import make_random_gpt2
from benchmarks.run_grid import SHAPE_OF_30M, few_verdicts, grid, grid_table, grid_verdicts
from benchmarks.verdicts import conclude
from loguru import logger
from rich.table import Table

from grpo.commands.screen import screen
from grpo.config import Config
from grpo.environment import restart_without_thread_cache, set_library_defaults
from grpo.run.screen import configure_logging

T = TypeVar("T")
CONSOLE = screen(width=160)  # the tables are for docs/measurements.md, whatever the terminal


def predict(quick: bool = False, only: str = "", output: Path | None = None) -> None:
    """Predicted against allocated bytes, over a grid of models, settings and shapes.

    Args:
        quick: A small grid, about a minute.
        only: Settings whose description holds these words, such as "rook-tiny float32".
        output: A JSON file for every cell of the grid.
    """
    trials = _until_stopped(predict_trials(quick_grid() if quick else full_grid(), only=only))
    _conclude(prediction_table(trials), prediction_verdicts(trials), trials, output)


def largest(quick: bool = False, output: Path | None = None) -> None:
    """The rows that the planner chooses, against trying every multiple of the group.

    Args:
        quick: One small case, in seconds.
        output: A JSON file for every budget.
    """
    trials = _until_stopped(largest_trials(cases(quick)))
    _conclude(largest_table(trials), largest_verdicts(trials), trials, output)


def overhead(steps: int = 20, skip: int = 3, batch_size: int = 64, output: Path | None = None) -> None:
    """What monitor and planner cost of a training step on the bundled model.

    Args:
        steps: Steps that are timed.
        skip: Steps before, in which memory is measured operation by operation.
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


def checkpointing(quick: bool = False, rounds: int = 5, output: Path | None = None) -> None:
    """What each kind of gradient checkpointing saves and costs of the learning phase, beside rows in halves.

    Args:
        quick: A small shape, in seconds.
        rounds: Times that each is timed; they take turns.
        output: A JSON file for all of them.
    """
    costs = _until_stopped(checkpointing_costs(cost_works(quick), rounds))
    _conclude(cost_table(costs), cost_verdicts(costs), costs, output)


def runs(only: str = "", output: Path | None = None) -> None:
    """What whole runs hold, as the system counts it, against what was said of them before. About 20 minutes.

    Args:
        only: Runs whose description holds these words, such as "rook-tiny --batch-size 64". Fewer than 20 are
            too few for shares of 95 %: none of them may be off by three half intervals.
        output: A JSON file for every run.
    """
    with TemporaryDirectory() as folder:
        outcomes = _until_stopped(grid(Path(folder), only=only))
    verdicts = grid_verdicts(outcomes) if len(outcomes) >= 20 else few_verdicts(outcomes)
    _conclude(grid_table(outcomes), verdicts, outcomes, output)


def limits(
    how: How = "--memory-limit", batch_size: int = 256, rungs: int = 8, large: bool = True,
    output: Path | None = None,
) -> None:  # fmt: skip
    """A ladder of limits: from the smallest that is not refused to twice the need. About 15 minutes.

    Args:
        how: Who sets the limit. A cgroup needs root.
        batch_size: Completions a step.
        rungs: Limits a model and precision.
        large: A GPT-2 of 30 M as well, at an eighth of the batch.
        output: A JSON file for every run.
    """
    import torch

    from grpo.model.target import compute_dtype

    # Where bf16 is not native, a step in it takes minutes.
    native = compute_dtype("auto", torch.device("cpu")) == torch.bfloat16
    precisions = ["bf16", "fp32"] if native else ["fp32"]
    with TemporaryDirectory() as folder:
        steps = ladder(["rook-tiny"], precisions, batch_size=batch_size, how=how, rungs=rungs)
        rows = _until_stopped(steps)
        if large:
            model = str(make_random_gpt2(Path(folder) / "30m", **SHAPE_OF_30M))
            rows += _until_stopped(
                ladder([model], precisions, batch_size=batch_size // 8, how=how, rungs=rungs)
            )
    _conclude(ladder_table(rows, how), ladder_verdicts(rows), [outcome for _, _, outcome in rows], output)


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
            "predict": predict,
            "largest": largest,
            "overhead": overhead,
            "checkpointing": checkpointing,
            "runs": runs,
            "limits": limits,
        },
        description=__doc__,
    )
