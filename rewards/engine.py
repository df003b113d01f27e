"""Positions analysed by a pool of Stockfish processes, behind a persistent cache.

An analysis depends on the position, the moves asked for and the limit alone: one thread an engine,
a new game for every position (hash tables carry over otherwise, and the same position gets another
answer later), fixed depth. Left out on purpose: time limits, which never repeat.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

import chess
import chess.engine
from loguru import logger

from rewards.analysis import Analysis, AnalysisCache
from rewards.formats import legal_move, usual_move

MATE_SCORE = 100_000
"""Centipawns of a mate on the board; a mate in n is worth ±(1000 - n/100) pawns."""

START_TIMEOUT_S = 10.0
"""After this long without a `uciok` an executable counts as not being an engine."""

_DEBIAN_GAMES = "/usr/games"
_T = TypeVar("_T")


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
        self._executable = executable
        self._limit = chess.engine.Limit(depth=depth)
        self._hash_mb = hash_mb
        self._timeout_s = timeout_s
        self._transports: dict[chess.engine.Protocol, asyncio.SubprocessTransport] = {}
        # One entry an engine; None where it died, and whoever takes the entry starts another.
        self._idle: asyncio.Queue[chess.engine.Protocol | None] = asyncio.Queue()
        self._pending: dict[str, asyncio.Task[Analysis]] = {}
        self._closed = False
        self._door = threading.Lock()  # nothing is submitted once close() has begun
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: logger.debug("engine: {}", context["message"]))
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine pool", daemon=True)
        self._thread.start()
        self._cache = AnalysisCache(cache_path)
        try:
            engines = [self._run(self._start()).result() for _ in range(num_engines)]
        except BaseException:
            self.close()
            raise
        for engine in engines:
            self._idle.put_nowait(engine)
        engine_name = engines[0].id.get("name", "unknown")
        self._key = f"{engine_name}|depth {depth}|multipv {multipv}|hash {hash_mb}"

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
        if board.is_game_over():
            over: Future[Analysis] = Future()
            over.set_result(Analysis((), ()))
            return over
        with self._door:
            if self._closed:
                raise EngineError("the engine pool is closed")
            return self._run(
                self._shared_analysis(fen, tuple(sorted({usual_move(board, move) for move in moves})))
            )

    def analyse(self, fens: Sequence[str]) -> list[Analysis]:
        """Analyse positions, all engines at work, in the order given."""
        return [future.result() for future in [self.submit(fen) for fen in fens]]

    def close(self) -> None:
        """End the engine processes; analyses not done yet fail with EngineError. Safe to call twice."""
        with self._door:
            if self._closed:
                return
            self._closed = True
        self._run(self._stop_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # ---------------------------------------------------------------------- below: in the pool's thread

    async def _start(self) -> chess.engine.Protocol:
        """A new engine process, in its own session: Ctrl-C in the terminal reaches only the trainer."""
        if self._closed:
            raise EngineError("the engine pool was closed")
        try:
            transport, engine = await chess.engine.UciProtocol.popen(self._executable, start_new_session=True)
        except OSError as error:
            raise EngineError(f"{self._executable} cannot be run: {error}") from error
        self._transports[engine] = transport
        try:
            await asyncio.wait_for(engine.initialize(), START_TIMEOUT_S)
            await engine.configure({"Threads": 1, "Hash": self._hash_mb})
        except (chess.engine.EngineError, TimeoutError) as error:
            await self._stop(engine)
            what = str(error) or f"no answer in {START_TIMEOUT_S:g} s"
            raise EngineError(f"{self._executable} is not a working UCI engine: {what}") from error
        if self._closed:  # meanwhile
            await self._stop(engine)
            raise EngineError("the engine pool was closed")
        return engine

    async def _stop(self, engine: chess.engine.Protocol) -> None:
        # Closing the transport kills, a stopped process too, and what was asked of it fails at once.
        if transport := self._transports.pop(engine, None):
            transport.close()
        await asyncio.shield(engine.returncode)

    async def _stop_all(self) -> None:
        for engine in list(self._transports):
            await self._stop(engine)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        self._cache.close()

    async def _shared_analysis(self, fen: str, moves: tuple[str, ...]) -> Analysis:
        """From the cache, from whoever asked the same a moment ago, or from an engine."""
        key = f"{self._key}|{fen}|{' '.join(moves)}"
        if (task := self._pending.get(key)) is None:
            if (hit := self._cache.get(key)) is not None:
                return hit
            task = self._pending[key] = asyncio.create_task(self._analyse(key, fen, moves))
            task.add_done_callback(lambda _: self._pending.pop(key))
        return await asyncio.shield(task)

    async def _analyse(self, key: str, fen: str, moves: tuple[str, ...]) -> Analysis:
        engine = await self._idle.get()
        try:
            for attempt in (1, 2):
                try:
                    engine = engine or await self._start()
                    analysis = await self._ask(engine, fen, moves)
                    self._cache.put(key, analysis)
                    return analysis
                except (chess.engine.EngineError, TimeoutError) as error:
                    failure = error
                if engine is not None:
                    await self._stop(engine)
                    engine = None
                if attempt == 1 and not self._closed:
                    logger.warning("engine restarted on {!r}: {}", fen, failure)
            raise EngineError(f"the engine failed twice on {fen!r}: {failure}") from failure
        finally:
            self._idle.put_nowait(engine)

    async def _ask(self, engine: chess.engine.Protocol, fen: str, moves: tuple[str, ...]) -> Analysis:
        asked = asyncio.ensure_future(
            engine.analyse(
                chess.Board(fen),
                self._limit,
                multipv=len(moves) or self.multipv,
                game=object(),  # never the game before: clears the hash table
                root_moves=[chess.Move.from_uci(move) for move in moves] or None,
                info=chess.engine.INFO_SCORE | chess.engine.INFO_PV,
            )
        )
        # Two traps of python-chess 1.11: an engine that dies before `readyok` leaves its analysis
        # waiting for ever, and an analysis cancelled before its engine has ended breaks the shutdown.
        ends: set[asyncio.Future[Any]] = {asked, engine.returncode}
        await asyncio.wait(ends, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            died = engine.returncode.done()
            failure = "the engine process died" if died else f"no answer in {self._timeout_s:g} s"
            await self._stop(engine)
            asked.cancel()
            await asyncio.wait({asked})
            raise TimeoutError(failure)
        best = [info for info in asked.result() if "pv" in info and "score" in info]
        return Analysis(
            tuple(info["pv"][0].uci() for info in best),
            tuple(info["score"].relative.score(mate_score=MATE_SCORE) / 100 for info in best),
        )
