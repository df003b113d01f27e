"""A sweep's or a run's folder as plain data. What is missing or broken becomes a sentence, not an error.

Figures are numbers or None: a row may have been cut short, written by an older version, or hold NaN.
An error is only what leaves nothing to report: no folder, neither a sweep nor a run, nothing finished.
Left out: checkpoints and TensorBoard's files, which hold nothing that the JSON lines do not.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo.config import CONFIG_FILE, SettingsError, read_yaml
from grpo.evaluate import quality
from grpo.evaluate.quality import Change, Example
from grpo.play.record import FILE as MATCH_FILE
from grpo.play.record import FOLDER as MATCHES
from grpo.play.record import Match
from grpo.run.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, read_lines

SWEEP_FILE, NOTES_FILE, LEAK_FILE = "sweep.json", "notes.md", "leak.json"
_SIZE_FILE = re.compile(r"size-(\d+)\.jsonl?")
Record = Mapping[str, Any]
OK = "ok"


@dataclass(frozen=True)
class Size:
    """One batch size of a sweep: what was asked, found, and its curve. Names are those of its file."""

    batch_size: int
    status: str
    message: str = ""
    updates: float | None = None
    done: float | None = None
    learning_rate: float | None = None
    warmup_updates: float | None = None
    seconds: float | None = None
    compile_s: float | None = None
    steady_s_per_update: float | None = None
    rate: float | None = None
    final_train: float | None = None
    final_heldout: float | None = None
    best_heldout: float | None = None
    best_heldout_at: float | None = None
    heldout_stderr: float | None = None
    peak_bytes: float | None = None
    predicted_bytes: float | None = None
    """In rows, of its last steps."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Predicted bytes by component."""
    tuned: Sequence[tuple[float, float]] = ()
    """(learning rate, held-out quality) of each try."""
    curve: Sequence[Record] = ()


@dataclass(frozen=True)
class Sweep:
    """All sizes in order, finished or not, and what they had in common."""

    name: str
    settings: Record
    sizes: Sequence[Size]
    notes: str
    missing: Sequence[str]

    @property
    def finished(self) -> list[Size]:
        return [size for size in self.sizes if size.status == OK]

    @property
    def unit(self) -> str:
        """What is counted as work: tokens or samples."""
        return str(self.settings.get("unit") or "units")

    @property
    def quality(self) -> str:
        """held-out loss, held-out reward."""
        return str(_mapping(self.settings.get("quality")).get("name") or "held-out loss")

    @property
    def quality_unit(self) -> str:
        return str(_mapping(self.settings.get("quality")).get("unit") or "")

    @property
    def sign(self) -> int:
        """1 where higher is better, -1 where lower is."""
        return 1 if _mapping(self.settings.get("quality")).get("better") == "higher" else -1

    @property
    def start(self) -> str:
        """What `compile_s` went into: without torch.compile, kernels and caches."""
        return "getting started" if self.settings.get("compile") is False else "compiling"

    @property
    def usable_bytes(self) -> float | None:
        return figure(self.settings, "memory_limit_bytes") or figure(self.settings, "usable_bytes")


@dataclass(frozen=True)
class Run:
    """A training run: its settings, and the lines it wrote."""

    name: str
    settings: Record
    steps: Sequence[Record]
    evaluations: Sequence[Record]
    completions: Sequence[Record]
    memory: Sequence[Record]
    leak: Record
    missing: Sequence[str]
    changes: Sequence[Change] = ()
    """Of held-out quality from before training to after it, where that was measured."""
    examples: Sequence[Example] = ()
    matches: Sequence[Match] = ()
    """The last played comes last."""


def figure(record: Record, name: str) -> float | None:
    """A finite number, or None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def points(records: Sequence[Record], x: str, y: str) -> tuple[list[float], list[float]]:
    """The columns `x` and `y` of those records that have both."""
    pairs = [(figure(record, x), figure(record, y)) for record in records]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in whole], [b for _, b in whole]


class NoSteps(ValueError):
    """A run that has logged nothing yet."""


def read_folder(folder: Path) -> Sweep | Run:
    """What a folder holds. ValueError where that is nothing to report on."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give that of a run or of a sweep.")
    if (folder / SWEEP_FILE).exists() or any(_SIZE_FILE.fullmatch(each.name) for each in folder.iterdir()):
        return read_sweep(folder)
    if (folder / METRICS_FILE).exists():
        return read_run(folder)
    raise ValueError(
        f"{folder} is neither a run nor a sweep: it holds no {METRICS_FILE} and no {SWEEP_FILE}. Give the "
        "folder that train_lean.py or scripts/sweep_batch_sizes.py wrote."
    )


