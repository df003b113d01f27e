"""What a model says of a position as a chess player takes it: a move, and candidates with their evals.

By the rules alone. An answer whose `B:` is no legal move is replaced: by the model's own next candidate, by
what it says when it is asked again, at last by any move at random. How a move came about is kept with it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import chess

from rewards.engine import MATE_SCORE
from rewards.formats import legal_move, parse_policy_completion

How = Literal["best", "candidate", "again", "random", "resigned"]
MOST_ANSWERS = 5
"""A model is asked for, until one has a legal move."""
_LONGEST_MATE = 100
"""In moves; an eval that says more is no mate."""


class Position(NamedTuple):
    """A board to think about, and what chance goes by."""

    board: chess.Board
    seed: int
    """Of its game (`game_seed`)."""
    allowed: tuple[chess.Move, ...] = ()
    """Legal moves to choose among; none given: all."""

    def allows(self, move: chess.Move) -> bool:
        return not self.allowed or move in self.allowed


def game_seed(seed: int, game: int) -> int:
    """The number that chance goes by in one game of a match, or of a GUI."""
    return random.Random(f"game {game} of {seed}").getrandbits(48)


def any_move(position: Position) -> chess.Move:
    """One at random, the same for the same half-move of the same game."""
    board = position.board
    moves = sorted(position.allowed or board.legal_moves, key=chess.Move.uci)
    return random.Random(f"move {board.ply()} of {position.seed}").choice(moves)


class Candidate(NamedTuple):
    move: chess.Move
    eval: float | None
    """In pawns, from the side to move; None where the model gave none."""

    @property
    def score(self) -> str:
        """As UCI says it: `cp 35`, `mate -2`; "" where there is none."""
        if self.eval is None:
            return ""
        hundredths = round(100 * self.eval)
        to_mate = MATE_SCORE - abs(hundredths)
        if to_mate <= _LONGEST_MATE:
            return f"mate {max(1, to_mate) * (1 if hundredths > 0 else -1)}"
        return f"cp {hundredths}"


@dataclass(frozen=True)
class Answer:
    """One completion, by the rules."""

    best: chess.Move | None
    """`B:`, if it is legal and allowed."""
    candidates: tuple[Candidate, ...]
    """Those of `M:` that are, each once, the highest eval first."""
    fault: str
    """The text of `B:` where that is no legal move; "" where it is, or was not come to."""

    @property
    def moves(self) -> list[chess.Move]:
        """The best first."""
        first = [] if self.best is None else [self.best]
        return [*first, *(each.move for each in self.candidates if each.move != self.best)]

    @property
    def lines(self) -> list[Candidate]:
        """The same with evals."""
        evals = {each.move: each.eval for each in self.candidates}
        return [Candidate(move, evals.get(move)) for move in self.moves]


NO_MOVE = "no move"


def read_answer(position: Position, text: str, *, is_whole: bool = True) -> Answer:
    """is_whole: False for a text that was cut short, whose `B:` may not be complete."""
    said = parse_policy_completion(text)
    evals = [*said.evals, *[None] * len(said.moves)]
    found: dict[chess.Move, float | None] = {}
    for words, each in zip(said.moves, evals, strict=False):
        move = legal_move(position.board, words or "")
        if move is not None and position.allows(move):
            found.setdefault(move, each)
    ranked = sorted(found, key=lambda move: -float("inf") if (e := found[move]) is None else e, reverse=True)
    best = legal_move(position.board, said.best)
    fault = "" if best is not None or not is_whole else said.best or NO_MOVE
    if best is not None and not position.allows(best):
        best = None
    return Answer(best, tuple(Candidate(move, found[move]) for move in ranked), fault)


@dataclass(frozen=True)
class Thought:
    """What came of thinking about a position."""

    move: chess.Move | None
    """None where there is nothing to play, or an illegal answer is not replaced."""
    how: How
    answers: tuple[Answer, ...]

    @property
    def faults(self) -> list[str]:
        """What was said and is illegal."""
        return [answer.fault for answer in self.answers if answer.fault]

    @property
    def lines(self) -> list[Candidate]:
        """The move, then what else the model would have played."""
        said = self.answers[-1].lines if self.answers else []
        return said if said and said[0].move == self.move else []


def conclude(position: Position, answers: Sequence[Answer], *, replace: bool) -> Thought:
    """The move that a model's answers come to. replace: what is illegal, instead of resigning."""
    said = tuple(answers)
    if said and said[0].best is not None:
        return Thought(said[0].best, "best", said[:1])
    if not replace and any(answer.fault for answer in said):
        return Thought(None, "resigned", said)
    for count, answer in enumerate(said, start=1):
        if answer.moves:
            return Thought(answer.moves[0], "candidate" if count == 1 else "again", said[:count])
    return Thought(any_move(position), "random", said)
