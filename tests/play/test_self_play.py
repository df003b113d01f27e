"""A model that plays by itself: until its first illegal move, and where there is a mate in one."""

import itertools
import json

import chess
import pytest

from grpo.evaluate.scores import HALF_MOVES, MATES
from grpo.play.match import random_openings
from grpo.play.player import Player
from grpo.play.self_play import mate_in_one, read_mates, self_play
from grpo.play.thought import choose_move, read_answer
from grpo.types import Prompt

FEN = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
BEFORE_MATE = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"


def first_legal(board):
    return min(move.uci() for move in board.legal_moves)


class Somebody:
    """In place of the model: says `B: move(board)`, whatever that is."""

    def __init__(self, move=first_legal):
        self.move, self.asked = move, []

    def prompts(self, boards):
        return [Prompt(board.fen(), f"P: {board.fen()}", {}) for board in boards]

    def think(self, positions, *, replace):
        assert not replace
        self.asked.append([each.board.fen() for each in positions])
        return [
            choose_move(each, [read_answer(each, f"B: {self.move(each.board)}")], replace=False)
            for each in positions
        ]


def half_moves(move, *fens):
    """Returns games from these positions, in their order."""
    played = [self_play(Somebody(move), 1, seed=0, fens=[fen]) for fen in fens]
    return [evaluation.scores[HALF_MOVES].item() for evaluation in played]


def test_games_end_at_the_first_illegal_move_and_when_they_are_over():
    def legal_twice(board):  # in either game
        return "e2e5" if len(board.move_stack) == 2 else first_legal(board)

    somebody = Somebody(legal_twice)
    scores = self_play(somebody, 3, seed=0, fens=[chess.STARTING_FEN, FEN, MATED]).scores[HALF_MOVES]
    assert sorted(scores.tolist()) == [0, 2, 2]
    assert [len(fens) for fens in somebody.asked] == [2, 2, 2]
    fools_mate = iter(["f2f3", "e7e5", "g2g4", "d8h4"])
    assert half_moves(lambda _: next(fools_mate), chess.STARTING_FEN) == [4]
    assert half_moves(lambda _: "e1h1", "6k1/8/8/8/8/8/8/4K2R w K - 0 1") == [1]  # castling, by the rook
    there_and_back = itertools.cycle(["a6a7", "h3h2", "a7a6", "h2h3"])
    assert half_moves(lambda _: next(there_and_back), FEN) == [8]  # threefold, as in matches


def test_it_plays_from_seeded_openings_or_given_positions_and_the_same_every_time(load, config):
    fens = [[board.fen() for board in random_openings(20, seed=seed)] for seed in (1, 1, 2)]
    assert fens[0] == fens[1] != fens[2] and len(set(fens[0])) == 20

    def only_white(board):
        return first_legal(board) if board.turn else "a1a8"

    somebody = Somebody(only_white)
    assert self_play(somebody, 5, seed=0).scores[HALF_MOVES].tolist() == [1] * 5
    assert len(set(somebody.asked[0])) == 5
    from_given = self_play(Somebody(only_white), 3, seed=0, fens=[FEN, chess.STARTING_FEN, BEFORE_MATE])
    assert sorted(from_given.scores[HALF_MOVES]) == [0, 1, 1]
    model, tokenizer, _ = load("gpt2")
    found = [self_play(Player(model, tokenizer, config, rows=rows), 3, seed=0) for rows in (1, 8)]
    assert found[0].scores[HALF_MOVES].tolist() == found[1].scores[HALF_MOVES].tolist()
    assert found[0].prompts == found[1].prompts


def test_mates_are_read_from_games_and_count_where_the_model_mates(tmp_path):
    """The scholar's mate, and the fool's."""
    games = ("1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4.", "1. f3 e5 2. g4")
    (file := tmp_path / "task.json").write_text(json.dumps({"examples": [{"input": each} for each in games]}))
    found = mate_in_one(Somebody(lambda board: "h5f7"), read_mates(file), seed=0)
    assert found.scores[MATES].tolist() == [1, 0] and found.mean(MATES) == pytest.approx(0.5)
