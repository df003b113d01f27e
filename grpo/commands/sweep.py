"""Train one model at several batch sizes, each on equally many tokens or samples.

    grpo-lean sweep --data bundled --arch gpt2 --batch-sizes 8 32 128
    grpo-lean sweep --objective grpo --batch-sizes 16 64 256

Finished sizes are kept in the output folder, so a stopped command goes on where it was.
"""

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from grpo.commands import FAILED, INTERRUPTED
from grpo.commands.screen import screen
from grpo.environment import typed
from grpo.workbench.sweep import Sweep, open_sweep, run_sweep

if TYPE_CHECKING:
    from grpo.workbench.sizes import Size


def main(asked: Sweep, console: Console) -> int:
    """Check, run what has not ended yet, and tabulate."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end the size's process as well
    settings, folder = open_sweep(asked)
    try:
        with _progress(screen(stderr=True)) as bar:
            run_sweep(settings, folder, _Watch(settings, bar))
    except KeyboardInterrupt:
        again = sys.argv[1:] if asked.output else [*sys.argv[1:], "--output", str(folder)]
        logger.error("stopped; finished sizes are kept. Go on with: {} {}", typed("sweep"), shlex.join(again))
        return INTERRUPTED
    from grpo.workbench.sizes import SWEEP_FILE, read_json, read_size

    header = read_json(folder / SWEEP_FILE)
    sizes = [read_size(folder, size, header) for size in sorted(set(settings.batch_sizes))]
    console.print(sweep_table(sizes, settings))
    logger.info("for the report: {} {}", typed("report"), shlex.quote(str(folder)))
    return FAILED if any(size.status == "failed" for size in sizes) else 0


def _progress(console: Console) -> Any:
    """A bar for each size, on a terminal."""
    if not console.is_terminal:
        return nullcontext()
    return Progress(
        TextColumn("size {task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[heldout]}"), console=console,
    )  # fmt: skip


class _Watch:
    """Told of each line that a size writes: moves its bar, or elsewhere logs its evaluations."""

    def __init__(self, settings: Sweep, bar: Progress | None) -> None:
        self._settings, self._bar = settings, bar
        self._tasks: dict[int, Any] = {}

    def __call__(self, size: int, updates: int, line: Mapping[str, Any]) -> None:
        heldout = line.get("eval_loss", line.get("eval_reward"))
        said = "" if heldout is None else f"held-out {heldout:.4f}"
        if self._bar is None:
            if said:
                done = line["step"] * size * self._settings.row_units
                logger.info("size {}: {:,} {}: {}", size, done, self._settings.unit, said)
            return
        if size not in self._tasks:
            self._tasks[size] = self._bar.add_task(str(size), total=updates, heldout="")
        fields: dict[str, Any] = {"heldout": said} if said else {}
        self._bar.update(self._tasks[size], completed=line["step"], **fields)


def sweep_table(sizes: Sequence["Size"], settings: Sweep) -> Table:
    """A row a size."""
    what = "loss" if settings.objective == "lm" else "reward"
    table = Table(title=f"{settings.total:,} {settings.unit} at each size; {what}", title_justify="left")
    columns = {
        "size": lambda size: str(size.batch_size),
        "status": lambda size: size.status,
        "rate": lambda size: _shown(size.learning_rate, ".2g"),
        "updates": lambda size: str(size.updates),
        "time, s": lambda size: _shown(size.seconds, ".1f"),
        "start, s": lambda size: _shown(size.start_s, ".1f"),
        f"{settings.unit}/s": lambda size: _shown(size.rate, ",.0f"),
        "peak, GB": lambda size: _shown(size.peak_bytes, ".2f", 2**30),
        "tensors": lambda size: _shown(size.added_bytes, ".3f", 2**30),
        "predicted": lambda size: _shown(size.predicted_bytes, ".3f", 2**30),
        "train": lambda size: _shown(size.final_train, ".4f"),
        "held-out": lambda size: _shown(size.final_heldout, ".4f"),
        "best": lambda size: _shown(size.best_heldout, ".4f"),
    }  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name == "status" else "right")
    for size in sizes:
        table.add_row(*(show(size) for show in columns.values()))
    return table


def _shown(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, form)
