"""Processes of UCI engines, and positions analysed by Stockfish behind a persistent cache.

An analysis depends on the position, the moves asked for and the limit alone: one thread an engine,
a new game for every position (hash tables carry over otherwise, and the same position gets another
answer later), fixed depth. Left out on purpose: time limits, which never repeat.
"""

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

import chess
from chess.engine import INFO_PV, INFO_SCORE, Limit, SimpleEngine, UciProtocol
from chess.engine import EngineError as EngineFailed
from loguru import logger

from .analysis import Analysis, AnalysisCache
from .formats import canonical_uci, legal_move

MATE_SCORE = 100_000
"""Centipawns of a mate on the board; a mate in n is worth ±(1000 - n/100) pawns."""

MULTIPV, HASH_MB = 5, 4
"""Best moves that an analysis holds, and the hash table of an engine, which can change an answer."""

START_TIMEOUT_S, PATIENCE_S = 10.0, 30.0
"""After this long without a `uciok` an executable counts as not being an engine, and without an answer one
that has started as hung."""

T = TypeVar("T")
Ask = Callable[[SimpleEngine], T]
"""A question to an engine."""


class EngineError(RuntimeError):
    """The engine is missing, failed on a position, or was closed."""


def find_stockfish(path: str | None = None) -> str | None:
    """The executable to run: `path` if given (EngineError if it is not one), else as found."""
    if path is None:
        return shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")  # Debian's
    if executable := shutil.which(os.path.expanduser(os.path.expandvars(path))):
        return executable
    raise EngineError(
        f"stockfish_path={path!r} is not an executable: install Stockfish "
        "(apt-get install stockfish) or give its path"
    )


def require_stockfish(path: str | None = None) -> str:
    """Returns the path of `find_stockfish`; EngineError where there is none."""
    if executable := find_stockfish(path):
        return executable
    raise EngineError("Stockfish was not found: install it (apt-get install stockfish) or give its path")


_LAST_LINES = 6


def _heard_by(said: deque[str]) -> type[UciProtocol]:
    """python-chess's protocol that keeps what an engine says besides its answers, on either stream."""

    class Heard(UciProtocol):
        def line_received(self, line: str) -> None:
            if line.startswith("info string "):
                said.append(line.removeprefix("info string ").strip())
            super().line_received(line)

        def error_line_received(self, line: str) -> None:
            said.append(line.strip())
            super().error_line_received(line)

    return Heard


