"""Matches: who plays what, what the rules say, what is kept, and that they go on where they were."""

import io
import itertools
import json

import chess
import chess.pgn
import pytest
from benchmarks.learning import play_untrained

from grpo.evaluate import paired_difference
from grpo.evaluate.games import random_openings
from grpo.play.match import GAMES, pair_up, play_match, score_against
from grpo.play.opponents import AtRandom
from grpo.play.record import FILE, PGN_FILE, Game, Match
from grpo.play.thought import Thought, conclude, read_answer

SCHOLARS_MATE = ["e2e4", "e7e5", "d1h5", "b8c6", "f1c4", "g8f6", "h5f7"]


def thought(move: str) -> Thought:
    return Thought(chess.Move.from_uci(move), "best", ())


def match_of(count: int, seed: int = 1) -> Match:
    return Match(("a", "b"), {"seed": seed}, pair_up(random_openings(-(-count // 2), seed=seed), count))


class Counting(AtRandom):
    """Moves at random, and how many positions at a time there were."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def think(self, positions, *, replace=True):
        self.asked.append(len(positions))
        return super().think(positions, replace=replace)


class Unsure(AtRandom):
    """Answers every third position with an illegal move."""

    def think(self, positions, *, replace=True):
        answers = [
            "M: a1a1 B: a1a1"
            if position.board.ply() % 3 == 0
            else f"B: {next(iter(position.board.legal_moves))}"
            for position in positions
        ]
        return [
            conclude(position, [read_answer(position, answer)], replace=replace)
            for position, answer in zip(positions, answers, strict=True)
        ]


def test_a_game_ends_by_the_rules_and_by_nothing_else():
    game = Game(chess.STARTING_FEN, first_is_white=False)
    for move in SCHOLARS_MATE:
        assert not game.is_over
        game.play(thought(move))
    assert (game.result, game.ending, game.points) == ("1-0", "checkmate", 0.0)
    shuffling = Game(chess.STARTING_FEN, first_is_white=True)
    for move in ("g1f3", "g8f6", "f3g1", "f6g8") * 2:
        assert not shuffling.is_over
        shuffling.play(thought(move))
    assert (shuffling.result, shuffling.ending, shuffling.points) == ("1/2-1/2", "threefold repetition", 0.5)
    fifty = Game("8/8/4k3/8/8/4K3/R7/8 w - - 99 80", first_is_white=True)
    fifty.play(thought("a2a3"))
    assert fifty.ending == "fifty moves"
    bare = Game("8/8/4k3/8/8/4K3/4q3/8 w - - 0 80", first_is_white=True)
    bare.play(thought("e3e2"))
    assert bare.ending == "insufficient material"


def test_whoever_has_no_move_loses():
    for first_is_white in (True, False):
        game = Game(chess.STARTING_FEN, first_is_white=first_is_white)
        game.play(Thought(None, "resigned", ()))
        assert (game.result, game.ending) == ("0-1", "an illegal answer")
        assert game.points == float(not first_is_white)
        assert game.illegal(0 if first_is_white else 1) == [1]


def test_each_two_games_have_one_opening_and_the_colours_exchanged():
    games = match_of(5).games
    assert [game.first_is_white for game in games] == [True, False, True, False, True]
    assert games[0].fen == games[1].fen != games[2].fen == games[3].fen != games[4].fen
    assert [game.turn for game in games[:2]] == [0, 1]


def test_all_games_are_played_together_and_whatever_is_beside_them_does_not_matter():
    played = []
    for at_once in (3, 64):
        match, first, second = match_of(8), Counting(), Counting()
        play_match(match, (first, second), seed=5, at_once=at_once)
        assert all(game.is_over for game in match.games) and sum(match.score) == 8
        assert max(first.asked) <= at_once
        played.append([game.moves for game in match.games])
    assert played[0] == played[1]
    other = match_of(8)
    play_match(other, (AtRandom(), AtRandom()), seed=6, at_once=64)
    assert [game.moves for game in other.games] != played[0]


def test_a_match_that_was_stopped_goes_on_to_the_same_games(tmp_path):
    whole, parts = match_of(6), match_of(6)
    play_match(whole, (AtRandom(), AtRandom()), seed=5, at_once=2)
    rounds = itertools.count()
    play_match(
        parts, (AtRandom(), AtRandom()), seed=5, at_once=2, save=lambda: parts.save(tmp_path),
        stopped=lambda: next(rounds) >= 150,
    )  # fmt: skip
    again = Match.load(tmp_path)
    begun = [len(game.moves) for game in again.games if not game.is_over]
    assert again == parts and any(begun) and not all(begun)
    play_match(again, (AtRandom(), AtRandom()), seed=5, at_once=2)
    assert [game.moves for game in again.games] == [game.moves for game in whole.games]
    assert [game.result for game in again.games] == [game.result for game in whole.games]


def test_what_an_engine_breaks_is_saved(tmp_path):
    class Broken(AtRandom):
        def think(self, positions, *, replace=True):
            if positions[0].board.ply() > 20:
                raise RuntimeError("the engine died")
            return super().think(positions, replace=replace)

    match = match_of(2)
    with pytest.raises(RuntimeError, match="the engine died"):
        play_match(match, (AtRandom(), Broken()), seed=5, at_once=2, save=lambda: match.save(tmp_path))
    assert all(len(game.moves) > 10 for game in Match.load(tmp_path).games)


def test_illegal_answers_are_counted_of_whoever_gave_them(tmp_path):
    match = match_of(6)
    play_match(match, (Unsure(), AtRandom()), seed=5, at_once=6)
    for game in match.games:
        assert not game.illegal(1)
        for ply in game.illegal(0):
            board = chess.Board(game.fen)
            for move in game.moves[: ply - 1]:
                board.push_uci(move)
            assert board.turn == game.first_is_white and board.ply() % 3 == 0
    plies = [len(game.illegal(0)) for game in match.games]
    assert match.illegal_a_game(0) == sum(plies) / 6 > 0 and match.illegal_a_game(1) == 0
    assert match.first_illegal(0) and match.first_illegal(1) is None
    match.save(tmp_path)
    summary = json.loads((tmp_path / FILE).read_text())["summary"]
    assert summary["illegal_a_game"] == [match.illegal_a_game(0), 0] and summary["draws"] == match.score.draws
    without = match_of(2)
    play_match(without, (Unsure(), AtRandom()), seed=5, at_once=6, replace=False)
    assert all(game.ending == "an illegal answer" and game.points == 0 for game in without.games)


def test_the_pgn_holds_the_games_as_other_programs_read_them(tmp_path):
    match = match_of(3)
    play_match(match, (Unsure(), AtRandom()), seed=5, at_once=6)
    match.save_pgn(tmp_path)
    with io.StringIO((tmp_path / PGN_FILE).read_text()) as file:
        read = [chess.pgn.read_game(file) for _ in range(4)]
    assert read.pop() is None
    for game, each in zip(match.games, read, strict=True):
        assert not each.errors and each.board().fen() == game.fen
        assert [move.uci() for move in each.mainline_moves()] == game.moves
        assert each.headers["Result"] == game.result and each.headers["Termination"] == game.ending
        assert each.headers["White" if game.first_is_white else "Black"] == "a"
        comments = [node.comment for node in each.mainline() if node.comment]
        assert len(comments) == len(game.replaced) and all("illegal" in comment for comment in comments)


NO_MATCHES = (
    "", "{}", "[]", '{"players": ["a"], "settings": {}, "games": []}',
    '{"players": ["a", "b"], "settings": {}, "games": [{"fen": "x"}]}',
)  # fmt: skip


@pytest.mark.parametrize("text", NO_MATCHES)
def test_a_file_that_is_no_match_is_told_of(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=r"is no match .* remove it, or play into another folder"):
        Match.load(tmp_path)


def test_a_score_from_positions_is_a_column_of_an_evaluation():
    fens = [board.fen() for board in random_openings(4, seed=2)]
    scores = score_against(AtRandom(), AtRandom(), fens, seed=3, at_once=8).scores[GAMES]
    assert scores.shape == (4,) and set(scores) <= {0, 0.25, 0.5, 0.75, 1}


NEARLY_FIFTY = ["8/8/4k3/8/8/4K3/R7/8 w - - 97 80", "8/8/4k3/8/r7/4K3/8/8 b - - 97 80"]


def test_a_trained_model_is_scored_against_the_untrained_one_in_both_modes(load, config):
    quality = play_untrained(load("gpt2"), load("gpt2"), config, NEARLY_FIFTY)
    itself = play_untrained(None, load("gpt2"), config, NEARLY_FIFTY)
    for mode in ("sampled", "greedy"):
        scores = getattr(quality, mode).scores[GAMES]
        assert scores.tolist() == [0.5, 0.5]  # whoever is to move first loses, in either colour
        assert paired_difference(getattr(itself, mode), getattr(quality, mode), GAMES)[0] == 0
