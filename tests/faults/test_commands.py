"""What comes from outside and is wrong: the line a person sees, and no traceback. One row a fault."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT, run

from grpo.config import SettingsError, read_yaml
from grpo.data.reward_calls import RewardFailed
from grpo.data.reward_functions import RewardFunctions
from grpo.plan.trace import tracer
from grpo.types import Prompt, Rollout

TRAIN = "train_lean.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "9" * 5001], "which is no run folder"),
        (["--prompts", "9" * 300], "with a part of 300 letters: give one that a disk takes, up to 255"),
        (["--lora-rank", str(2**57)], "lora_rank is 144115188075855872: give a number below 2^31"),
        (["--clip-range-high", "1e95"], "clip_range_high is 1e+95: give a number below 1e+30"),
        (["--config", "[/x].yaml"], "config file '[/x].yaml' does not exist"),
        (["--resume", "[/x]"], "resume is '[/x]', which is no run folder"),
        (["--reward-weights", "nan", "1"], "reward_weights is [nan, 1.0]"),
        (["--name", "a\nb"], r"name is 'a\nb', which cannot be printed"),
        (["--name", "\x1b[31m"], r"name is '\x1b[31m', which cannot be printed"),
        (["--reward-weights", "0", "0"], "reward_weights is [0.0, 0.0]: nothing would count"),
    ],
)
def test_what_is_typed(tmp_path, words, said):
    done = run(TRAIN, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr


def test_an_address_space_too_small_for_the_libraries_is_refused_before_they_abort(tmp_path):
    limited = f"ulimit -v 1000000; exec {sys.executable} {ROOT / TRAIN} --steps 1"
    done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "(ulimit -v) is 0.95 GB" in done.stderr


def test_a_report_on_a_folder_whose_name_looks_like_markup(tmp_path):
    done = run("scripts/report.py", "[/x]", cwd=tmp_path)
    assert done.returncode == 2 and "[/x] is no folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"5: 1", "has 5 where a setting's name belongs"),
        (b"~: 1", "has None where"),
        (b"2026-01-01: 1", "where a setting's name belongs"),
        (b"steps: 2026-13-45", "cannot be read: month must be in"),
        (b"steps: " + b"9" * 5001, "cannot be read: Exceeds the limit"),
        (b"[" * 3000 + b"]" * 3000, "nested too deep"),
        (b"'", "line 1: found unexpected end of stream"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_settings_files(tmp_path, content, words):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(SettingsError) as error:
        read_yaml(tmp_path / "bad.yaml")
    assert words in str(error.value) and "bad.yaml" in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------- rewards

REWARD = """
import random, sys
import numpy, torch

class Bad:
    def __float__(self): raise RuntimeError("no number")
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__

def forever():
    while True:
        yield 1.0

def reward(prompts, completions, completion_ids, tags, **columns):
    n = len(completions)
    {body}
