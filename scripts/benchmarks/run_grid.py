"""Many kinds of runs, each held against what its plan said: batches, precisions, limits and so on."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from loguru import logger
from rich import box
from rich.table import Table

from benchmarks.limited_runs import RunOutcome, run_command
from benchmarks.random_gpt2 import make_random_gpt2
from grpo.memory.budget import GB

SHAPE_OF_30M = {"n_layer": 8, "n_head": 8, "n_embd": 512, "n_positions": 512}


def grid(folder: Path, *, only: str = "") -> Iterator[RunOutcome]:
    """Runs of three steps: models, batches, precisions, adapters, checkpointing, limits, processes."""
    endless = str(make_random_gpt2(folder / "endless", n_layer=6, n_head=6, n_embd=192, n_positions=512))
    large = str(make_random_gpt2(folder / "30m", **SHAPE_OF_30M))
    runs: list[tuple[str, list[str], dict[str, Any]]] = []
    for size, precision in product((8, 16, 32, 64, 128, 256, 512), ("fp32", "bf16")):
        runs.append(("rook-tiny", ["--batch-size", str(size), "--precision", precision], {}))
    for size, precision in product((8, 16, 32, 64, 128), ("fp32", "bf16")):
        runs.append((endless, ["--batch-size", str(size), "--precision", precision], {}))
    for size, precision in product((8, 16, 32), ("fp32", "bf16")):
        runs.append((large, ["--batch-size", str(size), "--precision", precision], {}))
    for size, precision, more in product(
        (16, 64, 256), ("fp32", "bf16"), (["--lora-rank", "16"], ["--gradient-checkpointing", "full"])
    ):
        runs.append(("rook-tiny", ["--batch-size", str(size), "--precision", precision, *more], {}))
    for size, precision, share in product((64, 256), ("fp32", "bf16"), (0.8, 0.9, 1.5)):
        runs.append(
            ("rook-tiny", ["--batch-size", str(size), "--precision", precision], {"limit": int(share * GB)})
        )
    for size, precision in product((16, 64, 128), ("fp32", "bf16")):
        runs.append(("rook-tiny", ["--batch-size", str(size), "--precision", precision], {"processes": 2}))
    for model, options, more in runs:
        limit, processes = more.get("limit"), more.get("processes", 1)
        name = " ".join([Path(model).name, *options])
        name += f", limit {limit / GB:.1f} GB" if limit else ", two processes" if processes > 1 else ""
        if only in name:
            outcome = run_command(name, ["--model", model, *options], limit=limit, processes=processes)
            logger.info("{}: status {}, expected {}, measured {}", name, outcome.status, *outcome.cells[1:])
            yield outcome


def grid_table(outcomes: Sequence[RunOutcome]) -> Table:
    table = Table(title="Whole runs; GB", title_justify="left", box=box.MARKDOWN)
    for column in ("run", "status", "at most", "expected", "measured", "within"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in sorted(outcomes, key=lambda run: abs(run.miss), reverse=True):
        table.add_row(run.name, str(run.status), *run.cells, "yes" if run.inside else "no")
    return table


def few_verdicts(outcomes: Sequence[RunOutcome]) -> dict[str, bool]:
    """Of too few runs for shares of them."""
    worst = max((abs(run.miss) for run in outcomes), default=0.0)
    return {
        f"{len(outcomes)} runs, and all end well": bool(outcomes) and not any(run.status for run in outcomes),
        "no run exceeds its worst case": all(run.within_worst for run in outcomes),
        f"expectations are off by {worst:.1f} half intervals at most (below 3)": worst < 3,
    }


def grid_verdicts(outcomes: Sequence[RunOutcome]) -> dict[str, bool]:
    done = [run for run in outcomes if run.status == 0 and run.measured_bytes]
    inside = sum(run.inside for run in done)
    width = median([run.width for run in done] or [0.0])
    phases = [each for run in done for each in run.phases_inside]
    return {
        f"{len(done)} of {len(outcomes)} runs end well": len(done) == len(outcomes),
        "no run exceeds its worst case": all(run.within_worst for run in done),
        f"{inside} of {len(done)} intervals hold the measured peak (95 %)": inside >= 0.95 * len(done),
        f"{sum(phases)} of {len(phases)} phases' own hold theirs (95 %)": sum(phases) >= 0.95 * len(phases),
        f"half an interval is {width:.2f} of 5 % or 16 MB, in the median": width <= 1,
    }
