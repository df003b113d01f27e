"""What a model says of a position as a chess player takes it: a move, and candidates with their evals.

By the rules alone. An answer whose `B:` is no legal move is replaced: by the model's own next candidate, by
what it says when it is asked again, at last by any move at random. How a move came about is kept with it.
"""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import chess

from rewards.engine import MATE_SCORE
from rewards.formats import legal_move, parse_policy_completion

How = Literal["best", "candidate", "again", "random", "resigned"]
IllegalMoves = Literal["replace", "resign"]
MOST_ANSWERS = 5
"""A model is asked for, until one has a legal move."""
NO_MOVE = "no move"
_LONGEST_MATE = 100
"""In moves; an eval that says more is no mate."""


class Position(NamedTuple):
    """A board to think about, and what chance goes by."""

    board: chess.Board
    seed: int
    """Of its game (`game_seed`)."""


def game_seed(seed: int, game: int) -> int:
    """The number that chance goes by in one game of a match, or of a GUI."""
    return random.Random(f"game {game} of {seed}").getrandbits(48)


def any_move(position: Position) -> chess.Move:
    """One at random, the same for the same half-move of the same game."""
    moves = sorted(position.board.legal_moves, key=chess.Move.uci)
    return random.Random(f"move {position.board.ply()} of {position.seed}").choice(moves)


class Line(NamedTuple):
    """A legal move that a model would play."""

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


class Thought(NamedTuple):
    """What came of thinking about a position: of one answer, or of several."""

    move: chess.Move | None
    """None where there is nothing to play, or an illegal answer is not replaced."""
    how: How
    faults: Sequence[str] = ()
    """What was said as the best move and is illegal."""
    lines: Sequence[Line] = ()
    """The move, then what else the model would have played."""
    answers: int = 0
    """It was asked for."""


def read_answer(position: Position, text: str, *, is_whole: bool = True) -> Thought:
    """What one completion comes to: `B:`, then what is legal of `M:`, each move once, the highest eval first.

    is_whole: False for a text that was cut short, whose `B:` may not be complete.
    """
    answer = parse_policy_completion(text)
    best = legal_move(position.board, answer.best)
    evals: dict[chess.Move, float | None] = {}
    for word, pawns in zip(answer.moves, [*answer.evals, *[None] * len(answer.moves)], strict=False):
        move = legal_move(position.board, word or "")
        if move is not None:
            evals.setdefault(move, pawns)
    lines = [Line(move, pawns) for move, pawns in evals.items() if move != best]
    lines.sort(key=lambda line: -float("inf") if line.eval is None else line.eval, reverse=True)
    if best is not None:
        lines.insert(0, Line(best, evals.get(best)))
    faults = [] if best is not None or not is_whole else [answer.best or NO_MOVE]
    how: How = "candidate" if best is None else "best"
    return Thought(lines[0].move if lines else None, how, faults, lines, answers=1)


def conclude(position: Position, answers: Sequence[Thought], *, replace: bool) -> Thought:
    """The move that a model's answers come to. replace: what is illegal, instead of resigning."""
    faults = [fault for answer in answers for fault in answer.faults]
    if faults and not replace:
        return Thought(None, "resigned", faults, answers=len(answers))
    for count, answer in enumerate(answers, start=1):
        if answer.lines:
            how = "again" if count > 1 else answer.how
            return answer._replace(how=how, faults=faults, answers=count)
    return Thought(any_move(position), "random", faults, answers=len(answers))
