"""Folders of runs and sweeps as plain data. What is missing or broken becomes a sentence, not an error.

An error is only what leaves nothing to report: no folder, or neither a run nor a sweep.
Left out: checkpoints and TensorBoard's files, which hold nothing that the JSON lines do not.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import CONFIG_FILE, read_yaml
from grpo.errors import UserError
from grpo.evaluate import quality
from grpo.evaluate.quality import Change, Example
from grpo.logs.starts import STARTS_FILE
from grpo.logs.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, read_lines
from grpo.play.record import FILE as MATCH_FILE
from grpo.play.record import FOLDER as MATCHES
from grpo.play.record import Match
from grpo.workbench.sizes import SWEEP_FILE, Record, SizeResult, figure, read_json, read_size, size_folder

NOTES_FILE, LEAK_FILE = "notes.md", "leak.json"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A training run: its settings, and the lines it wrote.

    changes: of held-out quality from before training to after it, where that was measured. matches: those
    with a finished game; the last played comes last.
    """

    name: str
    settings: Record
    steps: Sequence[Record]
    evaluations: Sequence[Record]
    completions: Sequence[Record]
    memory: Sequence[Record]
    starts: Sequence[Record]
    leak: Record
    changes: Sequence[Change]
    examples: Sequence[Example]
    matches: Sequence[Match]
    missing: Sequence[str]

    def logged(self, metric: str) -> list[float]:
        """A metric, of those steps that have it."""
        return [value for (value,) in points(self.steps, metric)]


@dataclass(frozen=True, kw_only=True)
class SweepFolder:
    """All sizes in order, finished or not, and what they have in common.

    unit: what is counted as work, tokens or samples. quality: held-out loss or reward. sign: 1 where a higher
    one is better, -1 where a lower one is.
    """

    name: str
    header: Record
    sizes: Sequence[SizeResult]
    unit: str
    quality: str
    quality_unit: str
    sign: int
    notes: str
    missing: Sequence[str]

    @property
    def usable_bytes(self) -> float:
        """By the limit or of the device; 0 where that is not known."""
        return figure(self.header, "memory_limit_bytes") or figure(self.header, "usable_bytes") or 0.0

    @property
    def finished(self) -> list[SizeResult]:
        return [size for size in self.sizes if size.is_finished]


def points(records: Iterable[Record], *names: str) -> list[tuple[float, ...]]:
    """The figures `names` of those records that have them all."""
    known = (record for record in records if all(name in record for name in names))
    rows = [[figure(record, name) for name in names] for record in known]
    return [tuple(value for value in row if value is not None) for row in rows if None not in row]


def curves(records: Iterable[Record], pattern: str, mark: str = "") -> dict[str, str]:
    """The names of figures that a pattern matches, as curves of `charts.line`: by what its group matched.

    What matches without the group comes last, as "all", or as "" where there is no other. mark: stands before
    each label. The ends of intervals are left out.
    """
    labels: dict[str, str] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        match = re.fullmatch(pattern, name)
        if match and not name.endswith(("/low", "/high")):
            labels[mark + (match[1] or "")] = name
    if "" in labels:
        labels["all" if len(labels) > 1 else ""] = labels.pop("")
    return labels


def prefix_by_run(records: Mapping[str, Sequence[Record]], *shared: str) -> list[Record]:
    """Records by owner in one list, for a picture of several owners' curves: NAME becomes OWNER/NAME.

    shared: names that stay, of what curves are drawn over.
    """
    return [
        {name if name in shared else f"{owner}/{name}": value for name, value in record.items()}
        for owner, owners_records in records.items()
        for record in owners_records
    ]


def read_folder(folder: Path, name: str) -> SweepFolder | RunFolder:
    """Reads a folder. name: its name on the page. ValueError where it cannot be reported on."""
    sizes = (re.fullmatch(r"size-(\d+)", path.name) for path in folder.glob("size-*"))
    if tried := {int(size[1]) for size in sizes if size}:
        return _read_sweep(folder, name, tried)
    if (folder / SWEEP_FILE).exists():
        raise UserError(
            f"{folder} is a sweep in which no size has been tried: run the sweep until one has finished."
        )
    if (folder / METRICS_FILE).exists():
        return _read_run(folder, name)
    raise UserError(
        f"{folder} is neither a run nor a sweep: it holds no {METRICS_FILE} and no {SWEEP_FILE}. Give the "
        "folder that train_lean.py or grpo-lean sweep wrote."
    )


def _read_sweep(folder: Path, name: str, tried: set[int]) -> SweepFolder:
    header, missing = read_json(folder / SWEEP_FILE), list[str]()
    if not header:
        missing.append(f"{SWEEP_FILE} cannot be read: what the sizes have in common is not known.")
    batch_sizes = sorted(tried | set(header.get("batch_sizes") or []))
    for batch_size in batch_sizes:
        for file in (METRICS_FILE, MEMORY_FILE):
            _lines(folder, f"{size_folder(folder, batch_size).name}/{file}", missing)
    notes, quality = folder / NOTES_FILE, header.get("quality") or {}
    return SweepFolder(
        name=name,
        header=header,
        sizes=[read_size(folder, batch_size, header) for batch_size in batch_sizes],
        unit=str(header.get("unit") or "units"),
        quality=quality.get("name", "held-out loss"),
        quality_unit=quality.get("unit") or "",
        sign=1 if quality.get("better") == "higher" else -1,
        notes=notes.read_text(errors="replace").strip() if notes.exists() else "",
        missing=missing,
    )


def _read_run(folder: Path, name: str) -> RunFolder:
    missing: list[str] = []
    settings: Record = {}
    changes, examples, matches = list[Change](), list[Example](), list[Match]()
    lines = [line for line in _lines(folder, METRICS_FILE, missing) if figure(line, "step") is not None]
    with _or_missing(missing, "The settings are not known"):
        settings = read_yaml(folder / CONFIG_FILE)
    with _or_missing(missing, "Before and after training is not shown"):
        changes, examples = quality.load(folder)
    for file in sorted((folder / MATCHES).glob(f"*/{MATCH_FILE}"), key=lambda file: file.stat().st_mtime):
        with _or_missing(missing, "A match is not shown"):
            matches.append(Match.load(file.parent))
    return RunFolder(
        name=name,
        settings=settings,
        steps=[line for line in lines if any(not metric.startswith(("eval_", "step")) for metric in line)],
        evaluations=[line for line in lines if any(metric.startswith("eval_") for metric in line)],
        completions=_lines(folder, COMPLETIONS_FILE, missing, "no completions are shown"),
        memory=_lines(folder, MEMORY_FILE, missing, "memory by phase is not shown"),
        starts=_lines(folder, STARTS_FILE, missing),
        leak=read_json(folder / LEAK_FILE),
        changes=changes,
        examples=examples,
        matches=[match for match in matches if match.finished],
        missing=missing,
    )


@contextmanager
def _or_missing(missing: list[str], consequence: str) -> Iterator[None]:
    """Inside, errors of reading are noted."""
    try:
        yield
    except ValueError as error:
        missing.append(f"{consequence}: {error}")


def _lines(folder: Path, name: str, missing: list[str], consequence: str = "") -> list[dict[str, Any]]:
    """The records of a JSON-lines file. consequence: what is to be said where there is no such file."""
    file = folder / name
    if not file.is_file():
        missing += [f"{name} is missing: {consequence}."] if consequence else []
        return []
    records = read_lines(file)
    broken = sum(bool(line.strip()) for line in file.read_bytes().splitlines()) - len(records)
    if broken:
        missing.append(f"{name} has lines that cannot be read, {broken} of them; the others are shown.")
    return records
