"""grpo-lean evaluate, match, uci and monitor, as they are typed."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chess
import chess.engine
import pytest
from commands import Command, here, run
from prompt_lines import write_records
from uci_client import ONE_MOVE, answers, command, play_games
from whole_runs import train

from grpo import Trainer
from grpo.commands.evaluate import EvaluateConfig, measure
from grpo.config import CONFIG_FILE, write_yaml
from grpo.data import load_prompts
from grpo.evaluate import Evaluation
from grpo.logs.tracking import read_lines
from grpo.play.record import Match
from grpo.run.folder import LOCK_FILE

pytestmark = pytest.mark.usefixtures("made_up_plans")


def said(ended) -> str:
    """On either stream, in one line."""
    return " ".join((ended.stdout + ended.stderr).split())


OWN_REWARD = """
def short(prompts, completions, limit, **columns):
    return [1 - min(len(text), most) / most for text, most in zip(completions, limit)]
"""


@pytest.fixture
def mine(tmp_path) -> dict[str, object]:
    """Settings of a task of one's own."""
    (tmp_path / "mine.py").write_text(OWN_REWARD)
    rows = [{"prompt": f"P: {letter}", "limit": 40} for letter in "abcdefghijklmnopqrst"]
    prompts = write_records(tmp_path / "mine.jsonl", rows)
    return {"prompts": prompts, "reward": (f"{tmp_path}/mine.py:short",), "steps": 1}


def test_runs_of_ones_own_task_are_evaluated_by_their_own_rewards(config, mine, model_folders):
    folder = train(replace(config, **mine, eval_interval=1))
    evaluated = [line for line in read_lines(folder / "metrics.jsonl") if "eval_reward" in line]
    assert len(evaluated) == 2  # and of each reward it is told
    assert all(line["eval_rewards/short/mean"] == line["eval_reward"] for line in evaluated)

    scores = folder / "scores.json"
    text = said(here("evaluate", folder, "--json", scores))
    columns = {"reward", "rewards/short/mean"}
    assert Evaluation.load(scores).scores.keys() == columns | {f"sampled/{name}" for name in columns}
    assert "greedy" in text and "sampled" in text and "rewards/short/mean" in text
    text = said(here("evaluate", folder, "--before", scores, "--temperature", 0))
    assert "+0.000" in text  # compared with itself
    ended = here("evaluate", folder, "--before", scores, "--temperature", 0, "--limit", 1)
    assert ended.returncode == 2 and "is of other prompts in reward" in said(ended)
    text = said(here("evaluate", model_folders["gpt2"], folder))  # the model by what the run asks and judges
    assert text.count("rewards/short/mean") == 2 and "sampled" in text  # a table each
    ended = here("evaluate", model_folders["gpt2"], "--prompts", mine["prompts"], "--heldout-share", 1)
    assert ended.returncode == 2 and "which only rewards can score: give --reward" in said(ended)


def test_a_run_that_was_made_in_python_says_what_it_lacks(config, mine):
    def short(completions, **columns):
        return [0.0] * len(completions)

    rows = [{"prompt": f"P: {letter}"} for letter in "abcdefgh"]
    (trainer := Trainer(replace(config, steps=1), prompts=rows, rewards=[short])).train()
    with pytest.raises(ValueError, match="was trained in Python, with reward short: give --reward"):
        EvaluateConfig((str(trainer.run.folder),))
    given = ["--prompts", mine["prompts"], "--reward", *mine["reward"], "--heldout-share", 1]
    assert here("evaluate", trainer.run.folder, *given).returncode == 0