"""


def rollout() -> Rollout:
    ones = torch.ones(2, 3)
    return Rollout(
        [Prompt("1", "Say a", {"tags": ["kept"]}), Prompt("2", "Say b", {"tags": []})], [[1], [2]],
        ones.long(), ones[:, 0].long(), ones[:, 0].bool(), ones, ["a", "b"],
    )  # fmt: skip


def rewards(folder: Path, body: str) -> RewardFunctions:
    file = folder / "mine.py"
    file.write_text(REWARD.format(body=body))
    return RewardFunctions([f"{file}:reward"])


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("return [10 ** 400] * n", ValueError, "int too large to convert to float"),
        ("return (1 / 0 for _ in range(n))", RewardFailed, "ZeroDivisionError in .*mine.py, line 1"),
        ("return [Bad()] * n", ValueError, r"returned a list \(no number\): it must return a list of 2"),
        ("return forever()", ValueError, "returned more than 2 scores for 2 completions"),
        ("return '12'", ValueError, "a str is no list"),
        ("return ['1'] * n", ValueError, "'1' is text, not a number"),
        ("return {0: 1.0, 1: 2.0}", ValueError, "a dict is no list"),
        ("return [1.0, float('inf')]", ValueError, "returned inf for completion 1: return finite numbers"),
        ("sys.exit(0)", RewardFailed, "failed with SystemExit"),
        ("raise GeneratorExit", RewardFailed, "failed with GeneratorExit"),
    ],
)
def test_rewards(tmp_path, body, error, words):
    with pytest.raises(error, match=words) as raised:
        rewards(tmp_path, body)(rollout())
    assert "'reward'" in str(raised.value)


def test_ctrl_c_inside_a_reward_is_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        rewards(tmp_path, "raise KeyboardInterrupt")(rollout())


def test_a_reward_may_change_what_it_gets(tmp_path):
    body = (
        "tags[0].append('x'); tags.clear(); completions.clear(); completion_ids[0].clear(); prompts.clear()"
    )
    given = rollout()
    for _ in range(2):
        scores = rewards(tmp_path, f"{body}; return [1.0] * n")(given)
        assert scores.rewards.tolist() == [1.0, 1.0]
    assert given.prompts[0].columns == {"tags": ["kept"]} and given.completions == ["a", "b"]


def test_a_reward_that_switches_gradients_off_does_so_for_itself(tmp_path):
    rewards(tmp_path, "torch.set_grad_enabled(False); return [1.0] * n")(rollout())
    assert torch.is_grad_enabled()


def test_random_rewards_are_the_same_for_the_same_completions(tmp_path):
    """Whatever the run did before, and without a trace in the generators that it uses."""
    drawing = rewards(
        tmp_path, "return [random.random() + numpy.random.rand() + torch.rand(()) for _ in prompts]"
    )
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), random.getstate()
        results.append(drawing(rollout()).rewards)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert torch.equal(*results) and results[0][0] != results[0][1]


@pytest.mark.parametrize("body", ["return [1.0]", "return [float('nan')] * n", "return [float('inf')] * n"])
def test_an_answer_that_breaks_in_a_later_step_says_how_to_go_on(tmp_path, model_folders, body):
    calls = "reward.calls = getattr(reward, 'calls', 0) + 1\n    if reward.calls < 3: return [1.0] * n\n    "
    rewards(tmp_path, calls + body)
    lines = [{"prompt": f"Say {letter}", "tags": []} for letter in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--model", model_folders["gpt2"], "--prompts", "prompts.jsonl", "--reward", "mine.py:reward"]
    flags += ["--batch-size", 8, "--group-size", 4, "--max-new-tokens", 8, "--eval-interval", 0]
    done = run(TRAIN, *flags, "--steps", 5, "--name", "a", "--trackers", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in said
    assert "the last checkpoint is good; go on with: python train_lean.py --resume runs/a" in said


# ------------------------------------------------------------------------------------- what is read


def test_bytes_that_are_no_utf8_are_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1") * 3)
    done = run(TRAIN, "--prompts", "latin.jsonl", "--reward", "policy", cwd=tmp_path)
    assert done.returncode == 2 and "no UTF-8: save the file in that encoding" in " ".join(
        done.stderr.split()
    )


def test_a_game_file_without_games_is_not_blamed_on_the_held_out_share(tmp_path):
    (tmp_path / "bad.pgn").write_text("this is no game\n")
    done = run(TRAIN, "--prompts", "bad.pgn", cwd=tmp_path)
    assert done.returncode == 2 and "--heldout-share" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "known", [{"a": 3}, {"a": []}, {"a": [[1, 2]]}, {"a": [["x", "y"]]}, {"a": [["x"]]}, [1]]
)
def test_traces_of_another_kind_are_made_again(tmp_path, known):
    (tmp_path / "traces.json").write_text(json.dumps(known))
    assert tracer._read(tmp_path / "traces.json") == {}


def test_a_small_slice_of_the_thousands_that_scripts_try(tmp_path):
    """See scripts/fuzz.py and scripts/benchmark_faults.py."""
    done = run("scripts/fuzz.py", "--cases", 16, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run("scripts/benchmark_faults.py", "--trials", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "SIGKILL at a moment" in done.stdout
