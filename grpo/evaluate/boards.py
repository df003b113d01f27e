"""A model's answers about positions, judged by the rules alone, and boards beside them in a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

import chess
from rich.console import Group, RenderableType
from rich.table import Table

from grpo.evaluate.quality import Example
from grpo.rewards import (
    is_fen,
    is_move,
    legal_move,
    parse_environment_completion,
    parse_policy_completion,
    referee,
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question about a position, and a verdict on the answer.

    task: White to move, White plays Nf3.
    move: UCI, the policy's answer or the environment's question; "" where none can be read.
    predicted: the environment's answer, with the squares on which its pieces are wrong.
    """

    board: chess.Board
    task: str
    verdict: str
    right: bool
    move: str
    move_is_legal: bool
    predicted: chess.Board | None = None
    wrong: Sequence[chess.Square] = ()


def check_answer(prompt: str, completion: str) -> Answer | None:
    """None for a prompt that is not of one of the two tasks. A completion may be anything."""
    task, _, rest = prompt.partition(":")
    fen, *fields = (part.strip() for part in rest.split("+"))
    if not is_fen(fen):
        return None
    if task == "P":
        return _judge_move(chess.Board(fen), completion)
    if task == "A" and fields and is_move(fields[0]):
        return _judge_position(fen, fields[0], completion)
    return None


def _judge_move(board: chess.Board, completion: str) -> Answer:
    best = parse_policy_completion(completion).best
    move = legal_move(board, best)
    verdict = f"{best}, which is illegal" if is_move(best) else "no move can be read"
    return Answer(
        board=board,
        task=f"{_side(board)} to move",
        verdict=board.san(move) if move else verdict,
        right=move is not None,
        move=best,
        move_is_legal=move is not None,
    )


def _judge_position(fen: str, action: str, completion: str) -> Answer:
    written, truth = parse_environment_completion(completion).next_fen, referee(fen, action).next_fen
    board = chess.Board(fen)
    move = legal_move(board, action)
    predicted = chess.Board(written) if is_fen(written) else None
    wrong: list[chess.Square] = []
    if predicted is not None:
        differing = predicted.piece_map().items() ^ chess.Board(truth).piece_map().items()
        wrong = sorted({square for square, _ in differing})
    if predicted is None:
        verdict = f"no position: {written[:40]!r}"
    elif wrong:
        verdict = f"wrong on {', '.join(map(chess.square_name, wrong))}"
    else:
        verdict = "the pieces right, not whose turn it is or how many moves"
    plays = board.san(move) if move else f"{action}, which is illegal"
    return Answer(
        board=board,
        task=f"{_side(board)} plays {plays}",
        right=written == truth,
        verdict="right" if written == truth else verdict,
        move=action,
        move_is_legal=move is not None,
        predicted=predicted,
        wrong=wrong,
    )


def _side(board: chess.Board) -> str:
    return "White" if board.turn else "Black"


def example_boards(example: Example) -> RenderableType:
    """A board, and beside it what was asked and what is to be said of both answers."""
    before, after = check_answer(example.prompt, example.before), check_answer(example.prompt, example.after)
    if before is None or after is None:
        return Group(example.prompt, f"before: {example.before}", f"after:  {example.after}")
    text = f"{before.task}\n\nbefore: {before.verdict}\nafter:  {after.verdict}"
    side_by_side = Table.grid(padding=(0, 3))
    side_by_side.add_row(before.board.unicode(empty_square="·"), text)
    return side_by_side