def test_all_of_a_file_is_evaluated_and_of_what_a_run_was_trained_on_the_part_it_held_out(config, mine):
    folder = train(replace(config, **mine))
    rows = [{"prompt": f"{n}", "limit": 9} for n in range(40)]
    others = write_records(config.runs_dir / "others.jsonl", rows)

    def num_prompts(*models: object, **given: object) -> int:
        task = EvaluateConfig(tuple(map(str, models)), **given).task
        return len(
            load_prompts(task.prompts, seed=0, heldout_share=task.heldout_share, to_train=False).heldout
        )

    held_out = num_prompts(folder)
    assert 0 < held_out < 20
    assert num_prompts(folder, prompts=str(others)) == 40
    assert num_prompts("rook-tiny", prompts=str(others)) == 40
    assert num_prompts("rook-tiny", prompts=str(mine["prompts"])) == 20
    assert num_prompts(folder, prompts=str(mine["prompts"])) == held_out  # it was trained on the others
    assert num_prompts(folder, prompts=str(mine["prompts"]), heldout_share=1.0) == 20
    assert 0 < num_prompts(folder, prompts=str(others), heldout_share=0.5) < 40
    assert EvaluateConfig((str(folder),)).most_prompts == 1000
    assert EvaluateConfig((str(folder),), prompts=str(others)).most_prompts > 10**9
    assert EvaluateConfig((str(folder),), prompts=str(others), limit=7).most_prompts == 7


def test_a_run_is_judged_by_its_own_copies_of_files_that_have_changed(config, mine, tmp_path, logged):
    """A reward that is edited afterwards, and a template that is gone, judge and ask nobody anew."""
    (tmp_path / "ask.jinja").write_text("{{ prompt }} as the run asked")
    folder = train(replace(config, **mine, prompt_template=tmp_path / "ask.jinja", eval_interval=1))
    reward = read_lines(folder / "metrics.jsonl")[-1]["eval_reward"]
    (tmp_path / "mine.py").write_text(OWN_REWARD.replace("return [", "return [9 + "))
    (tmp_path / "ask.jinja").unlink()
    config = EvaluateConfig((str(folder),), temperature=0.0, precision="fp32", limit=4)
    results = measure(config, str(folder), [])
    assert results["greedy"].mean("reward") == pytest.approx(reward)
    text = "\n".join(logged)
    assert "reward 'short' is the run's copy" in text and "mine.py has changed since" in text
    assert "prompt_template is the run's copy" in text and "ask.jinja is gone since" in text
    assert f"the model is {folder / 'model'}, which is step-000001" in text
    assert "judged by rewards short" in text and "was trained" in text
    given = EvaluateConfig((str(folder),), reward=mine["reward"], temperature=0.0)  # now as it is
    assert given.task.reward == mine["reward"]


class Started(Exception):
    """An engine would have been."""


@pytest.mark.parametrize(
    ("trained_with", "flags", "depth"),
    [
        ({"engine": "auto", "engine_depth": 3}, {}, 3),
        ({"engine": "auto", "engine_depth": 3}, {"engine_depth": 2}, 2),
        ({"engine": "off"}, {"stockfish": True}, 8),
        ({"engine": "auto"}, {"labels": True}, None),
        ({"engine": "off"}, {}, None),
    ],
)
def test_moves_are_ranked_by_whom_the_run_was_trained_with(
    config, trained_with, flags, depth, logged, monkeypatch
):
    folder = train(replace(config, steps=1))  # without any, which takes a while
    write_yaml(replace(config, steps=1, **trained_with), folder / CONFIG_FILE)

    def start(path: str, **options: int) -> None:
        raise Started(options["depth"])

    monkeypatch.setattr("grpo.run.setup.EnginePool", start)
    monkeypatch.setattr("grpo.run.setup.find_stockfish", lambda path: "stockfish")
    told = EvaluateConfig((str(folder),), temperature=0.0, limit=2, **flags)
    if depth is None:
        measure(told, str(folder), [])
        assert "moves ranked by the labels of the prompts" in "".join(logged)
        return
    with pytest.raises(Started, match=str(depth)):
        measure(told, str(folder), [])
    monkeypatch.setattr("grpo.run.setup.find_stockfish", lambda path: None)
    if told.stockfish:
        with pytest.raises(ValueError, match="--stockfish: none was found"):
            measure(told, str(folder), [])
    else:  # as a run goes on without one
        measure(told, str(folder), [])
        assert "no Stockfish found" in "".join(logged)


def test_labels_and_an_engine_do_not_rank_moves_together():
    with pytest.raises(ValueError, match="--labels and Stockfish are both to rank moves"):
        EvaluateConfig(("rook-tiny",), labels=True, stockfish=True)


POSITIONS = [f"8/8/4k3/8/8/4K3/{pieces} - - 97 80" for pieces in ("R7/8 w", "r7/8 b", "1R6/8 w")]
"""Three half-moves before fifty moves are over."""


