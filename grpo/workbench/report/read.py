"""Folders of runs and sweeps as plain data. What is missing or broken becomes a sentence, not an error.

An error is only what leaves nothing to report: no folder, or neither a run nor a sweep.
Left out: checkpoints and TensorBoard's files, which hold nothing that the JSON lines do not.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import CONFIG_FILE, SettingsError, read_yaml
from grpo.evaluate import quality
from grpo.evaluate.quality import Change, Example
from grpo.play.record import FILE as MATCH_FILE
from grpo.play.record import FOLDER as MATCHES
from grpo.play.record import Match
from grpo.run.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, read_lines
from grpo.workbench.sizes import SWEEP_FILE, Record, Size, figure, read_json, read_size, size_folder

NOTES_FILE, LEAK_FILE = "notes.md", "leak.json"
_SIZE_FOLDER = re.compile(r"size-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: its settings, and the lines it wrote.

    changes: of held-out quality from before training to after it, where that was measured. matches: the last
    played comes last.
    """

    name: str
    settings: Record
    steps: Sequence[Record]
    evaluations: Sequence[Record]
    completions: Sequence[Record]
    memory: Sequence[Record]
    leak: Record
    changes: Sequence[Change]
    examples: Sequence[Example]
    matches: Sequence[Match]
    missing: Sequence[str]

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.evaluations

    def logged(self, name: str) -> list[float]:
        """A metric, of those steps that have it."""
        return [value for (value,) in points(self.steps, name)]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All sizes in order, finished or not, and what they have in common.

    unit: what is counted as work, tokens or samples. quality: held-out loss or reward. sign: 1 where a higher
    one is better, -1 where a lower one is.
    """

    name: str
    header: Record
    sizes: Sequence[Size]
    unit: str
    quality: str
    quality_unit: str
    sign: int
    notes: str
    missing: Sequence[str]

    @property
    def finished(self) -> list[Size]:
        return [size for size in self.sizes if size.is_finished]


def points(records: Iterable[Record], *names: str) -> list[tuple[float, ...]]:
    """The figures `names` of those records that have them all."""
    rows = [[figure(record, name) for name in names] for record in records]
    return [tuple(value for value in row if value is not None) for row in rows if None not in row]


def read_folder(folder: Path) -> Sweep | Run:
    """What a folder holds. ValueError where that is nothing to report on."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give that of a run or of a sweep.")
    tried = {int(match[1]) for path in folder.iterdir() if (match := _SIZE_FOLDER.fullmatch(path.name))}
    if tried or (folder / SWEEP_FILE).exists():
        return _read_sweep(folder, tried)
    if (folder / METRICS_FILE).exists():
        return _read_run(folder)
    raise ValueError(
        f"{folder} is neither a run nor a sweep: it holds no {METRICS_FILE} and no {SWEEP_FILE}. Give the "
        "folder that train_lean.py or grpo-lean sweep wrote."
    )


def _read_sweep(folder: Path, tried: set[int]) -> Sweep:
    if not tried:
        raise ValueError(
            f"{folder} is a sweep in which no size has been tried: run the sweep until one has finished."
        )
    header, missing = read_json(folder / SWEEP_FILE), []
    if not header:
        missing.append(f"{SWEEP_FILE} cannot be read: what the sizes have in common is not known.")
    planned = tried | set(header.get("batch_sizes") or [])
    sizes = [read_size(folder, batch_size, header) for batch_size in sorted(planned)]
    for size in sizes:
        for name in (METRICS_FILE, MEMORY_FILE):
            _lines(folder, f"{size_folder(folder, size.batch_size).name}/{name}", missing)
    notes, quality = folder / NOTES_FILE, header.get("quality") or {}
    return Sweep(
        name=folder.resolve().name, header=header, sizes=sizes, unit=str(header.get("unit") or "units"),
        quality=quality.get("name", "held-out loss"), quality_unit=quality.get("unit") or "",
        sign=1 if quality.get("better") == "higher" else -1,
        notes=notes.read_text(errors="replace").strip() if notes.exists() else "", missing=missing,
    )  # fmt: skip


def _read_run(folder: Path) -> Run:
    missing: list[str] = []
    lines = [line for line in _lines(folder, METRICS_FILE, missing) if figure(line, "step") is not None]
    settings: Record = {}
    changes: list[Change] = []
    examples: list[Example] = []
    matches: list[Match] = []
    try:
        settings = read_yaml(folder / CONFIG_FILE)
    except SettingsError as error:
        missing.append(f"The settings are not known: {error}")
    try:
        changes, examples = quality.load(folder)
    except ValueError as error:
        missing.append(f"Before and after training is not shown: {error}.")
    for file in sorted((folder / MATCHES).glob(f"*/{MATCH_FILE}"), key=lambda file: file.stat().st_mtime):
        try:
            matches.append(Match.load(file.parent))
        except ValueError as error:
            missing.append(f"A match is not shown: {error}.")
    return Run(
        name=folder.resolve().name, settings=settings,
        steps=[line for line in lines if any(not name.startswith(("eval_", "step")) for name in line)],
        evaluations=[line for line in lines if any(name.startswith("eval_") for name in line)],
        completions=_lines(folder, COMPLETIONS_FILE, missing, "no completions are shown"),
        memory=_lines(folder, MEMORY_FILE, missing, "memory by phase is not shown"),
        leak=read_json(folder / LEAK_FILE), changes=changes, examples=examples,
        matches=[match for match in matches if match.finished], missing=missing,
    )  # fmt: skip


def _lines(folder: Path, name: str, missing: list[str], lost: str = "") -> list[dict[str, Any]]:
    """The records of a JSON-lines file. lost: what is to be said where there is no such file."""
    file = folder / name
    if not file.is_file():
        missing += [f"{name} is missing: {lost}."] if lost else []
        return []
    records = read_lines(file)
    broken = sum(bool(line.strip()) for line in file.read_bytes().splitlines()) - len(records)
    if broken:
        missing.append(f"{name} has lines that cannot be read, {broken} of them; the others are shown.")
    return records
