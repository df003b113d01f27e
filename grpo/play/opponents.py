"""Opponents of a model: Stockfish, any other engine that speaks UCI, moves at random, or another model."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import chess.engine

from grpo.errors import UserError
from grpo.play.thought import GamePosition, MoveChoice, random_move
from grpo.rewards import PATIENCE_S, UciEngines, require_stockfish

RANDOM, STOCKFISH, ENGINE = "random", "stockfish", "uci"


class Opponent(Protocol):
    """Somebody who moves in several games, such as `grpo.play.player.Player`."""

    def think(self, positions: Sequence[GamePosition], *, replace: bool = True) -> list[MoveChoice]: ...


class RandomPlayer:
    def think(self, positions: Sequence[GamePosition], *, replace: bool = True) -> list[MoveChoice]:
        return [MoveChoice(random_move(position), "best") for position in positions]


class UciOpponent:
    """An engine's processes, each with a position at a time."""

    def __init__(self, engines: UciEngines, limit: chess.engine.Limit) -> None:
        self._engines, self._limit = engines, limit

    def think(self, positions: Sequence[GamePosition], *, replace: bool = True) -> list[MoveChoice]:
        """EngineError where an engine ends, hangs, or says what is no move."""
        asked = [self._engines.submit(partial(self._play, it), it.board.fen()) for it in positions]
        return [future.result() for future in asked]

    def _play(self, position: GamePosition, engine: chess.engine.SimpleEngine) -> MoveChoice:
        return MoveChoice(engine.play(position.board, self._limit, game=position.seed).move, "best")


@contextmanager
def make_opponent(
    name: str, limit: chess.engine.Limit, engines: int, load: Callable[[str], Opponent]
) -> Iterator[Opponent]:
    """The opponent of that name, for as long as the context lasts: random, an engine's, or one for `load`.

    engines: processes. ValueError or EngineError where there is no such opponent.
    """
    kind, _, rest = name.partition(":")
    if name == RANDOM:
        yield RandomPlayer()
    elif command := engine_command(name):
        elo = rest if kind == STOCKFISH else ""
        timeout_s = PATIENCE_S + (limit.time or 0.0)
        processes = UciEngines(command, engines, partial(_configure, elo=elo), timeout_s=timeout_s)
        with closing(processes):
            yield UciOpponent(processes, limit)
    else:
        yield load(name)


def engine_command(name: str) -> list[str] | None:
    """The words that start an engine: stockfish[:ELO], its path, or uci:COMMAND. None for a model.

    EngineError where Stockfish is meant and not installed, ValueError for a command that is no program.
    """
    kind, _, rest = name.partition(":")
    if kind == STOCKFISH:
        if rest and not rest.isdecimal():
            raise UserError(f"against is {name!r}: give stockfish, or its Elo as in stockfish:1500")
        return [require_stockfish()]
    if kind == ENGINE:
        command = shlex.split(rest)
        if not command or shutil.which(command[0]) is None:
            raise UserError(f"against is an engine, {rest!r}, which is no program: give its path")
        return command
    path = Path(name).expanduser()
    return [str(path.resolve())] if path.is_file() and os.access(path, os.X_OK) else None


def _configure(engine: chess.engine.SimpleEngine, *, elo: str) -> None:
    """Limits an engine's strength, where an Elo is given."""
    if not elo:
        return
    option = engine.options.get("UCI_Elo")
    least, most = (option.min, option.max) if option is not None else (None, None)
    if least is None or most is None or not least <= int(elo) <= most:
        name = engine.id.get("name", "this engine")
        raise UserError(f"against is stockfish:{elo}, but UCI_Elo of {name} goes from {least} to {most}")
    engine.configure({"UCI_LimitStrength": True, "UCI_Elo": int(elo)})
