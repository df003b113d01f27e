"""Positions in a terminal, beside what a model said of them before and after training."""

from collections.abc import Callable
from functools import partial

import chess
from rich.console import Group, RenderableType
from rich.table import Table

from grpo.evaluate.quality import Example
from rewards.environment import referee
from rewards.formats import is_fen, is_move, legal_move, parse_environment_completion, parse_policy_completion


def example_boards(example: Example) -> RenderableType:
    """A board, and beside it the question and both answers, judged by the rules alone."""
    task, _, rest = example.prompt.partition(":")
    fen, *fields = (part.strip() for part in rest.split("+"))
    if not is_fen(fen):
        return Group(example.prompt, f"before: {example.before}", f"after:  {example.after}")
    board = chess.Board(fen)
    judge: Callable[[str], str]
    if task == "A":
        action = fields[0] if fields else ""
        question = f"{_side(board)} plays {_in_san(board, action) or action}. What is the position then?"
        judge = partial(_judged_position, fen, action)
    else:
        question = f"{_side(board)} to move. What is best?"
        judge = partial(_judged_move, board)
    side_by_side = Table.grid(padding=(0, 3))
    answers = (question, "", f"before: {judge(example.before)}", f"after:  {judge(example.after)}")
    side_by_side.add_row(board.unicode(empty_square="·"), "\n".join(answers))
    return side_by_side


def _side(board: chess.Board) -> str:
    return "White" if board.turn else "Black"


def _in_san(board: chess.Board, text: str) -> str | None:
    """Ka1; None where that is illegal."""
    move = legal_move(board, text)
    return board.san(move) if move else None


def _judged_move(board: chess.Board, text: str) -> str:
    best = parse_policy_completion(text).best
    if not is_move(best):
        return "no move can be read"
    return _in_san(board, best) or f"{best}, which is illegal"


def wrong_squares(fen: str, true_fen: str) -> list[chess.Square]:
    """Where the pieces of two positions differ."""
    pieces, true_pieces = chess.Board(fen).piece_map(), chess.Board(true_fen).piece_map()
    return [square for square in chess.SQUARES if pieces.get(square) != true_pieces.get(square)]


def _judged_position(fen: str, action: str, text: str) -> str:
    written, truth = parse_environment_completion(text).next_fen, referee(fen, action).next_fen
    if written == truth:
        return "right"
    if not is_fen(written):
        return f"no position: {written[:40]!r}"
    if wrong := wrong_squares(written, truth):
        return f"wrong on {', '.join(map(chess.square_name, wrong))}"
    return "the pieces right, not whose turn it is or how many moves"
