"""Measure what several processes cost on this machine, and work out what more of them would."""

import sys
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from benchmarks.distribution import Network, Step, measure, measured_table, project, verdicts
from benchmarks.verdicts import conclude
from loguru import logger
from rich.console import Console

from grpo.commands.screen import screen


@dataclass(frozen=True)
class Settings:
    """Runs of train_lean.py, alone and in several processes with as many threads in all, by turns."""

    flags: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Settings of train_lean.py, after a --."""
    processes: int = 2
    """Of the run that is not alone."""
    rounds: int = 3
    """Pairs of runs."""
    steps: int = 8
    """Measured in each run, after three to warm up."""
    assumed_step_s: float | None = None
    """Measure nothing: work out a step of one process that takes so many seconds."""
    assumed_parameters: float = 124.4e6
    """With that: numbers that are trained, 4 bytes a gradient."""
    assumed_rows: int = 64
    """With that: rows of each process."""
    assumed_row_bytes: float = 300.0
    """With that: what a row takes in an exchange, compressed."""
    gbit: float = 100.0
    """On paper: 10**9 bits a second that a process sends and receives."""
    request_us: float = 200.0
    """On paper: microseconds of one request to the store."""
    sizes: tuple[int, ...] = (1, 2, 8, 64)
    """On paper: processes."""


def main(settings: Settings) -> int:
    console, status = screen(width=140), 0
    if settings.assumed_step_s is None:
        step, status = _measure(settings, console)
    else:
        step = Step(
            settings.assumed_rows, settings.assumed_step_s,
            summed_bytes=4 * settings.assumed_parameters, row_bytes=settings.assumed_row_bytes,
        )  # fmt: skip
    print(
        f"on paper: {step.rows} rows a process, {step.seconds:.2f} s a step, {settings.gbit:g} Gbit/s, "
        f"{step.summed_bytes / 2**20:.1f} MB of gradients, {settings.request_us:g} µs a request"
    )
    network = Network(settings.gbit * 1e9 / 8, settings.request_us * 1e-6)
    console.print(project(step, settings.sizes, network))
    return status


def _measure(settings: Settings, console: Console) -> tuple[Step, int]:
    measured = measure(
        settings.flags, processes=settings.processes, rounds=settings.rounds, steps=settings.steps
    )
    console.print(measured_table(measured))
    low, high = min(measured.ratios), max(measured.ratios)
    print(
        f"{settings.processes} processes take {np.median(measured.ratios):.3f} times the seconds of one "
        f"(rounds: {low:.3f} to {high:.3f}) for {measured.rows} rows"
    )
    print(
        f"a process gives {measured.exchanged_bytes / 2**10:.1f} kB to exchanges in a step and sums "
        f"{measured.summed_bytes / 2**20:.1f} MB of gradients"
    )
    row_bytes = measured.exchanged_bytes * settings.processes / measured.rows
    step = Step(measured.rows, measured.step_s[1], measured.summed_bytes, row_bytes)
    return step, conclude(verdicts(measured), console)


if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, format="{message}")
    sys.exit(main(tyro.cli(Settings)))
