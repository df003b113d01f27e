"""Whom a model plays: Stockfish, any other engine that speaks UCI, moves at random, or another model."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import chess
import chess.engine

from grpo.play.thought import Position, Thought, any_move
from rewards.engine import EngineError, find_stockfish

RANDOM, STOCKFISH, ENGINE = "random", "stockfish", "uci:"
_PATIENCE_S = 30.0
"""Longer than its limit, after which an engine counts as hung; the limit itself where that is in nodes."""


class Opponent(Protocol):
    """Who moves in several games: so does `grpo.play.player.Player`."""

    def think(self, positions: Sequence[Position], *, replace: bool = True) -> list[Thought]: ...


class AtRandom:
    def think(self, positions: Sequence[Position], *, replace: bool = True) -> list[Thought]:
        return [Thought(any_move(position), "best", ()) for position in positions]


class UciOpponent:
    """Processes of one engine, each with a position at a time."""

    def __init__(self, engines: Sequence[chess.engine.SimpleEngine], limit: chess.engine.Limit) -> None:
        if limit.time is None:  # else python-chess waits for ever for one that hangs
            limit = replace(limit, time=_PATIENCE_S)
        self._limit, self._threads = limit, len(engines)
        self._idle: SimpleQueue[chess.engine.SimpleEngine] = SimpleQueue()
        for engine in engines:
            self._idle.put(engine)

    def think(self, positions: Sequence[Position], *, replace: bool = True) -> list[Thought]:
        """EngineError where an engine ends, hangs, or says what is no move."""
        with ThreadPoolExecutor(self._threads) as threads:
            return list(threads.map(self._move, positions))

    def _move(self, position: Position) -> Thought:
        engine = self._idle.get()
        try:
            played = engine.play(position.board, self._limit, game=position.seed)
        except (chess.engine.EngineError, TimeoutError) as error:
            raise EngineError(
                f"the engine failed on {position.board.fen()}: {str(error) or 'no answer in time'}"
            ) from error
        finally:
            self._idle.put(engine)
        return Thought(played.move, "best", ())


def make_opponent(
    name: str, limit: chess.engine.Limit, engines: int, load: Callable[[str], Opponent]
) -> AbstractContextManager[Opponent]:
    """The opponent of that name, for as long as the context lasts.

    name: random; stockfish, or stockfish:ELO; an engine's path, or uci:COMMAND; else a model, for `load`.
    ValueError or EngineError where there is no such opponent.
    """
    if name == RANDOM:
        return nullcontext(AtRandom())
    kind, _, elo = name.partition(":")
    if kind == STOCKFISH:
        if elo and not elo.isdecimal():
            raise ValueError(f"against is {name!r}: give stockfish, or its Elo as in stockfish:1500")
        executable = find_stockfish()
        if executable is None:
            raise EngineError("Stockfish was not found: install it (apt-get install stockfish)")
        return _engines([executable], limit, engines, elo=int(elo) if elo else None)
    command = engine_command(name)
    if command is not None:
        return _engines(command, limit, engines)
    return nullcontext(load(name))


def is_model(name: str) -> bool:
    """Whether it is none of the others."""
    return name.partition(":")[0] not in (RANDOM, STOCKFISH) and engine_command(name) is None


def engine_command(name: str) -> list[str] | None:
    """The words that start an engine; None where `name` is not one."""
    if name.startswith(ENGINE):
        return shlex.split(name.removeprefix(ENGINE))
    path = Path(name).expanduser()
    is_program = path.is_file() and os.access(path, os.X_OK)
    return [str(path.resolve())] if is_program else None


@contextmanager
def _engines(
    command: Sequence[str], limit: chess.engine.Limit, count: int, *, elo: int | None = None
) -> Iterator[UciOpponent]:
    if not command or shutil.which(command[0]) is None:
        raise ValueError(f"against is an engine, {' '.join(command)!r}, which is no program: give its path")
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            try:
                # Ctrl-C in the terminal is for the match alone.
                engine = chess.engine.SimpleEngine.popen_uci(
                    [*command], timeout=_PATIENCE_S, start_new_session=True
                )
            except (OSError, chess.engine.EngineError, TimeoutError) as error:
                raise EngineError(f"{' '.join(command)!r} is no working UCI engine: {error}") from error
            stack.callback(engine.close)
            if elo is not None:
                _limit_strength(engine, elo)
            started.append(engine)
        yield UciOpponent(started, limit)


def _limit_strength(engine: chess.engine.SimpleEngine, elo: int) -> None:
    option = engine.options.get("UCI_Elo")
    least, most = (option.min, option.max) if option is not None else (None, None)
    if least is None or most is None or not least <= elo <= most:
        name = engine.id.get("name", "this engine")
        raise ValueError(f"against is stockfish:{elo}, but UCI_Elo of {name} goes from {least} to {most}")
    engine.configure({"UCI_LimitStrength": True, "UCI_Elo": elo})
