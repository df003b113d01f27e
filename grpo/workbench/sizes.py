"""What each size of a sweep or of a search came to, from the files that its run wrote.

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
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from grpo.config.sizes import GB
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines

Record = Mapping[str, Any]
SWEEP_FILE, TASK_FILE, ENDED_FILE, HELDOUT_FILE = "sweep.json", "task.json", "ended.json", "heldout.json"
OK = "ok"
WARM_UP_UPDATES = 2
"""First updates, in which kernels are loaded or compiled and tensors counted: no part of the steady state."""
FINAL_SHARE = 0.1
"""Last share of the updates that the final training figure is the mean of."""
MOST_STRETCHES = 20


def size_folder(sweep: Path, batch_size: int) -> Path:
    """Of one size's run."""
    return sweep / f"size-{batch_size:05d}"


@dataclass(frozen=True)
class Size:
    """One batch size: what was asked and what was found; figures that are not there are None.

    status: ok, out of memory, diverged, failed, unfinished (it runs, or was killed) or not run.
    row_units: tokens (language modelling) or samples (GRPO, 1) in a row of the batch.
    """

    batch_size: int
    status: str
    message: str = ""
    higher_is_better: bool = False
    row_units: int = 1
    task: Record = field(default_factory=dict)
    """Its settings by name, and `tuned`."""
    steps: Sequence[Record] = ()
    """Lines of updates."""
    evaluations: Sequence[Record] = ()
    memory: Sequence[Record] = ()
    heldout: Sequence[float] = ()
    """Quality of each held-out window or prompt at the last evaluation."""

    @property
    def is_finished(self) -> bool:
        return self.status == OK

    @property
    def learning_rate(self) -> float | None:
        """The peak of its schedule."""
        return figure(self.task, "learning_rate")

    @property
    def warmup_updates(self) -> int | None:
        return self.task.get("warmup_steps")

    @property
    def tuned(self) -> list[tuple[float, float]]:
        """(learning rate, held-out quality) of each try of one that ended."""
        tried = self.task.get("tuned") or []
        return [(row["learning_rate"], row["heldout"]) for row in tried if row["heldout"] is not None]

    @property
    def updates(self) -> int:
        """Done."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def done(self) -> int:
        """Tokens or samples learned from."""
        return self.updates * self._units

    @property
    def _units(self) -> int:
        """Of an update."""
        return self.batch_size * self.row_units

    @cached_property
    def curve(self) -> list[dict[str, float | None]]:
        """Points by update: units done, seconds of training, training and held-out quality."""
        train = "reward" if self.higher_is_better else "loss"
        times = accumulate(figure(line, "step_time") or 0.0 for line in self.steps)
        at = {0: 0.0} | {line["step"]: seconds for line, seconds in zip(self.steps, times, strict=True)}
        points = [
            {
                "update": line["step"], "done": line["step"] * self._units,
                "seconds": at.get(line["step"], max(at.values())), "train": figure(line, train),
                "heldout": figure(line, f"eval_{train}"),
            }
            for line in (*self.steps, *self.evaluations)
        ]  # fmt: skip
        return sorted(points, key=lambda point: point["update"])

    @property
    def step_s(self) -> list[float]:
        """Seconds of each update."""
        return [time for line in self.steps if (time := figure(line, "step_time")) is not None]

    @property
    def seconds(self) -> float | None:
        """Of training alone, evaluations left out."""
        return math.fsum(self.step_s) or None

    @property
    def steady_s(self) -> float | None:
        """Of an update, once everything is loaded."""
        times = self.step_s
        return median(times[min(WARM_UP_UPDATES, len(times) - 1) :]) if times else None

    @property
    def start_s(self) -> float | None:
        """What the first updates took beyond that: compiling, loading kernels, counting tensors."""
        times, steady = self.step_s[:WARM_UP_UPDATES], self.steady_s
        return None if steady is None else max(0.0, math.fsum(times) - len(times) * steady)

    @property
    def rate(self) -> float | None:
        """Tokens or samples a second, once everything is loaded."""
        return self._units / self.steady_s if self.steady_s else None

    @property
    def final_train(self) -> float | None:
        """The mean over the last tenth of its updates."""
        late = (point for point in self.curve if (point["update"] or 0) > (1 - FINAL_SHARE) * self.updates)
        values = [point["train"] for point in late if point["train"] is not None]
        return fmean(values) if values else None

    @property
    def _rated(self) -> list[tuple[float, int]]:
        """Held-out quality by units done; that of the untrained model is nothing that training reached."""
        points = ((point["heldout"], point["done"]) for point in self.curve if point["done"])
        return [(value, int(done or 0)) for value, done in points if value is not None]

    @property
    def final_heldout(self) -> float | None:
        return self._rated[-1][0] if self._rated else None

    @property
    def _best(self) -> tuple[float, int] | None:
        sign = 1 if self.higher_is_better else -1
        return max(self._rated, key=lambda rated: sign * rated[0], default=None)

    @property
    def best_heldout(self) -> float | None:
        """The best of all its evaluations."""
        return self._best and self._best[0]

    @property
    def best_heldout_at(self) -> int | None:
        """Units done when it was best first."""
        return self._best and self._best[1]

    @property
    def peak_bytes(self) -> int | None:
        """The most that the process held (on an accelerator, of the device)."""
        return max((line["process_bytes"] for line in self.memory if line.get("process_bytes")), default=None)

    @property
    def allocated_bytes(self) -> int | None:
        """The most by torch's allocator; None on a host, where it is not asked."""
        return self._most_on_card("memory/peak_gb")

    @property
    def reserved_bytes(self) -> int | None:
        return self._most_on_card("memory/reserved_gb")

    def _most_on_card(self, name: str) -> int | None:
        on_card = (line for line in self.steps if "memory/reserved_gb" in line)
        return max((int(GB * line[name]) for line in on_card), default=None)

    @property
    def _fullest(self) -> Record:
        """The line of memory.jsonl whose tensors added most, of those with a prediction; {} if there is none.

        Its `predicted_bytes` were said before `added_bytes` were measured.
        """
        both = [line for line in self.memory if line.get("predicted_bytes") and line.get("added_bytes")]
        return max(both, key=lambda line: line["added_bytes"], default={})

    @property
    def added_bytes(self) -> int | None:
        """What its tensors added where they added most."""
        return self._fullest.get("added_bytes")

    @property
    def predicted_bytes(self) -> int | None:
        """What had been predicted for that; the most that was predicted where nothing was measured."""
        predicted = [line["predicted_bytes"] for line in self.memory if line.get("predicted_bytes")]
        return self._fullest.get("predicted_bytes") or max(predicted, default=None)


