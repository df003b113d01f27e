"""What several processes cost: two with a thread each against one with two threads, and what follows.

Whole runs of the training command take turns. From the bytes that a step sends and the seconds its parts
take, `project` says what would dominate with more processes: arithmetic, not a measurement.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from loguru import logger
from rich import box
from rich.table import Table

from grpo.config import CONFIG_FILE
from grpo.config.reading import read_yaml
from grpo.run.tracking import METRICS_FILE, read_lines

REPOSITORY = Path(__file__).parents[2]
WARM_UP_STEPS = 3
OURS, OTHERS = ("sample", "reward", "score", "learn", "update"), ("wait", "reduce", "other")
EXCHANGED, SUMMED = "processes/exchanged_bytes", "processes/summed_bytes"


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of all rounds."""

    step_s: Mapping[int, float]
    """By number of processes."""
    split_s: Mapping[int, Mapping[str, float]]
    ratios: Sequence[float]
    """Of each round: seconds a step of several processes over those of one."""
    rows: int
    exchanged_bytes: float
    """That one of two processes gives to the others in a step."""
    summed_bytes: float
    """Of gradients."""


def measure(flags: Sequence[str], *, processes: int, rounds: int, steps: int) -> Measured:
    """Train with these flags of train_lean.py, alone and in several processes, by turns.

    Each run has one thread for each process. RuntimeError if a run fails.
    """
    lines: dict[int, list[Mapping[str, float]]] = {1: [], processes: []}
    ratios = []
    with TemporaryDirectory() as folder:
        for turn in range(rounds):
            took = {}
            for size in (1, processes) if turn % 2 else (processes, 1):
                made = _train(Path(folder), f"{turn}-{size}", flags, size, processes // size, steps)
                lines[size] += made
                took[size] = float(np.median([line["step_time"] for line in made]))
                logger.info("round {}, {} processes: {:.3f} s a step", turn + 1, size, took[size])
            ratios.append(took[processes] / took[1])
    names = [*OURS, *OTHERS]
    return Measured(
        {size: _median(each, "step_time") for size, each in lines.items()},
        {size: {name: _median(each, f"timing/{name}_s") for name in names} for size, each in lines.items()},
        ratios,
        rows=round(_median(lines[1], "rows")),
        exchanged_bytes=_median(lines[processes], EXCHANGED),
        summed_bytes=_median(lines[processes], SUMMED),
    )


def _train(
    folder: Path, name: str, flags: Sequence[str], processes: int, threads: int, steps: int
) -> list[Mapping[str, float]]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [
        *(sys.executable, *(launch if processes > 1 else ()), str(REPOSITORY / "train_lean.py")),
        *("--steps", str(WARM_UP_STEPS + steps), "--eval-interval", "0", "--checkpoint-interval", "0"),
        *("--trackers", "--runs-dir", str(folder), "--name", name, "--device", "cpu", *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    records = read_lines(folder / name / METRICS_FILE)
    rows = _rows(folder / name)
    return [{**record, "rows": rows} for record in records if record["step"] > WARM_UP_STEPS]


def _rows(folder: Path) -> int:
    return int(read_yaml(folder / CONFIG_FILE)["batch_size"])


def _median(lines: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.median([line.get(name, 0.0) for line in lines]))


def measured_table(measured: Measured) -> Table:
    """Seconds of a step and of its parts, by number of processes."""
    table = Table("processes", "threads each", "step, s", *OURS, *OTHERS, box=box.MARKDOWN)
    most = max(measured.step_s)
    for size, seconds in measured.step_s.items():
        split = (f"{measured.split_s[size][name]:.3f}" for name in (*OURS, *OTHERS))
        table.add_row(str(size), str(most // size), f"{seconds:.3f}", *split)
    return table


def verdicts(measured: Measured) -> dict[str, bool]:
    ratio = float(np.median(measured.ratios))
    return {
        f"several processes take {ratio:.2f} times the seconds of one (at most 1.25)": ratio <= 1.25,
        f"a row takes {measured.exchanged_bytes / measured.rows:.0f} bytes in exchanges (at most 2,000)":
        0 < measured.exchanged_bytes <= 2000 * measured.rows,
    }  # fmt: skip


# -------------------------------------------------------------------------------------- on paper


@dataclass(frozen=True)
class Network:
    """Assumptions about what joins the processes."""

    bytes_per_s: float
    """That each process can send, and receive, at once."""
    request_s: float
    """Of one request to the store."""


def exchange_seconds(processes: int, bytes_each: float, exchanges: int, network: Network) -> float:
    """Everybody reads everybody's part from the first process's store, whose link carries it all.

    An exchange is three requests (give, look, read) for each process, and the store answers one at a time.
    """
    if processes == 1:
        return 0.0
    requests = exchanges * 3 * processes * network.request_s
    return requests + processes * (processes - 1) * bytes_each / network.bytes_per_s


def reduce_seconds(processes: int, num_bytes: float, network: Network) -> float:
    """A ring's all-reduce: each sends 2 (W - 1) / W of the bytes (Patarasuk and Yuan 2009)."""
    return 2 * (processes - 1) / processes * num_bytes / network.bytes_per_s


EXCHANGES_A_STEP = 5
"""Sampling, learning, the log, the time, the next step; scoring has one more where the KL is a reward."""


@dataclass(frozen=True)
class Step:
    """What one process does in a step."""

    rows: int
    seconds: float
    summed_bytes: float
    """Of gradients."""
    row_bytes: float
    """That each of its rows takes in an exchange."""


def project(step: Step, sizes: Sequence[int], network: Network) -> Table:
    """What a step would take if each of so many processes had as many rows (weak scaling)."""
    table = Table(
        "processes", "rows a step", "own work, s", "gradients, s", "exchanges, s", "efficiency",
        box=box.MARKDOWN,
    )  # fmt: skip
    for size in sizes:
        reduced = reduce_seconds(size, step.summed_bytes, network)
        exchanged = exchange_seconds(size, step.row_bytes * step.rows, EXCHANGES_A_STEP, network)
        efficiency = step.seconds / (step.seconds + reduced + exchanged)
        table.add_row(
            str(size), f"{size * step.rows:,}", f"{step.seconds:.2f}", f"{reduced:.3f}", f"{exchanged:.3f}",
            f"{efficiency:.0%}",
        )  # fmt: skip
    return table
