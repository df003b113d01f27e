"""What a chess program sets and asks for, read from the words of its lines."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import chess

from grpo.play.thought import IllegalMoves

MOST_SEED = 2**31 - 1
_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "temperature": ("temperature", float), "seed": ("seed", int), "illegalmoves": ("illegal_moves", str),
}  # fmt: skip
"""By an option's name, the field it sets, and what reads it."""
_NUMBERS = {"movetime", "wtime", "btime", "winc", "binc", "nodes"}
_OVERHEAD_S, _RESERVE_S = 0.03, 0.1
"""Between a move here and its arrival on the GUI's clock: usually, and where there is no time to lose."""


@dataclass(frozen=True)
class Options:
    """What the command line sets, and `setoption` after it."""

    temperature: float = 0.0
    """Of sampling; 0 is greedy."""
    seed: int = 0
    """Of sampling, and of moves at random."""
    illegal_moves: IllegalMoves = "replace"
    """An illegal answer is replaced by the model's next candidate, by what it says asked again, at last by a
    move at random, or it resigns."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature:g}: give 0 (greedy) or more")
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"seed is {self.seed}: give a whole number from 0 to {MOST_SEED}")
        if self.illegal_moves not in get_args(IllegalMoves):
            raise ValueError(f"illegal moves are {self.illegal_moves!r}: give replace or resign")

    def declared(self) -> list[str]:
        choices = " ".join(f"var {each}" for each in get_args(IllegalMoves))
        return [
            f"option name Temperature type string default {self.temperature:g}",
            f"option name Seed type spin default {self.seed} min 0 max {MOST_SEED}",
            f"option name IllegalMoves type combo default {self.illegal_moves} {choices}",
        ]

    def changed(self, words: Sequence[str]) -> "Options":
        """By `name NAME value VALUE`. ValueError for what there is not, or cannot be."""
        split = words.index("value") if "value" in words else len(words)
        name, value = " ".join(words[1:split]), " ".join(words[split + 1 :])
        if name.lower() not in _READ:
            raise ValueError(f"there is no option {name!r}")
        field, read = _READ[name.lower()]
        return replace(self, **{field: read(value)})


def read_position(words: Sequence[str]) -> chess.Board:
    """By `startpos` or `fen FEN`, then `moves MOVE …`. ValueError for what is no position."""
    split = words.index("moves") if "moves" in words else len(words)
    if words[:1] not in (["startpos"], ["fen"]):
        raise ValueError("say position startpos, or position fen FEN")
    board = chess.Board(" ".join(words[1:split])) if words[0] == "fen" else chess.Board()
    if not board.is_valid():
        raise ValueError(f"{board.fen()} is no legal position ({board.status()!r})")
    for word in words[split + 1 :]:
        board.push_uci(word)
    return board


def read_go(words: Sequence[str]) -> dict[str, int]:
    """The numbers of `go`. What is none is left out: a GUI whose `go` was refused would wait for ever.

    Depths and mates mean nothing here, and a node is an answer.
    """
    pairs = ((word, value) for word, value in pairwise(words) if word in _NUMBERS)
    return {word: int(value) for word, value in pairs if re.fullmatch(r"-?\d{1,11}", value, re.ASCII)}


def seconds_for(go: dict[str, int], turn: chess.Color) -> float | None:
    """For a move, at most; None: as long as it takes.

    An answer is no better for more time: the clock only cuts short one that would be late. It has a
    tenth of what is left, or half of what the move adds.
    """
    if "movetime" in go:
        return max(0.0, go["movetime"] / 1000 - _OVERHEAD_S)
    side = "w" if turn else "b"
    left, added = go.get(f"{side}time"), go.get(f"{side}inc", 0)
    if left is None:
        return None
    return max(0.0, min(left / 1000 - _RESERVE_S, max(left / 10, added / 2) / 1000))
