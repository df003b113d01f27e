"""Positions analysed by a pool of Stockfish processes, behind a persistent cache.

An analysis depends on the position, the moves asked for and the limit alone: one thread an engine,
a new game for every position (hash tables carry over otherwise, and the same position gets another
answer later), fixed depth. Left out on purpose: time limits, which never repeat.
"""

import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Self
from weakref import WeakValueDictionary

import chess
from chess.engine import INFO_PV, INFO_SCORE, Limit, SimpleEngine
from chess.engine import EngineError as EngineFailed
from loguru import logger

from rewards.analysis import Analysis, AnalysisCache
from rewards.formats import legal_move, usual_move

MATE_SCORE = 100_000
"""Centipawns of a mate on the board; a mate in n is worth ±(1000 - n/100) pawns."""

START_TIMEOUT_S = 10.0
"""After this long without a `uciok` an executable counts as not being an engine."""

_DEBIAN_GAMES = "/usr/games"


class EngineError(RuntimeError):
    """The engine is missing, failed on a position twice, or was closed."""


def find_stockfish(path: str | None = None) -> str | None:
    """The executable to run: `path` if given (EngineError if it is not one), else as found."""
    if path is None:
        return shutil.which("stockfish") or shutil.which("stockfish", path=_DEBIAN_GAMES)
    if found := shutil.which(os.path.expanduser(path)):
        return found
    raise EngineError(
        f"stockfish_path={path!r} is not an executable: install Stockfish "
        "(apt-get install stockfish) or give its path"
    )


