"""grpo-lean match: as it is typed, stopped, gone on with, and what it refuses."""

import json
from dataclasses import replace

import pytest
from commands import Command, run
from rich.console import Console

from grpo.commands.match import MatchConfig, play
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

POSITIONS = [
    f"8/8/4k3/8/8/4K3/{pieces}/8 {turn} - - 97 80"
    for pieces, turn in (("R7", "w"), ("r7", "b"), ("1R6", "w"))
]
"""Three half-moves before fifty moves are over."""


@pytest.fixture
def positions(tmp_path):
    file = tmp_path / "positions.fen"
    file.write_text("\n".join(POSITIONS))
    return file


@pytest.fixture
def run_folder(config, made_up_plans):
    with open_run(replace(config, steps=1, eval_interval=0)) as opened:
        Trainer(opened, Console(quiet=True)).train(StopRequest())
    return opened.folder


def test_a_run_plays_a_model_and_the_games_are_in_its_folder(run_folder, model_folders, positions, tmp_path):
    words = (run_folder, "--against", "random", "--from", "prompts", "--prompts", positions, "--games", 4)
    ended = run("scripts/match.py", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "test step-000001 against random, 4 games" in ended.stdout and "0, 4, 0" in ended.stdout
    assert "50.0 %" in ended.stdout and "illegal answers a game, test step-000001" in ended.stdout
    folder = run_folder / "matches" / "test-step-000001-against-random-from-prompts"
    assert str(folder / "games.pgn") in ended.stdout.replace("\n", "")
    before = json.loads((folder / "match.json").read_text())
    assert before["summary"]["draws"] == 4 and {game["fen"] for game in before["games"]} <= set(POSITIONS)
    ended = run("scripts/match.py", *words[:-1], 6, cwd=tmp_path)  # two more
    assert ended.returncode == 0 and "0, 6, 0" in ended.stdout
    assert json.loads((folder / "match.json").read_text())["games"][:4] == before["games"]
    ended = run("scripts/match.py", *words, cwd=tmp_path)  # what has been played stays
    assert ended.returncode == 2 and "a match of 6 games: give --games 6 or more" in " ".join(
        ended.stderr.split()
    )
    ended = run("scripts/match.py", *words, "--temperature", 1, cwd=tmp_path)
    assert ended.returncode == 2 and "is a match with temperature 0.0, not 1.0" in " ".join(
        ended.stderr.split()
    )
    ended = run("scripts/match.py", *words[:-1], 8, cwd=tmp_path)
    assert ended.returncode == 2
    assert "8 games need 4 positions" in ended.stderr and "give --games 6" in " ".join(ended.stderr.split())


def test_ctrl_c_keeps_the_games_and_the_same_command_goes_on(model_folders, tmp_path):
    (tmp_path / "longer.fen").write_text(POSITIONS[0].replace("97", "60"))
    start = ("--from", "prompts", "--prompts", tmp_path / "longer.fen")
    words = (model_folders["gpt2"], "--against", "random", "--games", 2, *start, "--output", tmp_path / "m")
    typed = Command("scripts/match.py", *words, cwd=tmp_path)
    typed.wait_for("playing; Ctrl-C keeps")
    typed.interrupt()
    ended = typed.finish()
    assert ended.returncode == 130 and "the same command goes on with them" in " ".join(ended.stdout.split())
    games = json.loads((tmp_path / "m" / "match.json").read_text())["games"]
    assert [game["result"] for game in games] == ["*", "*"] and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"games": 0}, "--games is 0"), ({"temperature": -1.0}, "--temperature is -1"),
     ({"movetime": 0.0}, "--movetime is 0"), ({"nodes": 0}, "--nodes is 0"),
     ({"prompts": "bundled"}, "add --from prompts")],
)  # fmt: skip
def test_bad_settings_are_refused_at_once(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        MatchConfig("rook-tiny", "random", **wrong)


def test_whoever_is_not_there_is_told_of(tmp_path):
    for model, against in (("no/such/model", "random"), ("rook-tiny", "runs/nothing")):
        with pytest.raises(ValueError, match=r"there is no such folder|could not be fetched"):
            play(MatchConfig(model, against, output=tmp_path / "match"))
    ended = run("scripts/match.py", "rook-tiny", cwd=tmp_path)
    assert ended.returncode == 2 and "--against" in ended.stderr
