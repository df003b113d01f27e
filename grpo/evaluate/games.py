"""The policy at the board: games against itself, and positions with a mate in one."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import chess
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.evaluate.evaluation import Evaluation
from grpo.evaluate.heldout import EVALUATION_STEP
from grpo.evaluate.scores import HALF_MOVES, MATES
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt
from rewards.formats import legal_move, parse_policy_completion, policy_prompt, usual_move

MATES_URL = "https://github.com/google/BIG-bench/raw/main/bigbench/benchmark_tasks/checkmate_in_one/task.json"


def self_play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_games: int,
    *,
    settings: SamplingSettings,
    rows: int,
    seed: int,
    fens: Sequence[str] | None = None,
    max_plies: int = 200,
    trailing_space: bool = False,
) -> Evaluation:
    """Column `HALF_MOVES`: legal half-moves of the model against itself until the first illegal one.

    Games start after four random half-moves, or at positions drawn from `fens`: played greedily, they
    would all be the same one otherwise. A game that is over, or `max_plies` long, ends as well.
    """
    if num_games < 1:
        raise ValueError(f"the number of games is {num_games}: give at least 1")
    if fens is None:
        starts = random_openings(num_games, seed=seed)
    elif len(fens) < num_games:
        raise ValueError(f"{num_games} games need as many positions: give at most {len(fens)} games")
    else:
        starts = [chess.Board(fen) for fen in random.Random(f"self-play {seed}").sample(fens, num_games)]
    plies = itertools.count()

    def choose(games: Mapping[int, str]) -> list[str]:
        uniforms = step_uniforms(
            num_games, settings.max_new_tokens, seed=seed, step=EVALUATION_STEP, draw=next(plies)
        )
        prompts = _policy_prompts(games.values(), trailing_space)
        return _best_moves(model, tokenizer, prompts, uniforms[list(games)], settings, rows=rows)

    num_legal = np.array(play_games(starts, choose, max_plies=max_plies), np.float64)
    prompts = _policy_prompts([board.fen() for board in starts], trailing_space)
    return Evaluation.of(prompts, {HALF_MOVES: num_legal[:, np.newaxis]})


def play_games(
    starts: Sequence[chess.Board], choose: Callable[[Mapping[int, str]], Sequence[str]], *, max_plies: int
) -> list[int]:
    """Legal half-moves of each game.

    choose: from the FENs of the games still played, by their number, to a move (UCI) for each.
    Whatever is not a legal move ends its game.
    """
    boards = [board.copy() for board in starts]
    num_legal = [0] * len(boards)
    playing = [game for game, board in enumerate(boards) if not board.is_game_over()]
    for _ in range(max_plies):
        if not playing:
            break
        moves = choose({game: boards[game].fen() for game in playing})
        legal = {
            game: move
            for game, text in zip(playing, moves, strict=True)
            if (move := legal_move(boards[game], text)) is not None
        }
        for game, move in legal.items():
            boards[game].push(move)
            num_legal[game] += 1
        playing = [game for game in legal if not boards[game].is_game_over()]
    return num_legal


def random_openings(count: int, *, seed: int, plies: int = 4) -> list[chess.Board]:
    """Positions after `plies` random legal half-moves, whose game is not over."""
    rng = random.Random(f"openings {seed}")
    boards: list[chess.Board] = []
    while len(boards) < count:
        board = chess.Board()
        while board.ply() < plies and not board.is_game_over():
            board.push(rng.choice(list(board.legal_moves)))
        if not board.is_game_over():
            boards.append(board)
    return boards


def mate_in_one(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    boards: Sequence[chess.Board],
    *,
    settings: SamplingSettings,
    rows: int,
    seed: int,
    trailing_space: bool = False,
) -> Evaluation:
    """Column `MATES`: whether the model mates in each position, as `read_mates` gives them."""
    prompts = _policy_prompts([board.fen() for board in boards], trailing_space)
    uniforms = step_uniforms(len(boards), settings.max_new_tokens, seed=seed, step=EVALUATION_STEP)
    moves = _best_moves(model, tokenizer, prompts, uniforms, settings, rows=rows)
    mates = [
        usual_move(board, move) in mating_moves(board) for board, move in zip(boards, moves, strict=True)
    ]
    return Evaluation.of(prompts, {MATES: np.array(mates, np.float64)[:, np.newaxis]})


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
    if not mating_moves(board):
        raise ValueError("no move mates")
    return board


def mating_moves(board: chess.Board) -> set[str]:
    """The moves (UCI) that mate. python-chess is the referee."""
    mates = set()
    for move in list(board.legal_moves):
        board.push(move)
        if board.is_checkmate():
            mates.add(move.uci())
        board.pop()
    return mates


def _policy_prompts(fens: Iterable[str], trailing_space: bool) -> list[Prompt]:
    return [Prompt(fen, policy_prompt(fen, trailing_space=trailing_space), {}) for fen in fens]


def _best_moves(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    rows: int,
) -> list[str]:
    """What the model writes as `B:`; "" where that is no move."""
    completions = rollout(model, tokenizer, prompts, uniforms, settings, rows=rows).completions
    return [parse_policy_completion(text).best for text in completions]
