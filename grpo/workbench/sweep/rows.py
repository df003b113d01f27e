"""What a sweep's folder holds: sweep.json, and for each size its row and its curve.

    sweep.json          the settings, and what they turned out to be here
    size-00064.json     how a size ended: written whole, when it has
    size-00064.jsonl    its curve, a line at a time

Sizes that ran out of memory or diverged have rows as well, of what they found out before.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from grpo.config import SettingsError
from grpo.files import write_whole

SWEEP_FILE = "sweep.json"
FINAL_SHARE = 0.1
"""Last share of a curve that the final training figure is the mean of."""
MAY_CHANGE = ("batch_sizes", "output", "again")
"""Of the settings, when a sweep goes on."""
ROW_KEYS = (
    "batch_size", "status", "message", "updates", "done", "learning_rate", "warmup_updates", "seconds",
    "compile_s", "steady_s_per_update", "rate", "final_train", "final_heldout", "best_heldout",
    "best_heldout_at", "heldout_stderr", "peak_bytes", "added_bytes", "predicted_bytes",
    "parts", "tuned",
)  # fmt: skip


class SweepFolder:
    """Reads and writes one sweep's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, header: Mapping[str, Any]) -> None:
        """Make the folder, or go on in it. SettingsError if it holds a sweep with other settings."""
        file, merged = self.path / SWEEP_FILE, json.loads(json.dumps(header))  # as it will be read again
        if file.exists():
            before = _read(file)
            if before is None:
                raise SettingsError(
                    f"output is {str(self.path)!r}, whose {SWEEP_FILE} is broken: choose another."
                )
            if differing := _differences(before.get("settings", {}), merged["settings"]):
                raise SettingsError(
                    f"output is {str(self.path)!r}, which holds a sweep with other settings: "
                    f"{'; '.join(differing)}. Give the same ones, or another --output."
                )
            merged["batch_sizes"] = sorted({*before["batch_sizes"], *merged["batch_sizes"]})
            merged["started"] = before["started"]
        self.path.mkdir(parents=True, exist_ok=True)
        _write(file, merged)

    def row(self, batch_size: int) -> dict[str, Any] | None:
        """A size's row; None where there is none, or half of one."""
        file = self.path / f"{self.stem(batch_size)}.json"
        if not file.exists():
            return None
        row = _read(file)
        if row is None or "status" not in row:
            logger.warning("{} was written by half: size {} is done again", file.name, batch_size)
            return None
        return row

    def write_row(self, row: Mapping[str, Any]) -> None:
        _write(self.path / f"{self.stem(row['batch_size'])}.json", row)

    def remove_row(self, batch_size: int) -> None:
        """Before a size is done again: its curve is about to be another."""
        (self.path / f"{self.stem(batch_size)}.json").unlink(missing_ok=True)

    def curve_file(self, batch_size: int) -> Path:
        return self.path / f"{self.stem(batch_size)}.jsonl"

    @staticmethod
    def stem(batch_size: int) -> str:
        return f"size-{batch_size:05d}"


def curve_facts(curve: Sequence[Mapping[str, Any]], *, higher_is_better: bool) -> dict[str, Any]:
    """What a curve says of a size: how far it came, its last and its best figures."""
    last = curve[-1] if curve else {"update": 0, "done": 0, "seconds": 0.0}
    facts = {"updates": last["update"], "done": last["done"], "seconds": last["seconds"]}
    trained = [(each["done"], each["train"]) for each in curve if each["train"] is not None]
    if trained:
        late = [value for done, value in trained if done > (1 - FINAL_SHARE) * trained[-1][0]]
        facts["final_train"] = math.fsum(late) / len(late)
    held = [
        (each["heldout"], each["done"]) for each in curve if each["heldout"] is not None and each["update"]
    ]
    if held:
        best = (max if higher_is_better else min)(held, key=lambda each: each[0])
        facts |= {"final_heldout": held[-1][0], "best_heldout": best[0], "best_heldout_at": best[1]}
    return facts


def whole_row(facts: Mapping[str, Any]) -> dict[str, Any]:
    """All of ROW_KEYS; what is not known, or not finite, is null."""
    values = ((name, facts.get(name)) for name in ROW_KEYS)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same, setting by setting."""
    told = []
    for name, new in now.items():
        old = before.get(name)
        if isinstance(new, dict) and isinstance(old, dict):
            told += _differences(old, new)
        elif old != new and name not in MAY_CHANGE:
            told.append(f"{name} is {old} there and {new} here")
    return told


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_whole(file, json.dumps(content, indent=1) + "\n")