class UciEngines:
    """Processes of one UCI engine, each asked one question at a time by a thread of its own.

    configure: sets options of an engine that has just started. timeout_s: after this long with one question
    an engine counts as hung. attempts: how often a question is asked where an engine dies or hangs, each time
    of a new process. EngineError where the command is no working engine.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        configure: Callable[[SimpleEngine], None],
        *,
        timeout_s: float,
        attempts: int = 1,
    ) -> None:
        self._command, self._configure = list(command), configure
        self._timeout_s, self._attempts = timeout_s, attempts
        self.engines: list[SimpleEngine | None] = [None] * count
        """None where one has died, or has not been asked yet: it is started for the next question."""
        self._said = [deque[str]() for _ in range(count)]
        self._questions: SimpleQueue[tuple[Future[Any], Ask[Any], str] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(place,), daemon=True) for place in range(count)
        ]
        threading.Thread(target=self._close_with_the_program, daemon=True).start()
        for thread in self._threads:
            thread.start()
        try:
            names = [self.submit(lambda engine: engine.id.get("name", "unknown"), "") for _ in self._threads]
            self.name, *_ = [name.result() for name in names]
        except BaseException:
            self.close()
            raise

    def submit(self, ask: Ask[T], fen: str) -> Future[T]:
        """Returns the future result of `ask`, of an engine. It holds an EngineError where all attempts
        fail."""
        self.check_open()
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # whom it is given to may share it: nobody can cancel it
        self._questions.put((future, ask, fen))
        return future

    def check_open(self) -> None:
        """EngineError after `close`."""
        if self._closed:
            raise EngineError("the engines are closed")

    def close(self) -> None:
        """End the processes: what is not answered yet fails with EngineError. Safe to call twice."""
        self._closed = True
        for place in range(len(self.engines)):
            self._stop(place)
            self._questions.put(None)
        for thread in self._threads:
            thread.join()

    def _close_with_the_program(self) -> None:
        """Python waits at its end for the threads of python-chess, one an engine; atexit comes after that."""
        threading.main_thread().join()
        self.close()

    def _serve(self, place: int) -> None:
        """In a thread: answer questions by the engine in that place until there are no more."""
        for future, ask, fen in iter(self._questions.get, None):
            try:
                future.set_result(self._answer(place, ask, fen))
            except Exception as error:
                future.set_exception(error)

    def _answer(self, place: int, ask: Ask[T], fen: str) -> T:
        for attempt in range(1, self._attempts + 1):
            engine = self.engines[place] or self._start(place)
            # python-chess waits for ever for an answer without a limit of time, and a call that is ended
            # before its engine has ended breaks the shutdown. So an engine that hangs is killed.
            began, killer = time.monotonic(), threading.Timer(self._timeout_s, engine.close)
            killer.start()
            try:
                return ask(engine)
            except (EngineFailed, CancelledError) as error:
                failure = str(error) or "the engine process died"
                if time.monotonic() - began >= self._timeout_s:
                    failure = f"no answer in {self._timeout_s:g} s"
            finally:
                killer.cancel()
            self._stop(place)
            failure += self._last_words(place)
            if attempt < self._attempts and not self._closed:
                logger.warning("engine restarted on {!r}: {}", fen, failure)
        raise EngineError(f"the engine failed on {fen!r}: {failure}")

    def _start(self, place: int) -> SimpleEngine:
        """In its own session: Ctrl-C in the terminal reaches only this process."""
        self.check_open()
        self._said[place] = said = deque[str](maxlen=_LAST_LINES)
        try:
            engine = SimpleEngine.popen(
                _heard_by(said), self._command, timeout=START_TIMEOUT_S, start_new_session=True
            )
            self.engines[place] = engine
            engine.protocol.loop.set_exception_handler(
                lambda _, context: logger.debug("engine: {}", context["message"])
            )
            self._configure(engine)
            engine.timeout = None  # from here on ours counts
            self.check_open()  # `close` may have come before the engine was in the list
            return engine
        except BaseException as error:
            self._stop(place)
            self.check_open()
            if not isinstance(error, OSError | EngineFailed):  # TimeoutError is an OSError
                raise
            reason = (str(error) or f"no answer in {START_TIMEOUT_S:g} s") + self._last_words(place)
            raise EngineError(f"{' '.join(self._command)} is not a working UCI engine: {reason}") from error

    def _last_words(self, place: int) -> str:
        """Returns the errors that an engine printed which has ended, or if there are none its last lines."""
        lines = list(self._said[place])
        errors = [line for line in lines if "error" in line.lower()]
        return f"; it said: {' '.join(errors or lines)}" if lines else ""

    def _stop(self, place: int) -> None:
        engine, self.engines[place] = self.engines[place], None
        if engine is not None:
            engine.close()  # kills, a stopped process too, and what was asked of it fails at once
            engine.returncode.result()


class EnginePool:
    """`num_engines` Stockfish processes that analyse positions in the background.

    depth: plies searched. cache_path: an SQLite file, None for the user's cache folder, ":memory:" for
    none that lasts. A crashed or hung engine is restarted and the position tried once more; a second
    failure is an EngineError in that position's future.

    May be used from several threads, not across a fork: each process makes its own pool.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        depth: int = 8,
        num_engines: int = 1,
        cache_path: str | Path | None = None,
    ) -> None:
        for name, number in (("depth", depth), ("num_engines", num_engines)):
            if number < 1:
                raise ValueError(f"{name}={number}: must be at least 1")
        self._limit, command = Limit(depth=depth), [require_stockfish(path)]
        self._engines = UciEngines(command, num_engines, _configure, timeout_s=PATIENCE_S, attempts=2)
        self._key = f"{self._engines.name}|depth {depth}|multipv {MULTIPV}|hash {HASH_MB}"
        self._lock = threading.Lock()  # of the two that follow
        self._cache = AnalysisCache(cache_path)
        self._asked: WeakValueDictionary[str, Future[Analysis]] = WeakValueDictionary()

    def submit(self, fen: str, moves: Sequence[str] = ()) -> Future[Analysis]:
        """Analyse a position in the background: its best moves, or exactly `moves` if given.

        An eval at fixed depth depends a little on which other moves are asked for with it. The
        analysis is empty where the game is over. ValueError for an illegal position or move (engines
        crash on them); EngineError, in the future, where the engine fails twice or is closed.
        """
        board = chess.Board(fen)
        if not board.is_valid():
            raise ValueError(f"not a legal position, {board.status()!r}: {fen!r}")
        if illegal := sorted(move for move in moves if legal_move(board, move) is None):
            raise ValueError(f"not legal in {fen!r}: {illegal}")
        moves = sorted({canonical_uci(board, move) for move in moves})
        key = f"{self._key}|{fen}|{' '.join(moves)}"

        def analyse(engine: SimpleEngine) -> Analysis:
            analysis = self._analyse(engine, board, moves)
            with self._lock:
                self._cache.put(key, analysis)
            return analysis

        self._engines.check_open()
        with self._lock:
            future = self._asked.get(key)
            if future is None or future.done():  # else it was asked a moment ago
                known = Analysis((), ()) if board.is_game_over() else self._cache.get(key)
                if known is not None:
                    (future := Future[Analysis]()).set_result(known)
                else:
                    future = self._asked[key] = self._engines.submit(analyse, fen)
        return future

    def analyse(self, fens: Sequence[str]) -> list[Analysis]:
        """Analyse positions, all engines at work, in the order given."""
        return [future.result() for future in [self.submit(fen) for fen in fens]]

    def close(self) -> None:
        """End the engine processes; analyses not done yet fail with EngineError. Safe to call twice."""
        self._engines.close()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _analyse(self, engine: SimpleEngine, board: chess.Board, moves: Sequence[str]) -> Analysis:
        lines = engine.analyse(
            board,
            self._limit,
            multipv=len(moves) or MULTIPV,
            game=object(),  # never the game before: clears the hash table
            root_moves=[chess.Move.from_uci(move) for move in moves] or None,
            info=INFO_SCORE | INFO_PV,
        )
        best = [line for line in lines if "pv" in line and "score" in line]
        return Analysis(
            tuple(line["pv"][0].uci() for line in best),
            tuple(line["score"].relative.score(mate_score=MATE_SCORE) / 100 for line in best),
        )


def _configure(engine: SimpleEngine) -> None:
    engine.configure({"Threads": 1, "Hash": HASH_MB})
