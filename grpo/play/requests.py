"""What a chess GUI sets and asks for, read from the words of its lines."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import chess

IllegalMoves = Literal["replace", "resign"]
MOST_SEED = 2**31 - 1
_OVERHEAD_S, _RESERVE_S = 0.03, 0.1
"""Between a move here and its arrival on the GUI's clock: usually, and where there is no time to lose."""


@dataclass(frozen=True)
class Options:
    """What `setoption` sets, by UCI's names."""

    Temperature: float = 0.0
    Seed: int = 0
    Device: str = "auto"
    IllegalMoves: IllegalMoves = "replace"

    def declared(self) -> list[str]:
        choices = " ".join(f"var {each}" for each in get_args(IllegalMoves))
        return [
            f"option name Temperature type string default {self.Temperature:g}",
            f"option name Seed type spin default {self.Seed} min 0 max {MOST_SEED}",
            f"option name Device type string default {self.Device}",
            f"option name IllegalMoves type combo default {self.IllegalMoves} {choices}",
        ]

    def changed(self, words: Sequence[str]) -> "Options":
        """By `name NAME value VALUE`. ValueError for what there is not, or cannot be."""
        split = words.index("value") if "value" in words else len(words)
        name = " ".join(words[1:split])
        value: Any = " ".join(words[split + 1 :])
        known = next((each.name for each in fields(self) if each.name.lower() == name.lower()), None)
        if words[:1] != ["name"] or known is None:
            raise ValueError(f"there is no option {name!r}")
        if known == "Temperature":
            number = float(value)
            if not 0 <= number < float("inf"):
                raise ValueError(f"Temperature is {value}: give 0 (greedy) or more")
            return replace(self, Temperature=number)
        if known == "Seed":
            if not _is_number(value) or not 0 <= int(value) <= MOST_SEED:
                raise ValueError(f"Seed is {value!r}: give a whole number from 0 to {MOST_SEED}")
            return replace(self, Seed=int(value))
        if known == "IllegalMoves" and value not in get_args(IllegalMoves):
            raise ValueError(f"IllegalMoves is {value!r}: give {' or '.join(get_args(IllegalMoves))}")
        return replace(self, **{known: value})


def read_position(words: Sequence[str]) -> chess.Board:
    """By `startpos` or `fen FEN`, then `moves MOVE …`. ValueError for what is no position."""
    split = words.index("moves") if "moves" in words else len(words)
    if words[:1] == ["startpos"]:
        board = chess.Board()
    elif words[:1] == ["fen"]:
        board = chess.Board(" ".join(words[1:split]))
    else:
        raise ValueError("say position startpos, or position fen FEN")
    if not board.is_valid():
        raise ValueError(f"{board.fen()} is no legal position ({board.status()!r})")
    for word in words[split + 1 :]:
        board.push_uci(word)
    return board


@dataclass(frozen=True)
class Go:
    """What `go` asks for. Depths and mates mean nothing here, and a node is an answer."""

    movetime: int | None = None
    wtime: int | None = None
    btime: int | None = None
    winc: int = 0
    binc: int = 0
    nodes: int | None = None
    infinite: bool = False
    """Until `stop`; or `ponderhit`."""
    searchmoves: tuple[str, ...] = ()

    @staticmethod
    def read(words: Sequence[str]) -> "Go":
        """What is no number is left out: a GUI whose `go` was refused would wait for ever."""
        found: dict[str, Any] = {}
        moves: list[str] = []
        keyword = ""
        for word in words:
            if word in _KEYWORDS:
                keyword = word
                if word in ("infinite", "ponder"):
                    found["infinite"] = True
            elif keyword == "searchmoves":
                moves.append(word)
            elif keyword in _NUMBERS and _is_number(word):
                found[keyword], keyword = int(word), ""
        return Go(**found, searchmoves=tuple(moves))

    def seconds(self, turn: chess.Color) -> float | None:
        """For a move, at most; None: as long as it takes.

        An answer is no better for more time: the clock only cuts short one that would be late. It has a
        tenth of what is left, or half of what the move adds.
        """
        if self.movetime is not None:
            return max(0.0, self.movetime / 1000 - _OVERHEAD_S)
        left, added = (self.wtime, self.winc) if turn else (self.btime, self.binc)
        if left is None:
            return None
        return max(0.0, min(left / 1000 - _RESERVE_S, max(left / 10, added / 2) / 1000))


_NUMBERS = {each.name for each in fields(Go)} - {"infinite", "searchmoves"}
_KEYWORDS = _NUMBERS | {"infinite", "ponder", "searchmoves", "depth", "mate", "movestogo"}


def _is_number(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 12
