"""Measure what several processes cost on this machine, and work out what more of them would."""

import sys
from typing import Annotated

import numpy as np
import tyro
from loguru import logger
from rich.console import Console

from grpo.experiments.distribution import Network, measure, measured_table, project


def main(
    flags: Annotated[list[str], tyro.conf.Positional] = [],  # noqa: B006
    processes: int = 2,
    rounds: int = 3,
    steps: int = 8,
    network_gbit: float = 100.0,
    request_us: float = 200.0,
    sizes: tuple[int, ...] = (1, 2, 8, 64),
) -> None:
    """Runs of train_lean.py, alone and in several processes with as many threads in all, by turns.

    Args:
        flags: Settings of train_lean.py, after a --.
        processes: Of the run that is not alone.
        rounds: Pairs of runs.
        steps: Measured in each run, after three to warm up.
        network_gbit: Assumed on paper: 10**9 bits a second that a process sends and receives.
        request_us: Assumed on paper: microseconds of one request to the store.
        sizes: Processes to work out on paper.
    """
    logger.remove()
    logger.add(sys.stderr, format="{message}")
    measured = measure(flags, processes=processes, rounds=rounds, steps=steps)
    console = Console(width=140)
    console.print(measured_table(measured))
    low, high = min(measured.ratios), max(measured.ratios)
    print(
        f"{processes} processes take {np.median(measured.ratios):.3f} times the seconds of one "
        f"(rounds: {low:.3f} to {high:.3f}) for {measured.rows} rows"
    )
    print(
        f"a process gives {measured.exchanged_bytes / 2**20:.3f} MB to exchanges in a step and sums "
        f"{measured.summed_bytes / 2**20:.1f} MB of gradients"
    )
    print(f"on paper: {measured.rows} rows a process, {network_gbit:g} Gbit/s, {request_us:g} µs a request")
    console.print(
        project(
            rows_per_process=measured.rows, step_s=measured.step_s[1], summed_bytes=measured.summed_bytes,
            exchanged_bytes_per_row=measured.exchanged_bytes * processes / measured.rows, sizes=sizes,
            network=Network(network_gbit * 1e9 / 8, request_us * 1e-6),
        )
    )  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
