"""What each size of a sweep came to, from the files that its run wrote.

    sweep.json              what the sizes have in common
    notes.md                a person's own words, if there are any
    size-00064/             a run:
        task.json           what it was to do
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
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines

Record = Mapping[str, Any]
SWEEP_FILE, TASK_FILE, ENDED_FILE, HELDOUT_FILE = "sweep.json", "task.json", "ended.json", "heldout.json"
OK = "ok"
WARM_UP_UPDATES = 2
"""First updates, in which kernels are loaded or compiled and tensors counted: no part of the steady state."""
FINAL_SHARE = 0.1
"""Last share of the updates that the final training figure is the mean of."""


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
        return self.task.get("warmup_updates")

    @property
    def tuned(self) -> list[tuple[float, float]]:
        """(learning rate, held-out quality) of each try of one that ended."""
        tried = self.task.get("tuned") or []
        return [(each["learning_rate"], each["heldout"]) for each in tried if each["heldout"] is not None]

    @property
    def updates(self) -> int:
        """Done."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @cached_property
    def curve(self) -> list[dict[str, float | None]]:
        """Points by update: units done, seconds of training, training and held-out quality."""
        seconds, points, at = 0.0, [], {0: 0.0}
        for line in self.steps:
            seconds += figure(line, "step_time") or 0.0
            at[line["step"]] = seconds
            points.append(self._point(line["step"], seconds, train=figure(line, self.train_key)))
        points += [
            self._point(line["step"], at.get(line["step"], seconds), heldout=figure(line, self.heldout_key))
            for line in self.evaluations
        ]
        return sorted(points, key=lambda point: point["update"] or 0)

    def _point(
        self, update: int, seconds: float, *, train: float | None = None, heldout: float | None = None
    ) -> dict[str, float | None]:
        done = update * self.batch_size * self.row_units
        return {"update": update, "done": done, "seconds": seconds, "train": train, "heldout": heldout}

    @property
    def train_key(self) -> str:
        return "reward" if self.higher_is_better else "loss"

    @property
    def heldout_key(self) -> str:
        return f"eval_{self.train_key}"

    @property
    def done(self) -> int:
        """Tokens or samples learned from."""
        return self.updates * self.batch_size * self.row_units

    @property
    def seconds(self) -> float | None:
        """Of training alone, evaluations left out."""
        times = self._step_times
        return math.fsum(times) if times else None

    @property
    def _step_times(self) -> list[float]:
        return [time for line in self.steps if (time := figure(line, "step_time")) is not None]

    @property
    def steady_s(self) -> float | None:
        """Of an update, once everything is loaded."""
        times = self._step_times
        return median(times[min(WARM_UP_UPDATES, len(times) - 1) :]) if times else None

    @property
    def start_s(self) -> float | None:
        """What the first updates took beyond that: compiling, loading kernels, counting tensors."""
        times, steady = self._step_times[:WARM_UP_UPDATES], self.steady_s
        return None if steady is None else max(0.0, math.fsum(times) - len(times) * steady)

    @property
    def rate(self) -> float | None:
        """Tokens or samples a second, once everything is loaded."""
        return self.batch_size * self.row_units / self.steady_s if self.steady_s else None

    @property
    def final_train(self) -> float | None:
        """The mean over the last tenth of its updates."""
        late = [
            value
            for line in self.steps
            if line["step"] > (1 - FINAL_SHARE) * self.updates
            and (value := figure(line, self.train_key)) is not None
        ]
        return fmean(late) if late else None

    @property
    def _rated(self) -> list[tuple[float, int]]:
        """Held-out quality by update; that of the untrained model is nothing that training reached."""
        return [
            (value, line["step"])
            for line in self.evaluations
            if line["step"] and (value := figure(line, self.heldout_key)) is not None
        ]

    @property
    def final_heldout(self) -> float | None:
        return self._rated[-1][0] if self._rated else None

    @property
    def best_heldout(self) -> float | None:
        """The best of all its evaluations."""
        best = max if self.higher_is_better else min
        return best(value for value, _ in self._rated) if self._rated else None

    @property
    def best_heldout_at(self) -> int | None:
        """Units done when it was best first."""
        found = (step for value, step in self._rated if value == self.best_heldout)
        step = next(found, None)
        return None if step is None else step * self.batch_size * self.row_units

    @property
    def peak_bytes(self) -> int | None:
        """The most that the process held (on an accelerator, of the device)."""
        return max((line["process_bytes"] for line in self.memory if line.get("process_bytes")), default=None)

    @property
    def fullest(self) -> Record:
        """The line of memory.jsonl whose tensors added most, of those with a prediction; {} if there is none.

        Its `predicted_bytes` were said before `added_bytes` were measured.
        """
        both = [line for line in self.memory if line.get("predicted_bytes") and line.get("added_bytes")]
        return max(both, key=lambda line: line["added_bytes"], default={})

    @property
    def added_bytes(self) -> int | None:
        """What its tensors added where they added most."""
        return self.fullest.get("added_bytes")

    @property
    def predicted_bytes(self) -> int | None:
        """What had been predicted for that; the most that was predicted where nothing was measured."""
        said = [line["predicted_bytes"] for line in self.memory if line.get("predicted_bytes")]
        return self.fullest.get("predicted_bytes") or max(said, default=None)


def read_size(sweep: Path, batch_size: int, header: Record) -> Size:
    """One size as far as it has come. header: the sweep's, of `SWEEP_FILE`."""
    folder = size_folder(sweep, batch_size)
    is_grpo = header.get("objective") == "grpo"
    common: dict[str, Any] = {
        "higher_is_better": is_grpo,
        "row_units": 1 if is_grpo else int(header.get("context") or 1),
    }
    if not folder.is_dir():
        return Size(batch_size, "not run", **common)
    ended = read_json(folder / ENDED_FILE)
    lines = [line for line in read_lines(folder / METRICS_FILE) if isinstance(line.get("step"), int)]
    heldout = read_json(folder / HELDOUT_FILE).get("values")
    return Size(
        batch_size, str(ended.get("status") or "unfinished"), str(ended.get("message") or ""),
        task=read_json(folder / TASK_FILE),
        steps=[line for line in lines if "step_time" in line],
        evaluations=[line for line in lines if any(name.startswith("eval_") for name in line)],
        memory=read_lines(folder / MEMORY_FILE),
        heldout=heldout if isinstance(heldout, list) else (),
        **common,
    )  # fmt: skip


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
    from scipy.stats import t

    if len(ours) != len(theirs) or len(ours) < 2:
        return None
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    count = min(20, len(differences))
    edges = [len(differences) * k // count for k in range(count + 1)]
    means = [fmean(differences[low:high]) for low, high in pairwise(edges)]
    centre = fmean(differences)
    spread = math.sqrt(math.fsum((mean - fmean(means)) ** 2 for mean in means) / (count - 1) / count)
    reach = float(t.ppf(0.975, count - 1)) * spread
    return centre - reach, centre + reach