def test_a_run_plays_a_model_and_the_games_are_in_its_folder(config, tmp_path):
    run_folder = train(replace(config, steps=1))
    (positions := tmp_path / "positions.fen").write_text("\n".join(POSITIONS))
    words = [run_folder, "--against", "random", "--from", "prompts", "--prompts", positions, "--games"]
    ended = here("match", *words, 4)
    assert ended.returncode == 0, ended.stderr
    assert "test step-000001 against random, 4 games" in ended.stdout and "0, 4, 0" in ended.stdout
    assert "50.0 %" in ended.stdout and "illegal answers a game, test step-000001" in ended.stdout
    folder = run_folder / "matches" / "test-step-000001-against-random-from-prompts"
    assert str(folder / "games.pgn") in ended.stdout.replace("\n", "")
    before = Match.load(folder)
    assert before.score[:3] == (0, 4, 0) and {game.fen for game in before.games} <= set(POSITIONS)
    ended = here("match", *words, 6)  # two more
    assert ended.returncode == 0 and "0, 6, 0" in ended.stdout
    assert [game.text for game in Match.load(folder).games[:4]] == [game.text for game in before.games]
    for flags, reason in (
        ([4], "a match of 6 games: give --games 6 or more"),  # what has been played stays
        ([6, "--temperature", 1], "is a match with temperature 0.0, not 1.0"),
        ([8], "the games need 4 positions"),
    ):
        ended = here("match", *words, *flags)
        assert ended.returncode == 2 and reason in said(ended)


BREAKS = """
import chess
for line in iter(input, "quit"):
    if line in ("uci", "isready"):
        print({"uci": "uciok", "isready": "readyok"}[line], flush=True)
    elif line.startswith("position"):
        board = chess.Board(line.split("fen ")[1].split(" moves")[0])
        for move in line.partition(" moves ")[2].split():
            board.push_uci(move)
    elif line.startswith("go"):
        if board.halfmove_clock > 98:
            raise SystemExit(1)
        print("bestmove", min(move.uci() for move in board.legal_moves), flush=True)
"""


def test_games_are_kept_where_an_engine_breaks(model_folders, tmp_path):
    (positions := tmp_path / "positions.fen").write_text(POSITIONS[0])
    (tmp_path / "engine.py").write_text(BREAKS)
    ended = here(
        "match",
        model_folders["gpt2"],
        "--against",
        f"uci:{sys.executable} {tmp_path}/engine.py",
        "--games",
        2,
        "--from",
        "prompts",
        "--prompts",
        positions,
        "--output",
        tmp_path,
    )
    assert ended.returncode == 2 and "the engine failed on" in said(ended)
    assert [len(game.moves) for game in Match.load(tmp_path).games] == [3, 2]  # the first is drawn


def test_ctrl_c_keeps_the_games_and_the_same_command_goes_on(model_folders, tmp_path):
    (tmp_path / "longer.fen").write_text(POSITIONS[0].replace("97", "60"))
    start = ("--from", "prompts", "--prompts", tmp_path / "longer.fen")
    words = (model_folders["gpt2"], "--against", "random", "--games", 2, *start, "--output", tmp_path / "m")
    typed = Command("tests/grpo_lean.py", "match", *words, cwd=tmp_path)
    typed.wait_for("playing; Ctrl-C keeps")
    typed.interrupt()
    ended = typed.finish()
    assert ended.returncode == 130 and "the same command goes on with them" in " ".join(ended.stdout.split())
    games = Match.load(tmp_path / "m").games
    assert [game.result for game in games] == ["*", "*"] and "Traceback" not in ended.stderr


def test_a_client_plays_whole_games_by_the_clock_in_either_colour(model_folders, caplog):
    """python-chess is the client, which starts `uci` as chess programs do."""
    words = command(str(model_folders["gpt2"]))
    with chess.engine.SimpleEngine.popen_uci(words, timeout=60, stderr=subprocess.DEVNULL) as engine:
        assert set(engine.options) == {"Temperature", "Seed", "IllegalMoves"}
        engine.configure({"Temperature": "0.8", "Seed": 3})
        moves, _ = play_games(engine, 2, seed=2, clock_s=0.2, added_s=0.01)
        assert moves > 10 and not caplog.records
        engine.configure({"IllegalMoves": "resign"})
        resigned = engine.play(chess.Board("8/8/4k3/8/8/4K3/R7/8 w - - 0 80"), chess.engine.Limit(nodes=1))
        assert resigned.move is None
        engine.quit()
        assert engine.returncode.result(10) == 0


