"""`python train_lean.py`, run as people type it: a few steps of a small model, in seconds."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import ROOT, Command, Ended, here, run
from prompt_lines import write_records
from rich.console import Console
from transformers import AutoModelForCausalLM
from whole_runs import metrics_of

from grpo.commands.train import main as train_command
from grpo.errors import UserError
from grpo.logs.tracking import read_lines
from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.run.folder import LOCK_FILE
from grpo.workbench.report import make_page

TRAIN = "train_lean.py"


SHORT_ANSWERS = """
def brevity(completions, **kwargs):
    return [-len(completion) / 100 for completion in completions]

def starts_with(completions, letter, **kwargs):
    return [float(c.startswith(wanted)) for c, wanted in zip(completions, letter)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("command")


@pytest.fixture(scope="module")
def small(model_folders) -> list[object]:
    """Flags of a small run; all others are the defaults."""
    return [
        "--model",
        model_folders["gpt2"],
        "--batch-size",
        8,
        "--group-size",
        4,
        "--max-new-tokens",
        8,
        "--precision",
        "fp32",
        "--eval-interval",
        2,
        "--eval-prompts",
        4,
    ]


@pytest.fixture(scope="module")
def own_task(folder) -> list[object]:
    """A person's own rewards and prompts; what the README's example does."""
    (folder / "my_rewards.py").write_text(SHORT_ANSWERS)
    lines = [{"prompt": f"Say {letter}:", "letter": letter} for letter in "abcdefghijklmnop" * 2]
    write_records(folder / "my_prompts.jsonl", lines)
    return [
        "--prompts",
        "my_prompts.jsonl",
        "--heldout-share",
        0.2,
        "--reward",
        "my_rewards.py:brevity",
        "my_rewards.py:starts_with",
        "--reward-weights",
        1,
        2,
    ]


@pytest.fixture(scope="module")
def own_run(folder, small, own_task) -> Ended:
    return run(TRAIN, *small, *own_task, "--steps", 2, "--name", "own", cwd=folder)


def test_a_run_of_own_rewards_and_prompts_shows_its_plan_before_and_what_it_measured_after(own_run, folder):
    assert own_run.returncode == 0 and own_run.stdout == "", own_run.stderr
    assert "runs/own" in own_run.stderr and "Traceback" not in own_run.stderr
    lines = metrics_of(folder / "runs/own")
    records = [line for line in lines if "reward" in line]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        brevity, starts = record["rewards/brevity/mean"], record["rewards/starts_with/mean"]
        assert record["reward"] == pytest.approx(brevity + 2 * starts)
    evaluated = [line for line in lines if "eval_reward" in line]
    assert [line["step"] for line in evaluated] == [0, 2]
    for each in evaluated:
        assert each["eval_reward/low"] <= each["eval_reward"] <= each["eval_reward/high"]
    completions = read_lines(folder / "runs/own/completions.jsonl")
    assert len(completions) == 16 and completions[0]["prompt"].startswith("Say ")
    assert all(row["rewards"]["brevity"] == -len(row["completion"]) / 100 for row in completions)
    assert len(re.findall(r"CPU memory - process: \d+\.\d\dGB, peak: \d+\.\d\dGB", own_run.stderr)) == 2
    before, after = own_run.stderr.split("step 1 -")
    assert "Memory planned; budget" in before and "rows at once" in before and "headroom" in before
    assert "Memory measured" in after and "measured ┃ off by ┃ process" in " ".join(after.split())
    assert "Memory measured" not in before and "Memory planned" not in after


def test_its_folder_holds_all_its_report_lacks_nothing_and_its_yaml_repeats_it(own_run, folder):
    run_folder = folder / "runs/own"
    assert {path.name for path in run_folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "completions.jsonl",
        "memory.jsonl",
        "log.txt",
        "starts.jsonl",
        "checkpoints",
        "model",
        "rewards",
        "tensorboard",
        LOCK_FILE,
    }
    assert list((run_folder / "tensorboard").glob("events.*"))
    checkpoint = run_folder / "checkpoints" / "step-000002"
    assert find_damage(checkpoint) is None and AutoModelForCausalLM.from_pretrained(checkpoint)
    assert re.findall("<h2>(.*?)</h2>", make_page([run_folder])) == [
        "Summary",
        "Held-out quality",
        "Reward",
        "Policy",
        "What it wrote",
        "All logged completions",
        "Time",
        "Memory",
        "Where it ran",
        "Settings",
    ]
    settings = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert settings["steps"] == 2 and settings["batch_size"] == 8 and settings["learning_rate"] == 1e-5
    again = run(TRAIN, "--config", "runs/own/config.yaml", "--name", "again", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert metrics_of(folder / "runs/again") == metrics_of(run_folder)
    one, other = (read_lines(folder / f"runs/{name}/completions.jsonl") for name in ("own", "again"))
    assert one == other


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_a_memory_limit_is_enforced_and_what_it_has_to_be_at_least_is_enough(small, own_task, folder):
    """By real plans: the smallest limit that the command names itself."""
    flags = [*small, *own_task, "--steps", 1, "--eval-interval", 0]
    tight = run(TRAIN, *flags, "--memory-limit", "100MB", "--name", "tight", cwd=folder, traced=True)
    assert tight.returncode == 2 and "Traceback" not in tight.stderr
    assert re.search(r"(sample|learn|score) does not fit: one\s+row\s+needs", tight.stderr)
    assert not (folder / "runs/tight").exists()
    least = re.search(r"--memory-limit has to be at least (0\.\d\d)GB\.", " ".join(tight.stderr.split()))[1]
    done = run(TRAIN, *flags, "--memory-limit", f"{least}GB", "--name", "enough", cwd=folder, traced=True)
    assert done.returncode == 0, done.stderr
    assert f"memory limit {least}GB: enforced by the system (RLIMIT_DATA)" in done.stderr
    assert f"budget {least} GB (--memory-limit)" in " ".join(done.stderr.split())
    assert "MemoryError" not in done.stderr and "out of memory" not in done.stderr


@pytest.fixture(scope="module")
def endless(small, data_file) -> list[object]:
    return [
        *small,
        "--steps",
        100_000,
        "--prompts",
        data_file,
        "--heldout-share",
        0.2,
        "--engine",
        "off",
        "--trackers",
    ]


def test_ctrl_c_and_sigterm_save_and_say_how_to_go_on_and_that_works(endless, folder):
    """The first by SIGTERM, as `kill` and cluster managers send it; it is gone on with, up to a Ctrl-C."""
    typed = [TRAIN, *endless, "--name", "stopped", "--checkpoint-interval", 0]
    checkpoints = CheckpointFolder(folder / "runs/stopped/checkpoints", keep=1)
    finished = 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        command = Command(*typed, cwd=folder)
        command.wait_for(f"step {finished + 2} -")
        command.interrupt(signum)
        ended = command.finish()
        assert ended.returncode == 130 and "Traceback" not in ended.stderr
        assert "stopping after this step" in ended.stderr
        assert f"step {finished + 1} -" in ended.stderr and f"step {finished} -" not in ended.stderr
        newest = checkpoints.all()[-1]
        step = int(newest.name.removeprefix("step-"))
        assert step >= finished + 2 and find_damage(newest) is None
        trained = [each["step"] for each in metrics_of(folder / "runs/stopped") if "reward" in each]
        assert trained == list(range(1, step + 1))
        (resume,) = re.findall(r"go on with: python (train_lean\.py .*)", ended.stderr)
        typed, finished = [*resume.split(), "--steps", 99_999], step
    settings = yaml.safe_load((folder / "runs/stopped/config.yaml").read_text())
    assert settings["resume"] is None and settings["steps"] == 99_999


SLOW = """
import sys, time
calls = []
def slow(completions, **kwargs):
    calls.append(0)
    if len(calls) == 3:
        print("asleep", flush=True, file=sys.stderr)
        time.sleep(300)
    return [float(len(c)) for c in completions]
"""


def test_ctrl_c_twice_stops_at_once_and_the_last_checkpoint_is_good(endless, folder):
    """A reward that takes minutes: the first Ctrl-C waits for it, the second does not."""
    (folder / "slow.py").write_text(SLOW)
    own = ["--name", "twice", "--checkpoint-interval", 1, "--eval-interval", 0, "--reward", "slow.py:slow"]
    command = Command(TRAIN, *endless, *own, cwd=folder)
    command.wait_for("asleep")
    command.interrupt()
    command.wait_for("stopping after this step")
    command.interrupt()
    ended = command.finish(timeout_s=60)
    assert ended.returncode == 130 and "stopped at once" in ended.stderr and "Traceback" not in ended.stderr
    assert CheckpointFolder(folder / "runs/twice/checkpoints", keep=1).newest_intact().state["step"] == 2


def test_two_processes_have_one_log_and_one_folder(small, own_task, folder):
    """As torchrun starts them, and what they leave is an ordinary run."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / TRAIN]
    typed = [sys.executable, *launch, *small, *own_task, "--steps", 2, "--engine", "off", "--name", "two"]
    done = subprocess.run(list(map(str, typed)), cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for line in ("step 1 - reward", "step 2 - reward", "done after 2 steps", "Memory planned"):
        assert done.stderr.count(line) == 1
    assert "process 1 has rows at once: sample 4, score 4, learn 4" in done.stderr
    run_folder = folder / "runs" / "two"
    checkpoint = run_folder / "checkpoints" / "step-000002"
    assert find_damage(checkpoint) is None and AutoModelForCausalLM.from_pretrained(checkpoint)
    assert [line["step"] for line in read_lines(run_folder / "metrics.jsonl") if "reward" in line] == [1, 2]
    own, others = (read_lines(run_folder / name) for name in ("memory.jsonl", "memory-process-1.jsonl"))
    assert [line["phase"] for line in own] == [line["phase"] for line in others]


def test_of_a_wrong_setting_the_first_process_speaks_and_the_second_keeps_silent(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert "batch_size is 60" in here("train", "--batch-size", 60).stderr
    monkeypatch.setenv("RANK", "1")
    done = here("train", "--batch-size", 60)
    assert done.returncode == 2 and not done.stdout + done.stderr


def test_a_fault_of_the_programs_own_is_told_as_one(config, monkeypatch):
    """With its traceback, in log.txt too, and exit status 1: nobody looks for it in what they typed."""

    def break_down(*_: object) -> None:
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr("grpo.trainer.group_advantages", break_down)
    assert train_command(replace(config, name="broken"), Console()) == 1
    text = (config.runs_dir / "broken" / "log.txt").read_text()
    assert "a fault of the program's own" in text and "Traceback" in text and "break_down" in text
    monkeypatch.setattr("grpo.trainer.group_advantages", lambda *_, **__: refuse())
    assert train_command(replace(config, name="refused"), Console()) == 2
    assert "Traceback" not in (config.runs_dir / "refused" / "log.txt").read_text()


def refuse() -> None:
    raise UserError("steps is 3: give more.")
