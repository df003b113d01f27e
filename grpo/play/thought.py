"""Reads a model's answer to a position as a chess player does: a move, and candidates with their evals.

It knows the rules alone. An answer whose `B:` is no legal move is replaced: by the model's own next
candidate, by what it says when it is asked again, at last by any move at random. How a move came about is
kept with it.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal, NamedTuple

import chess

from grpo.rewards import legal_move, parse_policy_completion

MoveSource = Literal["best", "candidate", "again", "random", "resigned"]
IllegalMoves = Literal["replace", "resign"]
MOST_ANSWERS = 5
"""A model is asked for, until one has a legal move."""


class GamePosition(NamedTuple):
    """A board to think about, and the seed of its game (`game_seed`), by which chance goes."""

    board: chess.Board
    seed: int


def game_seed(seed: int, game: int) -> int:
    """The number that chance goes by in one game of a match, or of a GUI."""
    return random.Random(f"game {game} of {seed}").getrandbits(48)


def random_move(position: GamePosition) -> chess.Move:
    """A random move, the same for the same half-move of the same game."""
    moves = sorted(position.board.legal_moves, key=chess.Move.uci)
    return random.Random(f"move {position.board.ply()} of {position.seed}").choice(moves)


class MoveChoice(NamedTuple):
    """A move that was chosen in a position, by one answer or several.

    move: None where there is nothing to play, or an illegal answer is not replaced. illegal: what was said as
    the best move and is none. evals: of the move, then of what else the model would have played, in pawns
    from the side to move; None where the model gave none. answers: it was asked for.
    """

    move: chess.Move | None
    how: MoveSource
    illegal: Sequence[str] = ()
    evals: Mapping[chess.Move, float | None] = MappingProxyType({})
    answers: int = 0


def read_answer(position: GamePosition, text: str, *, is_whole: bool = True) -> MoveChoice:
    """Reads one completion: `B:`, then what is legal of `M:`, each move once, the highest eval first.

    is_whole: False for a text that was cut short, whose `B:` may not be complete.
    """
    answer = parse_policy_completion(text)
    best = legal_move(position.board, answer.best)
    evals: dict[chess.Move, float | None] = {}
    for word, pawns in zip_longest(answer.moves, answer.evals[: len(answer.moves)]):
        if move := legal_move(position.board, word or ""):
            evals.setdefault(move, pawns)
    if best is not None:
        evals.setdefault(best, None)

    def rank(move: chess.Move) -> tuple[bool, float]:
        pawns = evals[move]
        return move == best, -float("inf") if pawns is None else pawns

    ranked = {move: evals[move] for move in sorted(evals, key=rank, reverse=True)}
    illegal = [] if best is not None or not is_whole else [answer.best or "no move"]
    how: MoveSource = "candidate" if best is None else "best"
    return MoveChoice(next(iter(ranked), None), how, illegal, ranked, answers=1)


def choose_move(position: GamePosition, answers: Sequence[MoveChoice], *, replace: bool) -> MoveChoice:
    """The move that a model's answers come to. replace: what is illegal, instead of resigning."""
    illegal = [text for answer in answers for text in answer.illegal]
    if illegal and not replace:
        return MoveChoice(None, "resigned", illegal, answers=len(answers))
    for count, answer in enumerate(answers, start=1):
        if answer.evals:
            how = "again" if count > 1 else answer.how
            return answer._replace(how=how, illegal=illegal, answers=count)
    return MoveChoice(random_move(position), "random", illegal, answers=len(answers))
