"""A sweep as a person sees it: progress while it runs, a table at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from grpo.memory.budget import GB
from grpo.workbench.sweep.settings import SweepSettings


class SweepProgress:
    """A bar for each size on a terminal; elsewhere a line at each evaluation."""

    def __init__(self, console: Console, settings: SweepSettings) -> None:
        self._settings = settings
        self._heldout = ""
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("size {task.description}"), BarColumn(), TaskProgressColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[summary]}"), console=console,
            )  # fmt: skip
            self._tasks: dict[int, Any] = {}
            self._bar.start()

    def __call__(self, batch_size: int, point: Mapping[str, Any]) -> None:
        if point["heldout"] is not None:
            self._heldout = f"held-out {point['heldout']:.4f}"
        if self._bar is not None:
            if batch_size not in self._tasks:
                self._tasks[batch_size] = self._bar.add_task(
                    str(batch_size), total=self._settings.num_updates(batch_size), summary=""
                )
            self._bar.update(self._tasks[batch_size], completed=point["update"], summary=self._heldout)
        elif point["heldout"] is not None:
            done, unit = point["done"], self._settings.unit
            logger.info(
                "size {}: {:,} {}, {:.1f} s: {}", batch_size, done, unit, point["seconds"], self._heldout
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def sweep_table(rows: Sequence[Mapping[str, Any]], settings: SweepSettings) -> Table:
    """A row a size."""
    what = "loss" if settings.objective == "lm" else "reward"
    table = Table(title=f"{settings.total:,} {settings.unit} at each size; {what}", title_justify="left")
    columns = {
        "size": lambda row: str(row["batch_size"]),
        "status": lambda row: row["status"],
        "rate": lambda row: _shown(row["learning_rate"], ".2g"),
        "updates": lambda row: str(row["updates"]),
        "time, s": lambda row: _shown(row["seconds"], ".1f"),
        "compile, s": lambda row: _shown(row["compile_s"], ".1f"),
        f"{settings.unit}/s": lambda row: _shown(row["rate"], ",.0f"),
        "peak, GB": lambda row: _shown(row["peak_bytes"], ".2f", GB),
        "predicted": lambda row: _shown(row["predicted_bytes"], ".2f", GB),
        "train": lambda row: _shown(row["final_train"], ".4f"),
        "held-out": lambda row: _shown(row["final_heldout"], ".4f"),
        "best": lambda row: _shown(row["best_heldout"], ".4f"),
    }  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name == "status" else "right")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table


def _shown(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, form)
