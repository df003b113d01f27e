"""Where a run's numbers go: JSON lines always, TensorBoard and W&B on request.

Metric names are TRL's, so that dashboards carry over.
"""

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from loguru import logger

from grpo.files import write_whole

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
MEMORY_FILE = "memory.jsonl"


class _Lines:
    """A JSON-lines file, one flushed line at a time; a line cut short by a kill is dropped."""

    def __init__(self, path: Path, *, before_step: int) -> None:
        try:
            if before_step > 0 and not path.exists():
                logger.warning("{} is gone: it begins anew after step {}", path, before_step)
            kept = [record for record in read_lines(path) if record.get("step", math.inf) <= before_step]
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
            self._file: TextIO = path.open("a")
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written ({error.strerror}): make room on its disk, or move away what is "
                "in its place; then start again."
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; [] where there is no file, and without a broken last line."""
    return _parse(path, path.read_bytes().splitlines()) if path.exists() else []


class NewLines:
    """Each call gives the records that a JSON-lines file has got since; half a line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def __call__(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return _parse(self._path, whole.splitlines())


def _parse(path: Path, lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Whatever is no JSON object is left out, with a word."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            logger.warning("{}: a broken line was left out", path)
    return records


def check_trackers(names: Sequence[str]) -> None:
    """ValueError if one of them is not installed, or wants to know first who is there."""
    if "wandb" not in names:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ValueError("trackers names wandb, which is not installed: pip install wandb, or leave it out.")
    import wandb

    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "trackers names wandb, where nobody is logged in: wandb login, or set WANDB_MODE=offline, or "
            "leave it out."
        )


def process_file(file: str, process: int) -> str:
    """`file` of the first process, `memory-process-1.jsonl` and so on of the others."""
    path = Path(file)
    return f"{path.stem}-process-{process}{path.suffix}" if process else file


class NoTracker:
    """Of a process that does not write the run's folder."""

    unwritten: Sequence[str] = ()
    """What could not be written, now or earlier."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def log_memory(self, step: int, processes: Iterable[Iterable[Mapping[str, Any]]]) -> None: ...

    def close(self) -> None: ...


class RunTracker(NoTracker):
    """Writes one run's metrics and completions. Lines after `before_step` of an earlier try go.

    What cannot be written, to a full disk say, is a warning.
    """

    def __init__(
        self, folder: Path, *, trackers: Sequence[str], settings: Mapping[str, Any], before_step: int = 0
    ) -> None:
        self._metrics = _Lines(folder / METRICS_FILE, before_step=before_step)
        self._completions = _Lines(folder / COMPLETIONS_FILE, before_step=before_step)
        self._folder, self._before_step = folder, before_step
        for path in folder.glob("memory-process-*.jsonl"):  # there may have been more processes
            _Lines(path, before_step=before_step).close()
        self._memory: list[_Lines] = []  # by process
        self._failing: set[str] = set()
        self.unwritten: list[str] = []
        self._board: Any = None
        self._wandb: Any = None
        if "tensorboard" in trackers:
            from torch.utils.tensorboard import SummaryWriter

            def open_board() -> None:
                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=before_step + 1)

            self._attempt("tensorboard", open_board)
        if "wandb" in trackers:
            self._wandb = _start_wandb(folder, settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics. What is not finite becomes null in JSON."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._attempt(METRICS_FILE, lambda: self._metrics.write({"step": step, **finite}))
        if self._board is not None:
            board = self._board
            self._attempt(
                "tensorboard",
                lambda: [board.add_scalar(name, value, step) for name, value in metrics.items()],
            )
        if self._wandb is not None:
            self._attempt("wandb", lambda: self._wandb.log(dict(metrics), step=step))

    def log_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """A sample of one step's completions with their rewards."""
        for row in rows:
            self._attempt(COMPLETIONS_FILE, partial(self._completions.write, {"step": step, **row}))

    def log_memory(self, step: int, processes: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        """What each phase of one step held in each process, and what had been predicted."""
        for process, phases in enumerate(processes):
            if process == len(self._memory):
                path = self._folder / process_file(MEMORY_FILE, process)
                self._memory.append(_Lines(path, before_step=self._before_step))
            for phase in phases:
                self._attempt(MEMORY_FILE, partial(self._memory[process].write, {"step": step, **phase}))

    def close(self) -> None:
        self._attempt(METRICS_FILE, self._metrics.close)
        for memory in self._memory:
            self._attempt(MEMORY_FILE, memory.close)
        self._attempt(COMPLETIONS_FILE, self._completions.close)
        if self._board is not None:
            self._attempt("tensorboard", self._board.close)
        if self._wandb is not None:
            self._wandb.finish()

    def _attempt(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # a full disk, no network: no reason to stop learning
            if what not in self._failing:
                logger.warning("{} cannot be written ({}); training goes on", what, error)
                self.unwritten = list(dict.fromkeys([*self.unwritten, what]))
            self._failing.add(what)
        else:
            self._failing.discard(what)


def _start_wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    """A resumed run goes on as the same one there, by the id that is kept in its folder."""
    import wandb

    known = folder / "wandb-id"
    run_id = known.read_text() if known.is_file() else secrets.token_hex(4)
    write_whole(known, run_id)
    return wandb.init(
        project="grpo-lean", name=folder.name, dir=str(folder), config=dict(settings), id=run_id,
        resume="allow",
    )  # fmt: skip