def read_sweep(folder: Path) -> Sweep:
    missing: list[str] = []
    settings = _read_json(folder / SWEEP_FILE, missing, "what the sizes have in common is not known")
    planned = {int(size) for size in settings.get("batch_sizes") or [] if isinstance(size, int)}
    found = {int(match[1]) for each in folder.iterdir() if (match := _SIZE_FILE.fullmatch(each.name))}
    if not found:
        raise ValueError(
            f"{folder} is a sweep in which no size has been tried: run the sweep until one has finished."
        )
    sizes = [_read_size(folder, batch_size, missing) for batch_size in sorted(planned | found)]
    notes = folder / NOTES_FILE
    text = notes.read_text(errors="replace").strip() if notes.exists() else ""
    return Sweep(_name(folder), settings, sizes, text, missing)


def _read_size(folder: Path, batch_size: int, missing: list[str]) -> Size:
    stem = f"size-{batch_size:05d}"
    row_file = folder / f"{stem}.json"
    curve = _read_lines(folder / f"{stem}.jsonl", missing)
    if not row_file.exists():
        status = "unfinished" if curve else "not run"
        missing.append(f"Size {batch_size} has no figures: it is {status}.")
        return Size(batch_size, status, curve=curve)
    row = _read_json(row_file, missing, f"the figures of size {batch_size} are missing")
    numbers = {item.name: figure(row, item.name) for item in fields(Size) if item.type == float | None}
    for name in ("seconds", "final_heldout"):
        if row.get("status") == OK and numbers[name] is None:
            missing.append(f"{row_file.name} has no {name}.")
    return Size(
        batch_size, str(row.get("status") or "unreadable"), str(row.get("message") or ""), **numbers,
        parts={name: size for name, size in _numbers(row.get("parts")).items() if size},
        tuned=[(rate, quality) for each in row.get("tuned") or []
               if (rate := figure(_mapping(each), "learning_rate")) is not None
               and (quality := figure(_mapping(each), "heldout")) is not None],
        curve=curve,
    )  # fmt: skip


def read_run(folder: Path) -> Run:
    missing: list[str] = []
    lines = _read_lines(folder / METRICS_FILE, missing)
    if not lines:
        raise NoSteps(f"{folder} is a run that has logged no step yet: wait for its first one.")
    try:
        settings = read_yaml(folder / CONFIG_FILE)
    except SettingsError as error:
        settings = {}
        missing.append(f"The settings are not known: {error}")
    leak = _read_json(folder / LEAK_FILE, missing, "") if (folder / LEAK_FILE).exists() else {}
    completions = _read_lines(folder / COMPLETIONS_FILE, missing, "no completions are shown")
    memory = _read_lines(folder / MEMORY_FILE, missing, "memory by phase is not shown")
    evaluations = [line for line in lines if any(name.startswith("eval_") for name in line)]
    steps = [line for line in lines if any(not name.startswith(("eval_", "step")) for name in line)]
    try:
        changes, examples = quality.load(folder)
    except ValueError as error:
        changes, examples = [], []
        missing.append(f"Before and after training is not shown: {error}.")
    return Run(
        _name(folder), settings, steps, evaluations, completions, memory, leak, missing, changes, examples,
        _read_matches(folder / MATCHES, missing),
    )  # fmt: skip


def _read_matches(folder: Path, missing: list[str]) -> list[Match]:
    found = []
    for file in sorted(folder.glob(f"*/{MATCH_FILE}"), key=lambda file: file.stat().st_mtime):
        try:
            found.append(Match.load(file.parent))
        except ValueError as error:
            missing.append(f"A match is not shown: {error}.")
    return found


def _name(folder: Path) -> str:
    return folder.resolve().name


def _read_json(file: Path, missing: list[str], so: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
        if isinstance(content, dict):
            return content
        reason = "holds no figures"
    except FileNotFoundError:
        reason = "is missing"
    except (OSError, ValueError):
        reason = "cannot be read, as if it had been cut short"
    missing.append(f"{file.name} {reason}{': ' if so else ''}{so}.")
    return {}


def _read_lines(file: Path, missing: list[str], so: str = "") -> list[dict[str, Any]]:
    """The records of a JSON-lines file; how many lines were broken is said."""
    if not file.is_file():
        if so or file.exists():
            missing.append(f"{file.name} is {'no file' if file.exists() else 'missing'}: {so or 'left out'}.")
        return []
    records = read_lines(file)
    broken = sum(bool(line.strip()) for line in file.read_bytes().splitlines()) - len(records)
    if broken:
        lines = "a line" if broken == 1 else f"{broken} lines"
        missing.append(f"{file.name} has {lines} that cannot be read; the others are shown.")
    return records


def _mapping(value: object) -> Record:
    return value if isinstance(value, dict) else {}


def _numbers(value: object) -> dict[str, float]:
    mapping = _mapping(value)
    return {name: size for name in mapping if (size := figure(mapping, name)) is not None}
