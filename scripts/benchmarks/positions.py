"""Endgame positions as RookWorld lines: what the bundled model is trained and tested on.

Three to six pieces placed at random (`board.is_valid()`, not over). Policy lines carry Stockfish's
best moves in shuffled order; environment lines come from short random play, some moves illegal.
Every line is drawn from its own random stream, so that a set is the same however many processes
made it.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import chess

from grpo.data import is_heldout
from rewards.engine import EnginePool
from rewards.environment import referee
from rewards.formats import (
    MAX_HISTORY,
    EnvironmentSample,
    PolicySample,
    environment_line,
    policy_line,
)

ILLEGAL_SHARE = 0.05
MAX_PLIES_BEFORE = 3
_BLOCK = 500


def random_endgame(rng: random.Random) -> chess.Board:
    """A valid position of 3 to 6 pieces whose game is not over, either side to move."""
    while True:
        board = chess.Board(None)
        squares = rng.sample(chess.SQUARES, rng.randint(3, 6))
        board.set_piece_at(squares[0], chess.Piece(chess.KING, chess.WHITE))
        board.set_piece_at(squares[1], chess.Piece(chess.KING, chess.BLACK))
        for square in squares[2:]:
            kind = rng.choice((chess.PAWN, chess.PAWN, chess.KNIGHT, chess.BISHOP, chess.ROOK, chess.QUEEN))
            board.set_piece_at(square, chess.Piece(kind, rng.random() < 0.5))
        board.turn = rng.random() < 0.5
        board.halfmove_clock = rng.randint(0, 20)
        board.fullmove_number = rng.randint(30, 80)
        if board.is_valid() and not board.is_game_over():
            return board


def random_transition(rng: random.Random) -> EnvironmentSample:
    """A move after up to three random ones, with the referee's verdict on it."""
    board = random_endgame(rng)
    history: list[str] = []
    for _ in range(rng.randint(0, MAX_PLIES_BEFORE)):
        move = rng.choice(list(board.legal_moves))
        board.push(move)
        if board.is_game_over():
            board.pop()
            break
        history.append(move.uci())
    legal = list(board.legal_moves)
    if rng.random() < ILLEGAL_SHARE:
        action = _illegal_move(board, rng).uci()
    else:
        action = rng.choice(legal).uci()
    history = [*history, action][-MAX_HISTORY:]
    return EnvironmentSample(board.fen(), action, tuple(history), *referee(board.fen(), action))


def _illegal_move(board: chess.Board, rng: random.Random) -> chess.Move:
    while True:
        origin, target = rng.sample(chess.SQUARES, 2)
        move = chess.Move(origin, target)
        if move not in board.legal_moves:
            return move


def transition_lines(count: int, *, seed: int, heldout: bool) -> Iterator[str]:
    """`count` environment lines whose positions are (or are not) on the held-out side."""
    rng = random.Random(f"environment {seed}")
    while count:
        sample = random_transition(rng)
        if is_heldout(sample.fen) == heldout:
            count -= 1
            yield environment_line(sample)


def labelled_lines(
    count: int, *, seed: int, heldout: bool, depth: int = 6, num_processes: int = 2
) -> Iterator[str]:
    """`count` policy lines labelled by Stockfish at `depth`; about 340 a second on two cores."""
    blocks = range(0, count, _BLOCK)
    label = partial(_label_block, seed=seed, heldout=heldout, depth=depth)
    with ProcessPoolExecutor(num_processes) as processes:
        for start, lines in zip(blocks, processes.map(label, blocks), strict=True):
            yield from lines[: count - start]


def _label_block(start: int, *, seed: int, heldout: bool, depth: int) -> list[str]:
    rng = random.Random(f"policy {seed} {start}")
    fens: list[str] = []
    while len(fens) < _BLOCK:
        fen = random_endgame(rng).fen()
        if is_heldout(fen) == heldout:
            fens.append(fen)
    with EnginePool(depth=depth, cache_path=":memory:") as engine:
        analyses = engine.analyse(fens)
    lines = []
    for fen, analysis in zip(fens, analyses, strict=True):
        entries = list(zip(analysis.moves, analysis.evals, strict=True))
        best = analysis.moves[0]
        rng.shuffle(entries)
        moves, evals = zip(*entries, strict=True)
        lines.append(policy_line(PolicySample(fen, moves, evals, best)))
    return lines
