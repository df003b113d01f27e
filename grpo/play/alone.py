"""Columns for which a model plays without an opponent: against itself, and where there is a mate in one."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import chess
import numpy as np

from grpo.evaluate.evaluation import Evaluation
from grpo.evaluate.scores import HALF_MOVES, MATES
from grpo.play.match import random_openings
from grpo.play.player import Player
from grpo.play.thought import Position, game_seed

MATES_URL = "https://github.com/google/BIG-bench/raw/main/bigbench/benchmark_tasks/checkmate_in_one/task.json"


def self_play(
    player: Player,
    num_games: int,
    *,
    seed: int,
    fens: Sequence[str] | None = None,
    max_plies: int = 200,
) -> Evaluation:
    """Column `HALF_MOVES`: legal half-moves of the model against itself until the first illegal one.

    Games start after four random half-moves, or at positions drawn from `fens`: played greedily, they
    would all be the same one otherwise. Nobody claims a draw: unlike a match's, a game ends with the fifth
    repetition, or when it is `max_plies` long.
    """
    if num_games < 1:
        raise ValueError(f"the number of games is {num_games}: give at least 1")
    if fens is None:
        boards = random_openings(num_games, seed=seed)
    elif len(fens) < num_games:
        raise ValueError(f"{num_games} games need as many positions: give at most {len(fens)} games")
    else:
        boards = [chess.Board(fen) for fen in random.Random(f"self-play {seed}").sample(fens, num_games)]
    prompts, begun = player.prompts(boards), [board.ply() for board in boards]
    playing = [Position(board, game_seed(seed, number)) for number, board in enumerate(boards)]
    for _ in range(max_plies):
        playing = [position for position in playing if not position.board.is_game_over()]
        thoughts = player.think(playing, replace=False) if playing else []
        moves = [(position, thought.move) for position, thought in zip(playing, thoughts, strict=True)]
        playing = []
        for position, move in moves:
            if move is not None:
                position.board.push(move)
                playing.append(position)
    num_legal = np.array([board.ply() for board in boards], np.float64) - begun
    return Evaluation.of(prompts, {HALF_MOVES: num_legal[:, np.newaxis]})


def mate_in_one(player: Player, boards: Sequence[chess.Board], *, seed: int) -> Evaluation:
    """Column `MATES`: whether the model mates in each position, as `read_mates` gives them."""
    positions = [Position(board, game_seed(seed, number)) for number, board in enumerate(boards)]
    moves = [thought.move for thought in player.think(positions, replace=False)]
    mates = [move is not None and is_mate(board, move) for board, move in zip(boards, moves, strict=True)]
    return Evaluation.of(player.prompts(boards), {MATES: np.array(mates, np.float64)[:, np.newaxis]})


def is_mate(board: chess.Board, move: chess.Move) -> bool:
    after = board.copy(stack=False)
    after.push(move)
    return after.is_checkmate()


def read_mates(file: Path) -> list[chess.Board]:
    """Positions of BIG-bench's checkmate_in_one, `{"examples": [{"input": "1. e4 e5 2. ..."}, ...]}`.

    ValueError for a file that is anything else, or has a position without a mate in one.
    """
    try:
        games = [example["input"] for example in json.loads(file.read_text())["examples"]]
        if not games:
            raise ValueError("no examples")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is not BIG-bench's checkmate_in_one ({reason}): get {MATES_URL}") from error
    boards = []
    for number, game in enumerate(games, start=1):
        try:
            boards.append(_replay(game))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"example {number} of {file} is no game up to a mate in one ({error}), {str(game)[:60]!r}: "
                f"take it out, or get {MATES_URL}"
            ) from error
    return boards


def _replay(game: str) -> chess.Board:
    """The position after "1. e4 e5 2. Qh5 ...". Stricter than a PGN reader, which skips what is no move."""
    board = chess.Board()
    for move in re.sub(r"\d+\.+", " ", game).split():
        board.push_san(move)
    if not any(is_mate(board, move) for move in board.legal_moves):
        raise ValueError("no move mates")
    return board
