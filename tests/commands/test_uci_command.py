"""grpo-lean uci as chess programs start it: python-chess is the client."""

import subprocess
import sys

import chess
import chess.engine
import pytest
from benchmarks.uci import play_games
from commands import ROOT, run


def test_a_client_plays_whole_games_by_the_clock_in_either_colour(model_folders):
    words = [sys.executable, str(ROOT / "scripts" / "play.py"), "--model", str(model_folders["gpt2"])]
    with chess.engine.SimpleEngine.popen_uci(words, timeout=60, stderr=subprocess.DEVNULL) as engine:
        assert set(engine.options) >= {"Temperature", "Seed", "Device", "IllegalMoves"}
        engine.configure({"Temperature": "0.8", "Seed": 3})
        played = play_games(engine, 2, seed=2, clock_s=0.5, added_s=0.02)
        assert played.games == 2 and played.moves > 10 and not played.errors
        engine.configure({"IllegalMoves": "resign"})
        resigned = engine.play(chess.Board("8/8/4k3/8/8/4K3/R7/8 w - - 0 80"), chess.engine.Limit(nodes=1))
        assert resigned.move is None
        engine.quit()
        assert engine.returncode.result(10) == 0


def test_only_uci_is_on_stdout_and_where_lines_end_all_they_ask_for_is_answered(model_folders, tmp_path):
    log = tmp_path / "log"
    words = [sys.executable, ROOT / "scripts" / "play.py", "--model", model_folders["llama"], "--log", log]
    lines = ["uci", "", "help", "go go go", "position fen", "setoption name x", "\x00", "stop", "isready",
             "position fen 8/8/4k3/8/8/4K3/R7/8 w - - 0 80", "go searchmoves a2a3"]  # fmt: skip
    ended = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True, timeout=120)
    said = ended.stdout.splitlines()
    assert ended.returncode == 0 and said[-1] == "bestmove a2a3"
    assert {line.split(" ")[0] for line in said} <= {"id", "option", "uciok", "readyok", "info", "bestmove"}
    assert "playing by" in log.read_text()


def test_a_model_that_is_not_there_ends_it_with_a_word_to_the_program_and_to_people(tmp_path):
    ended = run("scripts/play.py", "--model", "no/such/model/here", cwd=tmp_path)
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
