"""`grpo-lean trl --dry-run` says before training what the first steps are then measured to take."""

import json
import re
import sys
from statistics import median

import pytest
import torch
import yaml
from commands import here
from trl.scripts import grpo as script
from trl_own_tests import PUBLISHER, make_model

from grpo.commands.trl import main, parse
from grpo.memory import Fit, PassSize
from grpo.trl.dry_run import trace

pytestmark = pytest.mark.usefixtures("own_accelerator")
REWARDS = "def brevity(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
MODELS = {"llama": ("LlamaForCausalLM-3.2", "llama3_2"), "qwen2": ("Qwen2ForCausalLM-2.5", "qwen2_5")}
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a dataset and a reward."""
    (tmp_path / "data").mkdir()
    rows = [{"prompt": "ab" * (6 + number)} for number in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards_of_a_person.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write(folder, model="qwen2", **settings):
    """The file that says to train a tiny model with random weights."""
    name, template = MODELS[model]
    make_model(folder, name, template)
    known = {
        "model_name_or_path": f"{PUBLISHER}/tiny-{name}",
        "dataset_name": str(folder / "data"),
        "reward_funcs": ["rewards_of_a_person.brevity"],
        "output_dir": "out",
        "report_to": "none",
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 16,
        "max_steps": 3,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
    }
    (folder / "grpo.yaml").write_text(yaml.dump(known | settings))


@pytest.mark.parametrize(
    "model, settings",
    [
        ("llama", {"beta": 0.04, "bf16": True}),
        ("qwen2", {"gradient_checkpointing": False, "num_iterations": 2}),
    ],
)
def test_it_says_what_is_then_measured(folder, model, settings, monkeypatch):
    write(folder, model, **settings)
    words = parse(["--config", "grpo.yaml", "--dry-run"])
    traced = trace(script.main, words.parsed, words.ours, CPU)
    work, passes, take = traced.work, [], Fit.take_passes
    assert work.phases == ("sample", "score", "learn") and work.longest_prompt == 26 and work.rows_here == 32

    def spy(fit):
        taken = take(fit)
        passes.extend(taken)
        return taken

    monkeypatch.setattr(Fit, "take_passes", spy)
    main(parse(["--config", "grpo.yaml"]))
    longest = work.longest_prompt + work.config.max_new_tokens
    # Between the first group and all of them the sampler hands its cache over: that is no pass of a plan.
    found = [
        traced.added_bytes(one.phase, PassSize(one.rows, work.config.max_new_tokens, work.longest_prompt))
        / one.added_bytes
        - 1
        for one in passes
        if one.added_bytes and one.tokens == longest and (one.phase != "sample" or one.rows != 16)
    ]
    assert {one.phase for one in passes} == {*work.phases}
    assert len(found) >= 4 and median(map(abs, found)) < 0.02 and max(map(abs, found)) < 0.08, found


def test_the_command_prints_the_plan_and_leaves_nothing(folder):
    write(folder, use_peft=True, lora_target_modules=["q_proj", "v_proj"], beta=0.04)
    before = {*folder.iterdir()}
    ended = here("trl", "--config", "grpo.yaml", "--dry-run", "--device-memory", "24GB")
    assert ended.returncode == 0 and {*folder.iterdir()} == before
    assert "32 rows of up to 26 prompt and 16 new tokens, float32" in ended.stderr
    assert "budget 19.99 GB (85% of 23.52 GB)" in ended.stdout
    assert re.search(r"in GB +┃ +sample ┃ +score ┃ +learn", ended.stdout)
    assert re.search(r"rows at once +│ +32 │ +32 │ +32", ended.stdout)


def test_a_card_that_is_too_small_takes_fewer_rows_or_none(folder):
    write(folder, per_device_train_batch_size=64, max_completion_length=200)
    few = here("trl", "--config", "grpo.yaml", "--dry-run", "--device-memory", "1.5GB", "--use_cpu", "false")
    rows = [int(number) for number in re.search(r"rows at once(.*)", few.stdout)[1].split("│")[1:-1]]
    assert few.returncode == 0 and rows[0] == 64 and rows[1] % 8 == 0
    none = here("trl", "--config", "grpo.yaml", "--dry-run", "--device-memory", "625MB")
    assert none.returncode == 2 and "learn does not fit: one row needs" in " ".join(none.stderr.split())


def test_what_cannot_be_traced_is_told_in_one_line(folder, monkeypatch):
    write(folder)
    telling = "the first step will tell how many rows fit"
    command = "trl", "--config", "grpo.yaml", "--dry-run"

    def broken(*args, **kwargs):
        raise RuntimeError("what is this\nand more")

    with monkeypatch.context() as patched:
        patched.setattr("transformers.models.qwen2.modeling_qwen2.Qwen2Model.forward", broken)
        ended = here(*command)
    assert ended.returncode == 0 and not ended.stdout
    assert f"this model cannot be traced (what is this): {telling}" in ended.stderr
    ended = here(*command, "--load_in_4bit", "true")
    assert ended.returncode == 0 and f"cannot be traced (it is quantized): {telling}" in ended.stderr
    ended = here(*command, "--use_fsdp", "--num_processes", "2")
    assert ended.returncode == 0 and f"processes share the model: {telling}" in ended.stderr
    ended = here(*command, "--repetition_penalty", "1.1")
    assert ended.returncode == 0 and "generation with repetition_penalty" in ended.stderr
    assert "learn" in ended.stdout and "sample" not in ended.stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device-memory", "24GB"], "add --dry-run"),
        (["--dry-run", "--device-memory", "3XB"], "'3XB' is no size"),
        (["--dry-run", "--per_device_train_batch_size", "128"], "lower per_device_train_batch_size"),
        (["--dry-run", "--top_entropy_quantile", "0.5"], "set it to 1.0"),
    ],
)
def test_wrong_settings_are_refused(folder, words, message):
    write(folder)
    ended = here("trl", "--config", "grpo.yaml", *words)
    assert ended.returncode == 2 and message in " ".join(ended.stderr.split())
