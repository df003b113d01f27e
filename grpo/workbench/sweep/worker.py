"""One batch size of a sweep, or one try of a learning rate, in a process of its own.

    python -m grpo.workbench.sweep.worker '{"settings": {…}, "batch_size": 64, …}'

Prints records {"curve": point} and {"row": facts}, each as soon as it is known: what a size found out
before it ran out of memory is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from grpo.learning.step import Diverged
from grpo.memory import DoesNotFit
from grpo.workbench.processes import worker
from grpo.workbench.sweep.settings import SweepSettings, from_json

Say = Callable[[Mapping[str, Any]], None]
WARM_UP_UPDATES = 2
"""First updates, in which kernels are loaded or compiled: no part of the steady state."""


@dataclass(frozen=True)
class SizeTask:
    """What one process trains: `total` tokens or samples, in batches of `batch_size` rows."""

    settings: SweepSettings
    batch_size: int
    learning_rate: float
    total: int
    evaluations: int
    folder: Path
    """For what a run leaves, GRPO's metrics among it."""

    @property
    def updates(self) -> int:
        return self.settings.num_updates(self.batch_size, self.total)

    @property
    def warmup_updates(self) -> int:
        return round(self.settings.warmup_share * self.updates)

    def as_json(self) -> dict[str, Any]:
        values = {
            name: getattr(self, name) for name in ("batch_size", "learning_rate", "total", "evaluations")
        }
        return {**values, "settings": self.settings.as_json(), "folder": str(self.folder)}


def task_from_json(values: dict[str, Any]) -> SizeTask:
    return SizeTask(**{**values, "settings": from_json(values["settings"]), "folder": Path(values["folder"])})


def point(
    update: int, done: int, seconds: float, rate: float, *, train: float | None = None,
    heldout: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A record for the curve. Seconds are of training alone."""
    return {"curve": {
        "update": update, "done": done, "seconds": seconds, "train": train, "heldout": heldout,
        "learning_rate": rate,
    }}  # fmt: skip


def time_facts(seconds: list[float], units: int) -> dict[str, Any]:
    """What a list of updates' times says; an update is of `units` tokens or samples."""
    first = min(WARM_UP_UPDATES, len(seconds) - 1)
    steady = median(seconds[first:])
    return {
        "compile_s": max(0.0, sum(seconds[:first]) - first * steady),
        "steady_s_per_update": steady,
        "rate": units / steady,
    }


def predicted_facts(parts: Mapping[str, float]) -> dict[str, Any]:
    return {
        "predicted_bytes": int(sum(parts.values())),
        "parts": {name: int(size) for name, size in parts.items()},
    }


def train_size(task: SizeTask, say: Say) -> None:
    """Train, and say what comes of it. MemoryError and FloatingPointError are results as well."""
    from grpo.workbench.sweep.grpo import train_grpo
    from grpo.workbench.sweep.language import train_language

    if task.settings.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    train = train_language if task.settings.objective == "lm" else train_grpo
    try:
        train(task, say)
    except Diverged as error:
        raise FloatingPointError(str(error)) from error
    except DoesNotFit as error:
        raise MemoryError(str(error)) from error


def main() -> None:
    with worker() as (task, say):
        train_size(task_from_json(task), say)


if __name__ == "__main__":
    main()
