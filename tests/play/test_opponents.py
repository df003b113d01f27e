"""Opponents by their names; a chess engine in twenty lines stands in for the real ones."""

import sys

import chess
import chess.engine
import pytest

from grpo.play import opponents
from grpo.play.match import pair_up, play_match
from grpo.play.opponents import AtRandom, UciOpponent, engine_command, make_opponent
from grpo.play.record import Match
from grpo.play.thought import Position
from rewards.engine import EngineError, find_stockfish

LIMIT = chess.engine.Limit(nodes=50)
ENGINE = """#!{python}
import sys
import chess

board = chess.Board()
for line in sys.stdin:
    words = line.split()
    if words[:1] == ["uci"]:
        print("id name first move\\nuciok", flush=True)
    elif words[:1] == ["isready"]:
        print("readyok", flush=True)
    elif words[:2] == ["position", "startpos"]:
        board = chess.Board()
    elif words[:1] == ["position"]:
        board = chess.Board(" ".join(words[2:8]))
    elif words[:1] == ["go"]:
        {go}
    elif words[:1] == ["quit"]:
        break
    if "moves" in words:
        for move in words[words.index("moves") + 1:]:
            board.push_uci(move)
"""
FIRST_MOVE = 'print("bestmove", min(move.uci() for move in board.legal_moves), flush=True)'


@pytest.fixture
def engine(tmp_path):
    """Writes an engine that plays as told, and says where."""

    def write(go: str = FIRST_MOVE) -> str:
        file = tmp_path / "engine"
        file.write_text(ENGINE.format(python=sys.executable, go=go))
        file.chmod(0o755)
        return str(file)

    return write


def no_model(name: str):
    raise ValueError(f"model is {name!r}: there is no such folder.")


def test_whoever_is_no_engine_is_a_model():
    with make_opponent("random", LIMIT, 1, no_model) as opponent:
        assert isinstance(opponent, AtRandom)
    with pytest.raises(ValueError, match="no such folder"):
        make_opponent("runs/nothing", LIMIT, 1, no_model)


def test_an_engine_by_its_path_plays_whole_games_several_at_once(engine):
    with make_opponent(engine(), LIMIT, 2, no_model) as opponent:
        assert isinstance(opponent, UciOpponent)
        match = Match(("a", "b"), {}, pair_up([chess.Board()] * 3, 5))
        play_match(match, (AtRandom(), opponent), seed=0, at_once=5)
    assert all(game.is_over for game in match.games)
    for game in match.games:
        board = chess.Board(game.fen)
        for move in game.moves:
            if board.turn != game.first_is_white:
                assert move == min(each.uci() for each in board.legal_moves)
            board.push_uci(move)


def test_a_command_with_words_is_an_engine_too(engine, tmp_path):
    path = engine()
    assert engine_command(path) == [path] and engine_command(f"uci:{path} --fast") == [path, "--fast"]
    assert engine_command(str(tmp_path)) is None and engine_command("rook-tiny") is None
    with make_opponent(f"uci:{sys.executable} {path}", LIMIT, 1, no_model) as opponent:
        (move,) = opponent.think([Position(chess.Board(), 0)])
        assert move.move.uci() == "a2a3" and move.how == "best"


def test_an_engine_without_a_move_resigns(engine):
    with make_opponent(engine('print("bestmove (none)", flush=True)'), LIMIT, 1, no_model) as opponent:
        assert opponent.think([Position(chess.Board(), 0)])[0].move is None


@pytest.mark.parametrize("go", ["sys.exit(3)", 'print("bestmove e2e5", flush=True)'])
def test_an_engine_that_breaks_is_told_of_with_the_position(engine, go):
    with (
        make_opponent(engine(go), LIMIT, 1, no_model) as opponent,
        pytest.raises(EngineError, match="the engine failed on rnbqkbnr/pppppppp"),
    ):
        opponent.think([Position(chess.Board(), 0)])


def test_an_engine_may_say_what_is_no_text(engine):
    go = r'sys.stdout.buffer.write(b"info string \xff\xfe\nbestmove a2a3\n"); sys.stdout.flush()'
    with make_opponent(engine(go), LIMIT, 1, no_model) as opponent:
        assert opponent.think([Position(chess.Board(), 0)])[0].move.uci() == "a2a3"


def test_an_engine_that_hangs_is_not_waited_for_whatever_its_limit(engine, monkeypatch):
    monkeypatch.setattr(opponents, "_PATIENCE_S", 1.0)
    with (
        make_opponent(
            engine("import time; time.sleep(60)"), chess.engine.Limit(nodes=5), 1, no_model
        ) as opponent,
        pytest.raises(EngineError, match="no answer in time"),
    ):
        opponent.think([Position(chess.Board(), 0)])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("uci:", "no program"), ("uci:/no/such/engine", "'/no/such/engine', which is no program"),
     ("uci:/bin/true", "no working UCI engine"), ("stockfish:strong", "give stockfish, or its Elo")],
)  # fmt: skip
def test_what_is_no_engine_is_refused(name, reason):
    with pytest.raises((ValueError, EngineError), match=reason), make_opponent(name, LIMIT, 1, no_model):
        pass


@pytest.mark.skipif(find_stockfish() is None, reason="Stockfish is not installed")
def test_stockfish_is_limited_by_its_elo():
    with make_opponent("stockfish:1500", LIMIT, 1, no_model) as opponent:
        assert opponent.think([Position(chess.Board(), 0)])[0].move in chess.Board().legal_moves
    with (
        pytest.raises(ValueError, match=r"stockfish:100, but UCI_Elo of Stockfish .* goes from \d+ to \d+"),
        make_opponent("stockfish:100", LIMIT, 1, no_model),
    ):
        pass