def test_only_uci_is_on_stdout_and_where_lines_end_all_they_ask_for_is_answered(model_folders, tmp_path):
    log = tmp_path / "log"
    lines = [
        "uci",
        "",
        "help",
        "go go go",
        "position fen",
        "setoption name x",
        "\x00",
        "stop",
        "isready",
        f"position fen {ONE_MOVE}",
        "go",
    ]
    assert answers(str(model_folders["llama"]), lines, "--log", log)[-1] == "bestmove a1b1"
    assert "the model is" in log.read_text()
    ended = run("tests/grpo_lean.py", "uci", "--model", "no/such/model/here", cwd=tmp_path)
    assert ended.returncode == 2 and "there is no such folder" in ended.stderr
    assert ended.stdout.startswith("info string error: model is 'no/such/model/here'")
    assert "Traceback" not in ended.stderr  # a word to the program, and to people


LEAKY = """
import torch
kept = []

def leaky(prompts, completions, **columns):
    kept.append(torch.zeros(1 << 18))  # 1 MB a step that nobody asked for
    return [float(len(text)) for text in completions]
"""


def write_run(folder: Path, growth: int = 0) -> Path:
    """memory.jsonl and metrics.jsonl of a run of 60 steps on a card, `growth` bytes a step."""
    folder.mkdir()
    memory, metrics = [], []
    for step in range(1, 61):
        held, all_of_it = 2**29 + growth * step, 2**30 + growth * step
        line = {
            "step": step,
            "rows": 8,
            "retries": 0,
            "predicted_bytes": 2**29,
            "added_bytes": 2**29,
            "process_bytes": all_of_it,
        }
        metrics.append(
            {
                "step": step,
                "num_tokens": 1000 * step,
                "memory/reserved_gb": all_of_it / 2**30,
                "memory/allocated_gb": (held + (step * 7919) % 1000) / 2**30,
            }
        )
        memory += [{**line, "phase": phase} for phase in ("sample", "score", "learn", "update")]
    write_records(folder / "memory.jsonl", memory)
    write_records(folder / "metrics.jsonl", metrics)
    return folder


@pytest.mark.parametrize(("growth", "verdict"), [(0, "no leak in 60 steps"), (2**19, "LEAK in 60 steps")])
def test_a_run_is_judged_by_its_files(tmp_path, monkeypatch, growth, verdict):
    """By `monitor`: of one that is being trained by what is there now."""
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "run", growth)
    (folder / LOCK_FILE).touch()
    done = here("monitor", "--attach", "run")
    assert done.returncode == (1 if growth else 0), done.stderr
    assert verdict in done.stdout and ("held tensors: +0.500 MB a step" in done.stdout) == bool(growth)
    written = json.loads((folder / "leak.json").read_text())
    assert written["leak"] == bool(growth) and len(written["samples"]) == 60
    assert (folder / "memory.png").stat().st_size > 10_000


def test_a_reward_that_keeps_tensors_is_found_and_named(tmp_path, model_folders, data_file):
    (tmp_path / "leaky.py").write_text(LEAKY)
    done = run(
        "monitor_memory.py",
        48,
        4,
        "--group-size",
        2,
        "--model",
        model_folders["gpt2"],
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--prompts",
        data_file,
        "--engine",
        "off",
        "--reward",
        "leaky.py:leaky",
        "--max-new-tokens",
        4,
        "--name",
        "watched",
        "--trackers",
        cwd=tmp_path,
    )
    assert done.returncode == 1 and "LEAK in 48 steps" in done.stdout, done.stderr
    rate = float(re.search(r"held tensors: \+([\d.]+) MB a step", done.stdout)[1])
    assert rate == pytest.approx(1.0, abs=0.1)
    assert all(said in done.stdout for said in ("(262144,)", "leaky.py:6", "step 1: sample"))
    assert (tmp_path / "runs/watched/memory.png").exists()
    assert json.loads((tmp_path / "runs/watched/leak.json").read_text())["kinds"] == ["held tensors"]
