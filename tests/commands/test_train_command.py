"""`python train_lean.py` as a person types it, on a model and prompts of seconds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import ROOT, Command, Ended, run
from transformers import AutoModelForCausalLM

from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.run.tracking import read_lines
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
        "--model", model_folders["gpt2"], "--batch-size", 8, "--group-size", 4, "--max-new-tokens", 8,
        "--precision", "fp32", "--eval-interval", 2, "--eval-prompts", 4,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def own_task(folder) -> list[object]:
    """A person's own rewards and prompts; what the README's example does."""
    (folder / "my_rewards.py").write_text(SHORT_ANSWERS)
    lines = [{"prompt": f"Say {letter}:", "letter": letter} for letter in "abcdefghijklmnop" * 2]
    (folder / "my_prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [
        "--prompts", "my_prompts.jsonl", "--heldout-share", 0.2,
        "--reward", "my_rewards.py:brevity", "my_rewards.py:starts_with", "--reward-weights", 1, 2,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def own_run(folder, small, own_task) -> Ended:
    return run(TRAIN, *small, *own_task, "--steps", 2, "--name", "own", cwd=folder)


def metrics(run_folder: Path) -> list[dict]:
    passing = ("timing/", "memory/", "step_time")
    return [
        {name: value for name, value in record.items() if not name.startswith(passing)}
        for record in read_lines(run_folder / "metrics.jsonl")
    ]


# ------------------------------------------------------------------------------- a run from end to end


def test_own_rewards_and_own_prompts(own_run, folder):
    assert own_run.returncode == 0, own_run.stderr
    assert own_run.stdout == ""
    assert "runs/own" in own_run.stderr and "Traceback" not in own_run.stderr
    records = [record for record in metrics(folder / "runs/own") if "reward" in record]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        brevity, starts = record["rewards/brevity/mean"], record["rewards/starts_with/mean"]
        assert record["reward"] == pytest.approx(brevity + 2 * starts)
    completions = read_lines(folder / "runs/own/completions.jsonl")
    assert len(completions) == 16 and completions[0]["prompt"].startswith("Say ")
    assert all(row["rewards"]["brevity"] == -len(row["completion"]) / 100 for row in completions)


def test_held_out_means_are_logged_with_their_intervals(own_run, folder):
    lines = [line for line in metrics(folder / "runs/own") if "eval_reward" in line]
    assert [line["step"] for line in lines] == [0, 2]
    assert all(line["eval_reward/low"] <= line["eval_reward"] <= line["eval_reward/high"] for line in lines)


def test_its_report_lacks_nothing(own_run, folder):
    page = make_page([folder / "runs/own"])
    assert [section.title for section in page.sections] == [
        "What it says", "Held-out quality", "Reward", "Policy", "What it wrote", "Time", "Memory", "Settings",
    ]  # fmt: skip


def test_every_step_shows_its_memory_at_info(own_run):
    pattern = r"CPU memory - allocated: \d+\.\d\dGB, peak: \d+\.\d\dGB"
    assert len(re.findall(pattern, own_run.stderr)) == 2


def test_the_run_folder_holds_what_it_should(own_run, folder):
    run_folder = folder / "runs/own"
    names = {
        "config.yaml",
        "metrics.jsonl",
        "completions.jsonl",
        "memory.jsonl",
        "checkpoints",
        "model",
        "rewards",
        "log.txt",
        "tensorboard",
    }
    assert {path.name for path in run_folder.iterdir()} == names
    assert list((run_folder / "tensorboard").glob("events.*"))
    checkpoint = run_folder / "checkpoints" / "step-000002"
    assert find_damage(checkpoint) is None
    assert AutoModelForCausalLM.from_pretrained(checkpoint)


def test_its_yaml_repeats_it(own_run, folder):
    settings = yaml.safe_load((folder / "runs/own/config.yaml").read_text())
    assert settings["steps"] == 2 and settings["batch_size"] == 8 and settings["learning_rate"] == 1e-5
    again = run(TRAIN, "--config", "runs/own/config.yaml", "--name", "again", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert metrics(folder / "runs/again") == metrics(folder / "runs/own")
    one, other = (read_lines(folder / f"runs/{name}/completions.jsonl") for name in ("own", "again"))
    assert one == other


def test_the_plan_is_shown_before_and_what_was_measured_after(own_run, folder):
    before, after = own_run.stderr.split("step 1 -")
    assert "Memory planned; budget" in before and "worst case" in before and "expected" in before
    assert "Memory measured" in after and "expected ┃ measured ┃ within" in " ".join(after.split())
    assert "Memory measured" not in before and "Memory planned" not in after
    lines = read_lines(folder / "runs/own/memory.jsonl")
    assert [(line["step"], line["phase"]) for line in lines] == [
        (step, phase) for step in (1, 2) for phase in ("sample", "score", "learn", "update")
    ]
    assert all(line["rows"] == 8 and line["retries"] == 0 for line in lines)


# -------------------------------------------------------------------------------------------- memory


def test_a_dry_run_for_a_card_that_is_not_there(small, data_file, folder):
    result = run(
        TRAIN, *small, "--prompts", data_file, "--dry-run", "--device-memory", "24GB", "--batch-size", "auto",
        "--max-batch-size", 40, "--name", "dry", cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "19.99 GB (85% of" in result.stderr and "40 rows of up to" in result.stderr
    assert not (folder / "runs/dry").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_a_memory_limit_is_enforced_and_enough_is_enough(small, own_run, own_task, folder):
    arguments = [*small, *own_task, "--steps", 1, "--eval-interval", 0]
    result = run(TRAIN, *arguments, "--memory-limit", "3GB", "--name", "limited", cwd=folder, traced=True)
    assert result.returncode == 0, result.stderr
    assert "memory limit 3GB: enforced by the system (RLIMIT_DATA)" in result.stderr
    assert "budget 3.00 GB (--memory-limit)" in " ".join(result.stderr.split())

    result = run(TRAIN, *arguments, "--memory-limit", "100MB", "--name", "tight", cwd=folder, traced=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "sample does not fit: one row needs" in result.stderr
    assert not (folder / "runs/tight").exists()
    named = re.search(r"--memory-limit has to be at least (0\.\d\dGB)\.", " ".join(result.stderr.split()))
    assert named is not None
    result = run(TRAIN, *arguments, "--memory-limit", named[1], "--name", "enough", cwd=folder, traced=True)
    assert result.returncode == 0, result.stderr
    assert "MemoryError" not in result.stderr and "out of memory" not in result.stderr


# ------------------------------------------------------------------------------------ wrong settings


def test_60_is_no_multiple_of_8(folder):
    """Before any model is looked for, and without a traceback. tests/test_config.py has all the others."""
    result = run(TRAIN, "--batch-size", 60, cwd=folder)
    assert result.returncode == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert "batch_size is 60" in said and "56 and 64" in said and "Traceback" not in said
    assert not (folder / "runs").exists() or not list((folder / "runs").glob("2*"))


# -------------------------------------------------------------------------------------- interruption


@pytest.fixture(scope="module")
def endless(small, data_file) -> list[object]:
    return [*small, "--steps", 100_000, "--prompts", data_file, "--heldout-share", 0.2, "--engine", "off",
            "--trackers"]  # fmt: skip


def test_ctrl_c_once_saves_and_says_how_to_go_on_and_that_works(endless, folder):
    arguments = [*endless, "--name", "stopped", "--checkpoint-interval", 0]
    command = Command(TRAIN, *arguments, cwd=folder)
    command.wait_for("step 3 -")
    command.interrupt()
    ended = command.finish()
    said = ended.stderr
    assert ended.returncode == 130 and "Traceback" not in said
    assert "stopping after this step" in said
    (checkpoint,) = CheckpointFolder(folder / "runs/stopped/checkpoints", keep=1).all()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 3 and find_damage(checkpoint) is None
    assert metrics(folder / "runs/stopped")[-1]["step"] == step

    (resume,) = re.findall(r"go on with: python (train_lean\.py .*)", said)
    resumed = run(*resume.split(), "--steps", step + 2, cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert f"step {step + 1} -" in resumed.stderr and f"step {step} -" not in resumed.stderr
    steps = [record["step"] for record in metrics(folder / "runs/stopped") if "reward" in record]
    assert steps == [*range(1, step + 3)]
    settings = yaml.safe_load((folder / "runs/stopped/config.yaml").read_text())
    assert settings["resume"] is None and settings["steps"] == step + 2


def test_ctrl_c_twice_stops_at_once_and_the_last_checkpoint_is_good(endless, folder):
    """A reward that takes minutes: the first Ctrl-C waits for it, the second does not."""
    (folder / "slow.py").write_text(
        "import time\ncalls = []\ndef slow(completions, **kwargs):\n    calls.append(0)\n"
        "    if len(calls) == 3:\n        print('asleep', flush=True, file=__import__('sys').stderr)\n"
        "        time.sleep(300)\n    return [float(len(c)) for c in completions]\n"
    )
    arguments = [*endless, "--name", "twice", "--checkpoint-interval", 1, "--eval-interval", 0]
    command = Command(TRAIN, *arguments, "--reward", "slow.py:slow", cwd=folder)
    command.wait_for("asleep")
    command.interrupt()
    command.wait_for("stopping after this step")
    command.interrupt()
    ended = command.finish(timeout_s=60)
    assert ended.returncode == 130 and "stopped at once" in ended.stderr
    assert "Traceback" not in ended.stderr
    checkpoints = CheckpointFolder(folder / "runs/twice/checkpoints", keep=1)
    assert checkpoints.newest_intact().state["step"] == 2


def test_two_processes_have_one_log_and_one_folder(small, own_run, own_task, folder):
    """As torchrun starts them, and what they leave is an ordinary run."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / TRAIN]
    typed = [*launch, *small, *own_task, "--steps", 2, "--engine", "off", "--name", "two"]
    done = subprocess.run(
        [sys.executable, *map(str, typed)], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for line in ("step 1 - reward", "step 2 - reward", "done after 2 steps", "Memory planned"):
        assert done.stderr.count(line) == 1
    assert "process 1 has rows at once: sample 4, score 4, learn 4" in done.stderr
    run_folder = folder / "runs" / "two"
    checkpoint = run_folder / "checkpoints" / "step-000002"
    assert find_damage(checkpoint) is None
    assert AutoModelForCausalLM.from_pretrained(checkpoint)
    steps = [line["step"] for line in read_lines(run_folder / "metrics.jsonl") if "reward" in line]
    assert steps == [1, 2]
    own, others = (read_lines(run_folder / name) for name in ("memory.jsonl", "memory-process-1.jsonl"))
    assert [line["phase"] for line in own] == [line["phase"] for line in others]


def test_a_wrong_setting_is_told_once_by_several_processes(folder):
    done = run(TRAIN, "--batch-size", 60, cwd=folder, RANK="1")
    assert done.returncode == 2 and not done.stderr
