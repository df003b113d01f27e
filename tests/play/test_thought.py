"""From a model's text to a move: by the rules, worked out by hand."""

import chess
import pytest

from grpo.play.thought import Candidate, Position, any_move, conclude, game_seed, read_answer

E2E4, D2D4, G1F3 = (chess.Move.from_uci(move) for move in ("e2e4", "d2d4", "g1f3"))
START = Position(chess.Board(), seed=7)


def test_an_answer_is_its_legal_moves_by_their_evals():
    answer = read_answer(START, "M: d2d4 e2e5 g1f3 e2e4 E: 0.2 9.0 -0.1 0.35 B: e2e4")
    assert answer.moves == [E2E4, D2D4, G1F3] and answer.fault == ""
    assert [(line.move, line.score) for line in answer.lines] == [
        (E2E4, "cp 35"), (D2D4, "cp 20"), (G1F3, "cp -10"),
    ]  # fmt: skip
    assert conclude(START, [answer], replace=True).how == "best"


def test_an_illegal_answer_is_replaced_by_the_next_candidate_then_by_asking_again_then_at_random():
    with_candidates = read_answer(START, "M: d2d4 g1f3 E: 0.1 0.3 B: e2e5")
    assert with_candidates.fault == "e2e5"
    thought = conclude(START, [with_candidates], replace=True)
    assert (thought.move, thought.how, thought.faults) == (G1F3, "candidate", ["e2e5"])
    without = read_answer(START, "M: e2e5 E: 0.1 B: nothing")
    assert without.moves == [] and without.fault == "no move"
    thought = conclude(START, [without, read_answer(START, "M: d2d4 E: 0 B: d2d4")], replace=True)
    assert (thought.move, thought.how) == (D2D4, "again")
    thought = conclude(START, [without, without], replace=True)
    assert thought.how == "random" and thought.move in START.board.legal_moves and thought.lines == []
    for answer in (with_candidates, without):
        assert conclude(START, [answer], replace=False).how == "resigned"
        assert conclude(START, [answer], replace=False).move is None


def test_what_was_cut_short_is_not_illegal():
    answer = read_answer(START, "M: d2d4 g1f3 E: 0.1", is_whole=False)
    assert answer.fault == ""
    thought = conclude(START, [answer], replace=False)  # nobody resigns for want of time
    assert (thought.move, thought.how) == (D2D4, "candidate")
    assert [line.score for line in thought.lines] == ["cp 10", ""]
    assert conclude(START, [], replace=False).how == "random"


def test_of_some_moves_the_others_are_left_out_and_not_illegal():
    position = START._replace(allowed=(D2D4, G1F3))
    answer = read_answer(position, "M: e2e4 d2d4 E: 0.5 0.1 B: e2e4")
    assert answer.moves == [D2D4] and answer.fault == ""
    assert any_move(position) in position.allowed


@pytest.mark.parametrize(
    ("value", "score"),
    [(0.35, "cp 35"), (-10.09, "cp -1009"), (999.97, "mate 3"), (-999.99, "mate -1"), (1000.0, "mate 1"),
     (0.0, "cp 0"), (998.0, "cp 99800"), (None, "")],
)  # fmt: skip
def test_scores_are_as_uci_has_them(value, score):
    assert Candidate(E2E4, value).score == score


def test_chance_is_the_games_and_the_half_moves():
    seeds = [game_seed(seed, game) for seed in (0, 1) for game in (0, 1)]
    assert len(set(seeds)) == 4
    positions = [Position(chess.Board(), seed) for seed in range(40)]
    drawn = [any_move(position) for position in positions]
    assert drawn == [any_move(position) for position in positions] and len(set(drawn)) > 10
