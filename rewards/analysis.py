"""An engine's analysis of a position, and the file that keeps it from one run to the next."""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from loguru import logger

_LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Analysis:
    """Moves of a position, best first, and their evals in pawns from the side to move.

    Both are empty where the game is over.
    """

    moves: tuple[str, ...]
    evals: tuple[float, ...]


class AnalysisCache:
    """Analyses by key in SQLite (write-ahead log, so several processes may share the file).

    It only saves time: where the file cannot be used (no such disk, full, damaged) a warning says so
    and this process remembers for itself.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path: str | Path = path or ""
        try:
            self._path = path or Path(platformdirs.user_cache_dir("grpo-lean"), "engine.sqlite")
            os.makedirs(Path(self._path).parent, exist_ok=True)
            self._db = self._open(self._path)
        except (OSError, sqlite3.Error, RuntimeError) as error:  # the last where nobody has a home
            self._forget_file(error)

    def get(self, key: str) -> Analysis | None:
        row = self._execute("SELECT value FROM analysis WHERE key = ?", key)
        if row is None:
            return None
        moves, _, evals = row[0].partition("|")
        return Analysis(tuple(moves.split()), tuple(float(number) for number in evals.split()))

    def put(self, key: str, analysis: Analysis) -> None:
        value = f"{' '.join(analysis.moves)}|{' '.join(map(repr, analysis.evals))}"
        self._execute("INSERT OR REPLACE INTO analysis VALUES (?, ?)", key, value)

    def close(self) -> None:
        self._db.close()

    def _execute(self, statement: str, *values: str) -> Any:
        try:
            return self._db.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._forget_file(error)
            return self._execute(statement, *values)

    def _forget_file(self, error: Exception) -> None:
        name = f"engine cache {self._path}".rstrip()
        logger.warning("{} cannot be used, analyses will not be kept: {}", name, error)
        self._db = self._open(":memory:")

    @staticmethod
    def _open(path: str | Path) -> sqlite3.Connection:
        # Used from several threads, which take turns.
        db = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise  # else another process, which this statement alone does not wait for, switches the file
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("CREATE TABLE IF NOT EXISTS analysis (key TEXT PRIMARY KEY, value TEXT)")
        return db
