"""Trackers of a run's numbers: JSON lines always, TensorBoard, W&B and Trackio on request.

Metric names are TRL's, so that dashboards carry over.
"""

import importlib
import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from loguru import logger

from grpo.errors import UserError
from grpo.files import write_whole

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
MEMORY_FILE = "memory.jsonl"
_PROJECT = "grpo-lean"


class Board(NamedTuple):
    """A tracker."""

    send: Callable[[int, Mapping[str, Any]], object]
    """Gives it a step's metrics, by name."""
    close: Callable[[], object]
    table: Callable[..., Any] | None = None
    """Makes what it shows as a table, of `columns` and rows of `data`; None: it shows none."""


def process_file(file: str, process: int) -> str:
    """`file` of the first process, `memory-process-1.jsonl` and so on of the others."""
    path = Path(file)
    return f"{path.stem}-process-{process}{path.suffix}" if process else file


class NewLines:
    """Each call gives the records that a JSON-lines file has got since; half a line waits for its rest.

    A file that is not there yet has none. Whatever is no JSON object is left out, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def __call__(self, *, to_the_end: bool = False) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        if not to_the_end:
            content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        records = []
        for line in content.splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                records.append(record)
            else:
                logger.warning("{}: a broken line was left out", self._path)
        return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a JSON-lines file; a last line that was cut short is a broken one."""
    return NewLines(path)(to_the_end=True)


def check_trackers(names: Sequence[str]) -> None:
    """ValueError if one of them is not installed, or wants to know first who is there."""
    for name in {"wandb", "trackio"} & {*names}:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"trackers names {name}, which is not installed: pip install {name}, or leave it out."
            )
    if "wandb" not in names:
        return
    import wandb

    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
        raise UserError(
            "trackers names wandb, where nobody is logged in: wandb login, or set WANDB_MODE=offline, or "
            "leave it out."
        )


class RunTracker:
    """Writes one run's numbers, a flushed line at a time. Lines after `before_step` of an earlier try go.

    What cannot be written, to a full disk say, is a warning, and noted in `unwritten`.
    """

    def __init__(
        self, folder: Path, *, trackers: Sequence[str], settings: Mapping[str, Any], before_step: int = 0
    ) -> None:
        self.unwritten: list[str] = []
        self._folder, self._before_step = folder, before_step
        self._failing: set[str] = set()
        self._files: dict[str, TextIO] = {}
        self._boards: dict[str, Board] = {}
        others = (path.name for path in folder.glob("memory-process-*.jsonl"))  # there may have been more
        for name in (METRICS_FILE, COMPLETIONS_FILE, MEMORY_FILE, *others):
            self._files[name] = self._begin(name)
        if "tensorboard" in trackers:
            with self._attempt("tensorboard"):
                self._boards["tensorboard"] = _tensorboard(folder, before_step + 1)
        for name in (name for name in ("wandb", "trackio") if name in trackers):
            with self._attempt(name):
                self._boards[name] = _board(name, folder, settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics. What is not finite becomes null in JSON."""
        self._write(METRICS_FILE, step, [metrics])
        for name, board in self._boards.items():
            with self._attempt(name):
                board.send(step, metrics)

    def log_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """A sample of one step's completions with their rewards, as a table where a tracker shows one."""
        records = list(rows)
        self._write(COMPLETIONS_FILE, step, records)
        columns = list(dict.fromkeys(name for record in records for name in record))
        data = [[_cell(record.get(name)) for name in columns] for record in records]
        for name, board in self._boards.items():
            if board.table is not None and records:
                with self._attempt(name):
                    board.send(step, {"completions": board.table(columns=columns, data=data)})

    def log_memory(self, step: int, processes: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        """Logs what each phase of one step held in each process, and what had been predicted."""
        for process, phases in enumerate(processes):
            self._write(process_file(MEMORY_FILE, process), step, phases)

    def close(self) -> None:
        closing = {name: board.close for name, board in self._boards.items()}
        for name, close in ({name: file.close for name, file in self._files.items()} | closing).items():
            with self._attempt(name):
                close()

    def _begin(self, name: str) -> TextIO:
        """A JSON-lines file, to go on with after `before_step`; a line that a kill has cut short goes."""
        path = self._folder / name
        try:
            if self._before_step > 0 and not path.exists():
                logger.warning("{} is gone: it begins anew after step {}", path, self._before_step)
            records = [line for line in read_lines(path) if line.get("step", math.inf) <= self._before_step]
            write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
            return path.open("a", buffering=1)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): make room on its disk, or move away what is "
                "in its place; then start again."
            ) from error

    def _write(self, name: str, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._files:
            self._files[name] = self._begin(name)
        for record in records:
            with self._attempt(name):
                line = json.dumps({"step": step, **_finite(record)}, allow_nan=False)
                self._files[name].write(line + "\n")

    @contextmanager
    def _attempt(self, name: str) -> Iterator[None]:
        """Inside, a failure (a full disk, no network) is a warning, once: no reason to stop learning."""
        try:
            yield
        except Exception as error:
            if name not in self._failing:
                logger.warning("{} cannot be written ({}); training goes on", name, error)
                self.unwritten = list(dict.fromkeys([*self.unwritten, name]))
            self._failing.add(name)
        else:
            self._failing.discard(name)


def _finite(value: Any) -> Any:
    """Null for numbers that JSON does not have (RFC 8259), at any depth."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, first_step: int) -> Board:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def send(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Board(send, writer.close)


def _board(name: str, folder: Path, settings: Mapping[str, Any]) -> Board:
    """W&B, or Trackio, which has its functions. A resumed run goes on as the same one there.

    W&B knows it by the id that is kept in the run's folder, Trackio by the folder's name.
    """
    library = importlib.import_module(name)
    options: dict[str, Any] = {"embed": False}
    if name == "wandb":
        id_file = folder / "wandb-id"
        run_id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        if id_file.is_file():
            run_id = id_file.read_text(encoding="utf-8")
        write_whole(id_file, run_id)
        options = {"id": run_id, "dir": str(folder)}
    # A project or name that is handed over would overrule what the environment says.
    project = os.environ.get(f"{name.upper()}_PROJECT") or _PROJECT
    title = os.environ.get(f"{name.upper()}_NAME") or folder.name
    run = library.init(project=project, name=title, config=dict(settings), resume="allow", **options)
    return Board(lambda step, values: run.log(dict(values), step=step), run.finish, library.Table)


def _cell(value: Any) -> Any:
    """Returns a table's cells, which are texts and numbers."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)
