"""`grpo-lean uci` with a real client, python-chess: whole games by the clock, starts, stops, and nonsense."""

import random

import chess.engine
from uci_client import ONE_MOVE, answers, command, nonsense, play_games, stop_times

GAMES, LINES = 2, 200


def test_games_by_the_clock_end_without_an_error_and_no_move_is_late(caplog):
    with chess.engine.SimpleEngine.popen_uci(command("rook-tiny"), timeout=60, stderr=-3) as engine:
        engine.ping()
        assert max(stop_times(engine, 20)) < 5
        moves, late = play_games(engine, GAMES, seed=0, clock_s=20.0, added_s=0.1)
    assert moves > GAMES and not late and not caplog.records


def test_it_obeys_after_lines_that_no_program_should_send():
    rng = random.Random(0)
    lines = [nonsense(rng) for _ in range(LINES)]
    to_end_with = ["stop", "ucinewgame", f"position fen {ONE_MOVE}", "go"]
    assert answers("rook-tiny", [*lines, *to_end_with])[-1] == "bestmove a1b1"
