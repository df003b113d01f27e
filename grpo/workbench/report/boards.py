"""Positions as pictures: a policy's move as an arrow, an environment's answer beside the position before.

What is no position or no move is said in words: a model may have written anything. Left out: prompts that
are not of one of the two tasks, which have no board.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import chess
import chess.svg

from grpo.evaluate.boards import wrong_squares
from grpo.workbench.report.figures import own_names
from grpo.workbench.report.sections import Board
from rewards.environment import referee
from rewards.formats import (
    as_move,
    is_fen,
    is_move,
    legal_move,
    parse_environment_completion,
    parse_policy_completion,
)

GOOD, BAD = "#1f6fb5c8", "#c0392bd0"
_WRONG_SQUARE = "#e8a39b"
_COLORS = {
    "square light": "#eef1f4", "square dark": "#b9c6d3", "margin": "#ffffff", "coord": "#5a6675",
    "inner border": "#aab3bd", "outer border": "#ffffff",
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """Boards of a prompt and its completion, none if it is not about chess, and what is to be said."""

    boards: tuple[Board, ...] = ()
    remark: str = ""


def draw_boards(prompt: str, completion: str, name: str) -> Drawn:
    """`name` is unique within a page."""
    task, _, rest = prompt.partition(":")
    if task == "P" and is_fen(rest.strip()):
        return _policy(rest.strip(), completion, name)
    fen, _, rest = rest.partition("+")
    action = rest.partition("+")[0].strip()
    if task == "A" and is_fen(fen.strip()) and is_move(action):
        return _environment(fen.strip(), action, completion, name)
    return Drawn()


def _policy(fen: str, completion: str, name: str) -> Drawn:
    best = parse_policy_completion(completion).best
    if not best:
        return Drawn(
            (draw_position(chess.Board(fen), "", name, "the position"),), "No best move can be read."
        )
    board = chess.Board(fen)
    move = legal_move(board, best)
    side = "White" if board.turn else "Black"
    caption = f"{side} to move: {board.san(move) if move else best}"
    remark = "" if move else f"{best} is illegal here."
    return Drawn((draw_position(board, best, name, caption, legal=move is not None),), remark)


def _environment(fen: str, action: str, completion: str, name: str) -> Drawn:
    board = chess.Board(fen)
    legal = legal_move(board, action) is not None
    caption = f"before, and {action}{'' if legal else ', which is illegal'}"
    predicted, truth = parse_environment_completion(completion).next_fen, referee(fen, action).next_fen
    if not is_fen(predicted):
        before = draw_position(board, action, name, caption, legal=legal)
        return Drawn((before,), "No next position can be read.")
    before = draw_position(board, action, name, caption, legal=legal, coordinates=False)
    wrong = wrong_squares(predicted, truth)
    fault = "wrong on the red squares" if wrong else "wrong in a field beside the pieces"
    caption = f"predicted, {'right' if predicted == truth else fault}"
    after = draw_position(
        chess.Board(predicted), "", f"{name}-after", caption, wrong=wrong, coordinates=False
    )
    return Drawn((before, after))


def draw_position(
    board: chess.Board,
    move: str,
    name: str,
    caption: str,
    *,
    legal: bool = True,
    wrong: Sequence[chess.Square] = (),
    coordinates: bool = True,
) -> Board:
    """A position with a move as an arrow.

    coordinates: letters and digits at the edges, which two boards side by side have no room for.
    """
    arrows = []
    if played := as_move(move):
        arrows = [chess.svg.Arrow(played.from_square, played.to_square, color=GOOD if legal else BAD)]
    svg = chess.svg.board(
        board, arrows=arrows, colors=_COLORS, fill=dict.fromkeys(wrong, _WRONG_SQUARE),
        coordinates=coordinates,
    )  # fmt: skip
    text = f"`{board.fen()}`" + (f", move `{move}`{'' if legal else ' (illegal)'}" if move else "")
    return Board(own_names(svg, name), caption, text)
