"""Whom a model plays: Stockfish, any other engine that speaks UCI, moves at random, or another model."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
        return [Thought(any_move(position), "best") for position in positions]


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
            return Thought(engine.play(position.board, self._limit, game=position.seed).move, "best")
        except (chess.engine.EngineError, TimeoutError) as error:
            raise EngineError(
                f"the engine failed on {position.board.fen()}: {str(error) or 'no answer in time'}"
            ) from error
        finally:
            self._idle.put(engine)


def engine_command(name: str) -> list[str] | None:
    """The words that start an engine: stockfish[:ELO], its path, or uci:COMMAND. None for a model.

    EngineError where Stockfish is meant and not installed, ValueError for a command that is no program.
    """
    if name.partition(":")[0] == STOCKFISH:
        executable = find_stockfish()
        if executable is None:
            raise EngineError("Stockfish was not found: install it (apt-get install stockfish)")
        return [executable]
    if name.startswith(ENGINE):
        command = shlex.split(name.removeprefix(ENGINE))
        if not command or shutil.which(command[0]) is None:
            words = " ".join(command)
            raise ValueError(f"against is an engine, {words!r}, which is no program: give its path")
        return command
    path = Path(name).expanduser()
    return [str(path.resolve())] if path.is_file() and os.access(path, os.X_OK) else None


@contextmanager
def make_opponent(
    name: str, limit: chess.engine.Limit, engines: int, load: Callable[[str], Opponent]
) -> Iterator[Opponent]:
    """The opponent of that name, for as long as the context lasts: random, an engine's, or one for `load`.

    engines: processes. ValueError or EngineError where there is no such opponent.
    """
    elo = name.removeprefix(f"{STOCKFISH}:") if name.startswith(f"{STOCKFISH}:") else ""
    if elo and not elo.isdecimal():
        raise ValueError(f"against is {name!r}: give stockfish, or its Elo as in stockfish:1500")
    if name == RANDOM:
        yield AtRandom()
    elif command := engine_command(name):
        with ExitStack() as stack:
            yield UciOpponent([stack.enter_context(_start(command, elo)) for _ in range(engines)], limit)
    else:
        yield load(name)


def _start(command: list[str], elo: str) -> chess.engine.SimpleEngine:
    """An engine, of limited strength where an Elo is given."""
    try:
        # Ctrl-C in the terminal is for the match alone.
        engine = chess.engine.SimpleEngine.popen_uci(command, timeout=_PATIENCE_S, start_new_session=True)
    except (OSError, chess.engine.EngineError, TimeoutError) as error:
        raise EngineError(f"{' '.join(command)!r} is no working UCI engine: {error}") from error
    if elo:
        option = engine.options.get("UCI_Elo")
        least, most = (option.min, option.max) if option is not None else (None, None)
        if least is None or most is None or not least <= int(elo) <= most:
            name = engine.id.get("name", "this engine")
            engine.close()
            raise ValueError(f"against is stockfish:{elo}, but UCI_Elo of {name} goes from {least} to {most}")
        engine.configure({"UCI_LimitStrength": True, "UCI_Elo": int(elo)})
    return engine