class EnginePool:
    """`num_engines` Stockfish processes that analyse positions in the background.

    depth: plies searched. multipv: how many best moves an analysis holds. hash_mb: hash table of
    each engine; part of the cache key, as it can change an answer. timeout_s: after this long on
    one position an engine counts as hung. cache_path: an SQLite file, None for the user's cache
    folder, ":memory:" for none that lasts. A crashed or hung engine is restarted and the position
    tried once more; a second failure is an EngineError in that position's future.

    May be used from several threads, not across a fork: each process makes its own pool.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        depth: int = 8,
        multipv: int = 5,
        hash_mb: int = 4,
        num_engines: int = 1,
        timeout_s: float = 30.0,
        cache_path: str | Path | None = None,
    ) -> None:
        for name, number in (("depth", depth), ("multipv", multipv), ("num_engines", num_engines)):
            if number < 1:
                raise ValueError(f"{name}={number}: must be at least 1")
        executable = find_stockfish(path)
        if executable is None:
            raise EngineError(
                "Stockfish was not found: install it (apt-get install stockfish) or give its path"
            )
        self.multipv = multipv
        self._executable, self._limit, self._hash_mb = executable, Limit(depth=depth), hash_mb
        self._timeout_s = timeout_s
        self._engines: list[SimpleEngine | None] = [None] * num_engines
        """One a thread; None where it died, and is started again for the next question."""
        self._questions: SimpleQueue[tuple[Future[Analysis], str, str, Sequence[str]] | None] = SimpleQueue()
        self._lock = threading.Lock()  # of the three that follow
        self._asked: WeakValueDictionary[str, Future[Analysis]] = WeakValueDictionary()
        self._cache = AnalysisCache(cache_path)
        self._closed = False
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._close_with_the_program, daemon=True).start()
        try:
            with ThreadPoolExecutor() as starting:  # where no Ctrl-C comes between a start and its place
                engines = list(starting.map(self._start, range(num_engines)))
        except BaseException:
            self.close()
            raise
        engine_name = engines[0].id.get("name", "unknown")
        self._key = f"{engine_name}|depth {depth}|multipv {multipv}|hash {hash_mb}"
        self._threads = [
            threading.Thread(target=self._serve, args=(place,), daemon=True) for place in range(num_engines)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fen: str, moves: Sequence[str] = ()) -> "Future[Analysis]":
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
        moves = sorted({usual_move(board, move) for move in moves})
        key = f"{self._key}|{fen}|{' '.join(moves)}"
        with self._lock:
            if self._closed:
                raise EngineError("the engine pool is closed")
            future = self._asked.get(key)
            if future is None or future.done():  # else it was asked a moment ago
                future = self._asked[key] = Future()
                future.set_running_or_notify_cancel()  # so that no caller can cancel it for the others
                known = Analysis((), ()) if board.is_game_over() else self._cache.get(key)
                if known is not None:
                    future.set_result(known)
                else:
                    self._questions.put((future, key, fen, moves))
        return future

    def analyse(self, fens: Sequence[str]) -> list[Analysis]:
        """Analyse positions, all engines at work, in the order given."""
        return [future.result() for future in [self.submit(fen) for fen in fens]]

    def close(self) -> None:
        """End the engine processes; analyses not done yet fail with EngineError. Safe to call twice."""
        with self._lock:
            self._closed = True
        for place in range(len(self._engines)):
            self._stop(place)
        for _ in self._threads:
            self._questions.put(None)
        for thread in self._threads:
            thread.join()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_with_the_program(self) -> None:
        """Python waits at its end for the threads of python-chess, one an engine; atexit comes after that."""
        threading.main_thread().join()
        self.close()

    # --------------------------------------------------------------------- below: in the pool's threads

    def _serve(self, place: int) -> None:
        """Answer questions, by the engine in that place, until there are no more."""
        for future, key, fen, moves in iter(self._questions.get, None):
            try:
                answer = self._analyse(place, fen, moves)
                with self._lock:
                    self._cache.put(key, answer)
                future.set_result(answer)
            except Exception as error:
                future.set_exception(error)

    def _analyse(self, place: int, fen: str, moves: Sequence[str]) -> Analysis:
        for attempt in (1, 2):
            engine = self._engines[place] or self._start(place)
            try:
                return self._ask(engine, fen, moves)
            except (EngineFailed, TimeoutError) as error:
                failure = error
            self._stop(place)
            if attempt == 1 and not self._closed:
                logger.warning("engine restarted on {!r}: {}", fen, failure)
        raise EngineError(f"the engine failed twice on {fen!r}: {failure}") from failure

    def _ask(self, engine: SimpleEngine, fen: str, moves: Sequence[str]) -> Analysis:
        # Without a limit of time python-chess waits for ever, and a call that is cancelled before its engine
        # has ended breaks the shutdown. So one that hangs is killed, which ends the call as well.
        began, killer = time.monotonic(), threading.Timer(self._timeout_s, engine.close)
        killer.start()
        try:
            found = engine.analyse(
                chess.Board(fen),
                self._limit,
                multipv=len(moves) or self.multipv,
                game=object(),  # never the game before: clears the hash table
                root_moves=[chess.Move.from_uci(move) for move in moves] or None,
                info=INFO_SCORE | INFO_PV,
            )
        except (EngineFailed, CancelledError) as error:
            if time.monotonic() - began >= self._timeout_s:
                raise TimeoutError(f"no answer in {self._timeout_s:g} s") from error
            raise EngineFailed(str(error) or "the engine process died") from error
        finally:
            killer.cancel()
        best = [info for info in found if "pv" in info and "score" in info]
        return Analysis(
            tuple(info["pv"][0].uci() for info in best),
            tuple(info["score"].relative.score(mate_score=MATE_SCORE) / 100 for info in best),
        )

    def _start(self, place: int) -> SimpleEngine:
        """A new engine process, in its own session: Ctrl-C in the terminal reaches only the trainer."""
        try:
            engine = SimpleEngine.popen_uci(self._executable, timeout=START_TIMEOUT_S, start_new_session=True)
            self._engines[place] = engine
            engine.protocol.loop.set_exception_handler(
                lambda _, why: logger.debug("engine: {}", why["message"])
            )
            engine.configure({"Threads": 1, "Hash": self._hash_mb})
        except (OSError, EngineFailed) as error:  # TimeoutError is an OSError
            self._stop(place)
            what = str(error) or f"no answer in {START_TIMEOUT_S:g} s"
            raise EngineError(f"{self._executable} is not a working UCI engine: {what}") from error
        if self._closed:  # which may have come before the engine had its place
            self._stop(place)
            raise EngineError("the engine pool was closed")
        return engine

    def _stop(self, place: int) -> None:
        engine, self._engines[place] = self._engines[place], None
        if engine is not None:
            engine.close()  # kills, a stopped process too, and what was asked of it fails at once
            engine.returncode.result()
