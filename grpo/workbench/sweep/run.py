"""A sweep over batch sizes, each in a process of its own: run, kept, gone on with after a stop.

Every size learns from equally many tokens (lm) or samples (grpo). Left out: several sizes at once, which
would disturb each other's times, and going on within a size.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loguru import logger

from grpo.memory.budget import readable
from grpo.plan.tables import ELSE
from grpo.workbench.predict import StepMemory
from grpo.workbench.processes import Ended, run_worker
from grpo.workbench.sweep.rows import SweepFolder, curve_facts, whole_row
from grpo.workbench.sweep.settings import TUNE_FACTORS, SweepSettings
from grpo.workbench.sweep.worker import SizeTask, predicted_facts

WORKER = "grpo.workbench.sweep.worker"
KEPT = ("ok", "out of memory", "diverged")
"""How a size may have ended that is not tried again."""
Show = Callable[[int, Mapping[str, Any]], None]
"""Told of a size's every point of its curve."""


@dataclass(frozen=True)
class Sweep:
    """Settings as they are on this machine, and the folder. `memory` predicts what a size holds (lm)."""

    settings: SweepSettings
    folder: SweepFolder
    memory: StepMemory | None

    def run(self, show: Show) -> list[dict[str, Any]]:
        """The rows of all sizes asked for; those that are done already are kept."""
        sizes = sorted(set(self.settings.batch_sizes))
        for number, batch_size in enumerate(sizes, start=1):
            row = self.folder.row(batch_size)
            if row is not None and row["status"] in KEPT and not self.settings.again:
                logger.info("size {}: kept from before ({})", batch_size, row["status"])
                continue
            logger.info("size {} ({} of {})", batch_size, number, len(sizes))
            row = self._run_size(batch_size, show)
            self.folder.write_row(row)
            logger.info("size {}: {}", batch_size, in_words(row, self.settings.unit))
        return [row for size in sizes if (row := self.folder.row(size)) is not None]

    def _run_size(self, batch_size: int, show: Show) -> dict[str, Any]:
        """Train one size, and keep its curve while it comes. The row is of however far it came."""
        self.folder.remove_row(batch_size)
        facts: dict[str, Any] = self._predicted(batch_size)
        rate, ended = self.settings.rate(batch_size), None
        if self.settings.scale_lr == "tuned":
            facts["tuned"], ended = self._tune(batch_size)
            rate = _best_rate(facts["tuned"], self.settings.higher_is_better) or rate
        task = self._task(batch_size, rate)
        curve: list[dict[str, Any]] = []
        with self.folder.curve_file(batch_size).open("w") as file:

            def keep(record: dict[str, Any]) -> None:
                if "row" in record:
                    facts.update(record["row"])
                    return
                curve.append(record["curve"])
                file.write(json.dumps(record["curve"]) + "\n")
                file.flush()
                show(batch_size, record["curve"])

            if ended is None or ended.status == "ok":
                ended = self._work(task, keep)
        facts |= curve_facts(curve, higher_is_better=self.settings.higher_is_better)
        facts |= {"status": ended.status, "message": ended.message, "batch_size": batch_size}
        facts |= {"learning_rate": rate, "warmup_updates": task.warmup_updates}
        return whole_row(_with_outside(facts))

    def _tune(self, batch_size: int) -> tuple[list[dict[str, Any]], Ended]:
        """Held-out quality by learning rate, after a short run each; ends early where memory runs out."""
        tried: list[dict[str, Any]] = []
        total = self.settings.tune_total(batch_size)
        folder = self.folder.path / f"tune-{batch_size:05d}"
        ended = Ended("ok")
        for factor in TUNE_FACTORS:
            held: list[float] = []

            def keep(record: dict[str, Any], held: list[float] = held) -> None:
                if (value := record.get("curve", {}).get("heldout")) is not None:
                    held.append(value)

            rate = factor * self.settings.rate(batch_size)
            ended = self._work(replace(
                self._task(batch_size, rate), total=total, evaluations=1, folder=folder
            ), keep)  # fmt: skip
            heldout = held[-1] if ended.status == "ok" else None
            tried.append({"learning_rate": rate, "heldout": heldout})
            logger.info("size {}: learning rate {:.2g}: held-out {}", batch_size, rate, heldout)
            if ended.status in ("out of memory", "failed"):
                break
        shutil.rmtree(folder, ignore_errors=True)
        finished = any(each["heldout"] is not None for each in tried)
        return tried, ended if ended.status != "diverged" or not finished else Ended("ok")

    def _task(self, batch_size: int, rate: float) -> SizeTask:
        settings, folder = self.settings, self.folder.path / self.folder.stem(batch_size)
        return SizeTask(settings, batch_size, rate, settings.total, settings.evaluations, folder)

    def _work(self, task: SizeTask, keep: Callable[[dict[str, Any]], None]) -> Ended:
        limited = self.settings.memory_limit is not None
        return run_worker(WORKER, task.as_json(), keep, limited=limited)

    def _predicted(self, batch_size: int) -> dict[str, Any]:
        if self.memory is None:  # grpo: its own plan says
            return {}
        rows = min(batch_size, self.settings.train_rows or batch_size)
        _, parts = self.memory.largest_phase(batch_size, rows)
        logger.info("size {}: {} of tensors predicted", batch_size, readable(parts.peak_bytes))
        return predicted_facts(parts)


def _with_outside(facts: dict[str, Any]) -> dict[str, Any]:
    """What the process held before, less its tensors, belongs to the prediction as well."""
    if (held := facts.pop("held_bytes", None)) is None:
        return facts
    outside = max(0, held - _held_from_the_start(facts))
    parts = {**facts["parts"], ELSE: facts["parts"].get(ELSE, 0) + outside}
    return {**facts, "parts": parts, "predicted_bytes": facts["predicted_bytes"] + outside}


def _held_from_the_start(facts: Mapping[str, Any]) -> int:
    """Bytes of the prediction that exist before the first update."""
    return int(facts["parts"]["weights"] + facts["parts"]["optimizer"])


def _best_rate(tried: list[dict[str, Any]], higher_is_better: bool) -> float | None:
    """The rate whose held-out figure is best; None where no try ended well."""
    finished = [each for each in tried if each["heldout"] is not None]
    if not finished:
        return None
    best = (max if higher_is_better else min)(finished, key=lambda each: each["heldout"])
    if len(tried) > 1 and best["learning_rate"] in (tried[0]["learning_rate"], tried[-1]["learning_rate"]):
        logger.warning("the best learning rate, {:.2g}, is at the edge of those tried", best["learning_rate"])
    return float(best["learning_rate"])


def in_words(row: Mapping[str, Any], unit: str) -> str:
    """A row as a log line."""
    if row["status"] != "ok" or row.get("rate") is None:
        return f"{row['status']} after {row['updates']} updates ({row['message']})"
    heldout = "" if row["final_heldout"] is None else f", held-out {row['final_heldout']:.4f}"
    return f"{row['updates']} updates in {row['seconds']:.1f} s, {row['rate']:.0f} {unit}/s{heldout}"
