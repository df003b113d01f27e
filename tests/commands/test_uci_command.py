"""grpo-lean uci as chess programs start it: python-chess is the client."""

import subprocess
import sys

import chess
import chess.engine
import pytest
from benchmarks.uci import play_games, survives
from commands import ROOT, fresh, run


def test_a_client_plays_whole_games_by_the_clock_in_either_colour(model_folders):
    words = [sys.executable, str(ROOT / "scripts" / "play.py"), "--model", str(model_folders["gpt2"])]
    with chess.engine.SimpleEngine.popen_uci(words, timeout=60) as engine:
        assert set(engine.options) >= {"Temperature", "Seed", "Device", "IllegalMoves"}
        engine.configure({"Temperature": "0.8", "Seed": 3})
        played = play_games(engine, 4, seed=2, clock_s=1.0, added_s=0.05)
        assert played.games == 4 and played.moves > 20 and not played.errors
        engine.configure({"IllegalMoves": "resign"})
        resigned = engine.play(chess.Board("8/8/4k3/8/8/4K3/R7/8 w - - 0 80"), chess.engine.Limit(nodes=1))
        assert resigned.move is None
        engine.quit()
        assert engine.returncode.result(10) == 0


def test_nothing_but_uci_is_on_stdout_whatever_comes_in(model_folders):
    lines = ["uci", "", "help", "go go go", "position fen", "setoption name x", "\x00", "stop", "isready"]
    assert survives(str(model_folders["gpt2"]), lines) == ""


def test_where_lines_end_what_they_ask_for_is_still_answered(model_folders, tmp_path):
    log = tmp_path / "log"
    words = [sys.executable, ROOT / "scripts" / "play.py", "--model", model_folders["llama"], "--log", log]
    ended = subprocess.run(
        words, input="position fen 8/8/4k3/8/8/4K3/R7/8 w - - 0 80\ngo searchmoves a2a3\n",
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "bestmove a2a3"
    assert log.exists()


def test_a_model_that_is_not_there_ends_it_with_a_word_to_the_program_and_to_people(tmp_path):
    ended = fresh("scripts/play.py", "--model", "no/such/model/here", cwd=tmp_path)
    assert ended.returncode == 2 and "there is no such folder" in ended.stderr
    assert ended.stdout.startswith("info string error: model is 'no/such/model/here'")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [(("--temperature", -1), "--temperature is -1"), (("--seed", -1), "--seed is -1"),
     (("--log", "."), "Is a directory")],
)  # fmt: skip
def test_bad_settings_are_refused(tmp_path, words, reason):
    ended = run("scripts/play.py", *words, cwd=tmp_path)
    assert ended.returncode == 2 and reason in ended.stderr and ended.stdout == ""
