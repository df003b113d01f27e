"""Columns for which a model plays without an opponent: against itself, and where there is a mate in one."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import chess
import numpy as np

from grpo.errors import UserError
from grpo.evaluate.evaluation import Evaluation
from grpo.evaluate.scores import HALF_MOVES, MATES
from grpo.play.match import play_games, random_openings
from grpo.play.player import Player
from grpo.play.record import Game
from grpo.play.thought import GamePosition, game_seed

MATES_URL = "https://github.com/google/BIG-bench/raw/main/bigbench/benchmark_tasks/checkmate_in_one/task.json"


def self_play(player: Player, num_games: int, *, seed: int, fens: Sequence[str] | None = None) -> Evaluation:
    """Column `HALF_MOVES`: legal half-moves of the model against itself until the first illegal one.

    The games are those of a match in which illegal answers lose. They start after four random half-moves,
    or at positions drawn from `fens`: played greedily, they would all be the same one otherwise.
    """
    if num_games < 1:
        raise UserError(f"the number of games is {num_games}: give at least 1")
    if fens is None:
        boards = random_openings(num_games, seed=seed)
    elif len(fens) < num_games:
        raise UserError(f"{num_games} games need as many positions: give at most {len(fens)} games")
    else:
        boards = [chess.Board(fen) for fen in random.Random(f"self-play {seed}").sample(fens, num_games)]
    games = [Game.begin(board) for board in boards]
    for _ in play_games(games, (player, player), seed=seed, at_once=num_games, replace=False):
        pass
    num_legal = np.array([[len(game.moves)] for game in games], np.float64)
    return Evaluation.of(player.prompts(boards), {HALF_MOVES: num_legal})


def mate_in_one(player: Player, boards: Sequence[chess.Board], *, seed: int) -> Evaluation:
    """Column `MATES`: whether the model mates in each position, as `read_mates` gives them."""
    positions = [GamePosition(board, game_seed(seed, number)) for number, board in enumerate(boards)]
    moves = [thought.move for thought in player.think(positions, replace=False)]
    mates = [[move is not None and is_mate(board, move)] for board, move in zip(boards, moves, strict=True)]
    return Evaluation.of(player.prompts(boards), {MATES: np.array(mates, np.float64)})


def is_mate(board: chess.Board, move: chess.Move) -> bool:
    after = board.copy(stack=False)
    after.push(move)
    return after.is_checkmate()


def read_mates(file: Path) -> list[chess.Board]:
    """Positions of BIG-bench's checkmate_in_one, `{"examples": [{"input": "1. e4 e5 2. ..."}, ...]}`.

    ValueError for a file that is anything else, or has a position without a mate in one. Moves are read more
    strictly than by a PGN reader, which skips what is none.
    """
    boards: list[chess.Board] = []
    place = "no JSON of examples"
    try:
        for number, example in enumerate(json.loads(file.read_text(encoding="utf-8"))["examples"], start=1):
            place, board = f"example {number}", chess.Board()
            for move in re.sub(r"\d+\.+", " ", example["input"]).split():
                board.push_san(move)
            if not any(is_mate(board, move) for move in board.legal_moves):
                raise UserError("no move mates")
            boards.append(board)
        if not boards:
            raise UserError("no examples")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{place}: {type(error).__name__}: {error}"
        raise UserError(f"{file} is not BIG-bench's checkmate_in_one ({reason}): get {MATES_URL}") from error
    return boards
