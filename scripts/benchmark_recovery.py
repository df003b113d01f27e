"""Running out of memory: 200 faults on purpose, and a real limit on this process. See --help."""

import sys
import tempfile
from pathlib import Path

import tyro
from benchmarks.random_gpt2 import make_random_gpt2
from benchmarks.recovery_trials import SAME, inject_faults, run_under_limit
from loguru import logger
from rich.console import Console
from rich.table import Table

from grpo.commands.screen import screen
from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.memory.budget import GB


def main(points: int = 200, limit: bool = True) -> None:
    """Print what became of every run that ran out of memory.

    Args:
        points: Faults, spread over sampling, scoring, learning, evaluation and checkpoints; 0: none.
        limit: Also run under a real limit (Linux), planned, unplanned, and planned wrongly.
    """
    logger.remove()
    console, good = screen(width=110), True
    if points:
        good &= _faults(console, points)
    if limit:
        good &= _limits(console)
    sys.exit(not good)


def _faults(console: Console, points: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model=str(make_random_gpt2(Path(folder) / "model")), precision="fp64", device="cpu", engine="off",
            steps=3, batch_size=16, group_size=4, eval_interval=2, eval_prompts=8, checkpoint_interval=2,
            trackers=(), logged_completions=16, sampling=SamplingSettings(max_new_tokens=12),
        )  # fmt: skip
        results = inject_faults(config, points)
    table = Table("phase", "faults", "fired", "same result", "largest difference", title="Faults on purpose")
    for result in results:
        shown = (result.points, result.fired, result.same, f"{result.largest_difference:.1e}")
        table.add_row(result.phase, *map(str, shown))
    console.print(table)
    return all(result.points == result.fired == result.same for result in results)


def _limits(console: Console) -> bool:
    config = Config(
        model="rook-tiny", precision="fp64", device="cpu", engine="off", steps=3, batch_size=64,
        eval_interval=0, checkpoint_interval=0, trackers=(), sampling=SamplingSettings(max_new_tokens=64),
    )  # fmt: skip
    results = run_under_limit(config, share=0.75, bias=0.6)
    table = Table("run", "limit", "finished", "rows when learning", "retries", "difference", title="A limit")
    for result in results:
        table.add_row(
            result.name,
            f"{result.limit_bytes / GB:.2f} GB" if result.limit_bytes else "",
            "yes" if result.finished else f"no: {result.error[:60]}",
            str(result.rows.get("learn", "")),
            str(result.retries),
            f"{result.difference:.1e}",
        )
    console.print(table)
    _, naive, planned, biased = results
    survived = all(result.finished and result.difference <= SAME for result in (planned, biased))
    return not naive.finished and survived and biased.retries > 0


if __name__ == "__main__":
    tyro.cli(main)