def read_size(sweep: Path, batch_size: int, header: Record) -> Size:
    """One size as far as it has come. header: the sweep's, of `SWEEP_FILE`."""
    folder, is_grpo = size_folder(sweep, batch_size), header.get("objective") == "grpo"
    ended, task = read_json(folder / ENDED_FILE), read_json(folder / TASK_FILE)
    lines = [line for line in read_lines(folder / METRICS_FILE) if isinstance(line.get("step"), int)]
    heldout = read_json(folder / HELDOUT_FILE).get("values")
    return Size(
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
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def figure(record: Record, name: str) -> float | None:
    """A finite number, or None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of ours - theirs on the same held-out rows; None where that cannot be told.

    Neighbouring windows of a text are alike, so the mean's error is that of the means of at most twenty
    stretches of neighbours (batch means), by Student's t; single rows where there are no more than twenty.
    """
    from scipy.stats import sem, t  # 23 MB, which no trial is to hold

    if len(ours) != len(theirs) or len(ours) < 2:
        return None
    stretches = np.array_split(np.subtract(ours, theirs), min(MOST_STRETCHES, len(ours)))
    means = [stretch.mean() for stretch in stretches]
    reach = t.ppf(0.975, len(means) - 1) * sem(means)
    return float(np.mean(means) - reach), float(np.mean(means) + reach)
