"""Results of each size of a sweep or search, from the files that its run wrote.

    sweep.json              what the sizes have in common
    notes.md                a person's own words, if there are any
    size-00064/             a run:
        task.json           what it was to do: settings by name
        metrics.jsonl       a line a step, and one an evaluation; step 0 is the untrained model
        memory.jsonl        what its phases held
        heldout.json        {"step": …, "values": [of each held-out window or prompt, the same at each size]}
        ended.json          {"status": …, "message": …}; not there while it runs, or after it was killed

A size that ran out of memory or diverged has what it found out before.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grpo.config.sizes import GB
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, read_lines

Record = Mapping[str, Any]
SWEEP_FILE, TASK_FILE, ENDED_FILE, HELDOUT_FILE = "sweep.json", "task.json", "ended.json", "heldout.json"
OK = "ok"
WARM_UP_UPDATES = 2
"""First updates, in which kernels are loaded or compiled and tensors counted: no part of the steady state."""
FINAL_SHARE = 0.1
"""Last share of the updates that the final training figure is the mean of."""


def size_folder(sweep: Path, batch_size: int) -> Path:
    """The folder of one size's run."""
    return sweep / f"size-{batch_size:05d}"


@dataclass
class SizeResult:
    """One batch size: its settings and the figures of its run; those that are not there are None.

    status: ok, out of memory, diverged, failed, unfinished (it runs, or was killed) or not run.
    row_units: tokens (language modelling) or samples (GRPO, 1) in a row of the batch.
    """

    batch_size: int
    status: str
    message: str = ""
    higher_is_better: bool = False
    row_units: int = 1
    task: Record = field(default_factory=dict)
    """The run's settings by name, and `tuned`, the learning rates that were tried before."""
    steps: Sequence[Record] = ()
    """The lines of metrics.jsonl about updates."""
    evaluations: Sequence[Record] = ()
    memory: Sequence[Record] = ()
    heldout: Sequence[float] = ()
    """Quality of each held-out window or prompt at the last evaluation."""

    def __post_init__(self) -> None:
        self.is_finished = self.status == OK
        self.learning_rate = figure(self.task, "learning_rate")
        """The peak of its schedule."""
        self.warmup_updates: int | None = self.task.get("warmup_steps")
        tried = [(row["learning_rate"], row["heldout"]) for row in self.task.get("tuned") or []]
        self.tuned = [(rate, heldout) for rate, heldout in tried if heldout is not None]
        """(learning rate, held-out quality) of the tries that ended well."""
        self._set_work_and_time()
        self._set_quality()
        self._set_memory()

    def _set_work_and_time(self) -> None:
        units = self.batch_size * self.row_units
        self.updates = int(self.steps[-1]["step"]) if self.steps else 0
        self.done = self.updates * units
        """Tokens or samples learned from."""
        self.step_s = [time for line in self.steps if (time := figure(line, "step_time")) is not None]
        """Seconds of each update."""
        self.seconds = math.fsum(self.step_s) or None
        """Seconds of training, without evaluations."""
        times, first = self.step_s, self.step_s[:WARM_UP_UPDATES]
        self.steady_s = median(times[min(WARM_UP_UPDATES, len(times) - 1) :]) if times else None
        """Median seconds of an update, once everything is loaded."""
        self.start_s = self.steady_s and max(0.0, math.fsum(first) - len(first) * self.steady_s)
        """Seconds that the first updates took beyond that: compiling, loading kernels, counting tensors."""
        self.rate = units / self.steady_s if self.steady_s else None
        """Tokens or samples a second, once everything is loaded."""

    def _set_quality(self) -> None:
        train, units = "reward" if self.higher_is_better else "loss", self.batch_size * self.row_units
        times = accumulate(figure(line, "step_time") or 0.0 for line in self.steps)
        at = {0: 0.0} | {line["step"]: seconds for line, seconds in zip(self.steps, times, strict=True)}
        points = [
            {
                "update": line["step"],
                "done": line["step"] * units,
                "seconds": at.get(line["step"], max(at.values())),
                "train": figure(line, train),
                "heldout": figure(line, f"eval_{train}"),
            }
            for line in (*self.steps, *self.evaluations)
        ]
        self.curve: list[dict[str, Any]] = sorted(points, key=lambda point: point["update"])
        """Points by update: units done, seconds of training, training and held-out quality."""
        late = [point["train"] for point in self.curve if point["update"] > (1 - FINAL_SHARE) * self.updates]
        trained = [value for value in late if value is not None]
        self.final_train = fmean(trained) if trained else None
        """The mean over the last tenth of its updates."""
        # Of what training reached: not of the untrained model.
        rated = [(p["heldout"], p["done"]) for p in self.curve if p["done"] and p["heldout"] is not None]
        self.final_heldout: float | None = rated[-1][0] if rated else None
        sign = 1 if self.higher_is_better else -1
        best = max(rated, key=lambda point: sign * point[0], default=(None, None))
        self.best_heldout: float | None = best[0]
        self.best_heldout_at: int | None = best[1]
        """Units done when it was best first."""

    def _set_memory(self) -> None:
        self.peak_bytes = _most(self.memory, "process_bytes")
        """The most that the process held (on an accelerator, of the device)."""
        on_card = [line for line in self.steps if "memory/reserved_gb" in line]
        allocated, reserved = (_most(on_card, f"memory/{name}_gb") for name in ("peak", "reserved"))
        self.allocated_bytes = allocated and int(GB * allocated)
        """The most by torch's allocator; None on a host, where it is not asked."""
        self.reserved_bytes = reserved and int(GB * reserved)
        compared = [line for line in self.memory if line.get("predicted_bytes") and line.get("added_bytes")]
        fullest = max(compared, key=lambda line: line["added_bytes"], default={})
        self.added_bytes: int | None = fullest.get("added_bytes")
        """The most that tensors added in an update for which there was a prediction."""
        self.predicted_bytes = fullest.get("predicted_bytes") or _most(self.memory, "predicted_bytes")
        """The prediction for that update; the largest of all where nothing was measured."""


def _most(lines: Sequence[Record], name: str) -> Any:
    return max((line[name] for line in lines if line.get(name)), default=None)


def read_size(sweep: Path, batch_size: int, header: Record) -> SizeResult:
    """Read one size, finished or not. header: the content of the sweep's `SWEEP_FILE`."""
    folder, is_grpo = size_folder(sweep, batch_size), header.get("objective") == "grpo"
    ended, task = read_json(folder / ENDED_FILE), read_json(folder / TASK_FILE)
    lines = [line for line in read_lines(folder / METRICS_FILE) if isinstance(line.get("step"), int)]
    heldout = read_json(folder / HELDOUT_FILE).get("values")
    return SizeResult(
        batch_size,
        str(ended.get("status") or ("unfinished" if folder.is_dir() else "not run")),
        str(ended.get("message") or ""),
        higher_is_better=is_grpo,
        row_units=1 if is_grpo else int(header.get("context") or 1),
        task={**task.get("train", {}), **task},  # as older versions have it
        steps=[line for line in lines if "step_time" in line],
        evaluations=[line for line in lines if any(name.startswith("eval_") for name in line)],
        memory=read_lines(folder / MEMORY_FILE),
        heldout=heldout if isinstance(heldout, list) else (),
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none, or half of one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def figure(record: Record, name: str) -> float | None:
    """A finite number, or None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
