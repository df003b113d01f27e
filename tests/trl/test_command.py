"""`grpo-lean trl` runs what `trl grpo` runs: its file and its flags, and flags of memory."""

import json
import sys

import pytest
import trl
import yaml
from accelerate.commands import launch
from trl.scripts import grpo as script

from grpo.commands.trl import main, parse
from grpo.model.names import BUNDLED_FOLDER

REWARDS = "def brevity(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a dataset, a reward, and the file that says to train on them."""
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"P: 8/8/8/4k3/8/{i}K{7 - i}/4P3/8 w - - 0 1"} for i in range(1, 5)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards_of_a_person.py").write_text(REWARDS)
    settings = {
        "model_name_or_path": str(BUNDLED_FOLDER),
        "dataset_name": str(tmp_path / "data"),
        "reward_funcs": ["rewards_of_a_person.brevity"],
        "output_dir": "out",
        "report_to": "none",
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "memory_limit": "12GB",
        "skip_zero_variance": True,
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
    }
    (tmp_path / "grpo.yaml").write_text(yaml.dump(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def logged(folder, monkeypatch, run):
    """Returns the logs of a run's trainer at its steps."""
    trainers = []
    train = trl.GRPOTrainer.train

    def spy(self, *args, **kwargs):
        trainers.append(self)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(trl.GRPOTrainer, "train", spy)
    run()
    assert (folder / "out" / "model.safetensors").is_file()
    (trainer,) = trainers
    return trainer, [line for line in trainer.state.log_history if "reward" in line]


def test_the_file_is_run_as_trl_runs_it(folder, monkeypatch):
    words = parse(["--config", "grpo.yaml", "--memory-utilization", "0.5"])
    assert (
        words.ours == {"memory_utilization": 0.5, "memory_limit": 12 * 2**30, "skip_zero_variance": True}
        and not words.to_launch
    )
    ours, steps = logged(folder, monkeypatch, lambda: main(words))
    assert ours.fit.device.budget().usable_bytes <= 12 * 2**30
    stock, expected = logged(folder, monkeypatch, lambda: script.main(*words.parsed))
    assert trl.GRPOTrainer is type(stock) is not type(ours)
    of_memory = {
        f"{phase}_{name}" for phase in ("sample", "learn") for name in ("rows", "peak_gb", "retries")
    }
    assert len(steps) == len(expected) == 2
    assert {*steps[0]} == {*expected[0]} | {f"memory/{name}" for name in of_memory}
    assert [line["num_tokens"] for line in steps] == [line["num_tokens"] for line in expected]


def test_words_of_accelerate_start_processes_that_get_all_the_others(folder, monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "launch_command", launched.append)
    others = ["--config", "grpo.yaml", "--max_steps", "2", "--memory-limit", "3GB"]
    main(parse([*others[:2], "--multi_gpu", "--num_processes", "2", *others[2:]]))
    (arguments,) = launched
    assert arguments.multi_gpu and arguments.num_processes == 2 and arguments.module
    assert arguments.training_script == "grpo.commands.trl"
    assert arguments.training_script_args == ["--launched", *others]
    in_one = parse(arguments.training_script_args)
    assert not in_one.to_launch and in_one.ours["memory_limit"] == 3 * 2**30


def test_wrong_words_are_told(folder, capsys):
    with pytest.raises(ValueError, match="'3XB' is no size"):
        parse(["--config", "grpo.yaml", "--memory-limit", "3XB"])
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "--memory_limit" in shown and "--device_memory" in shown and "--reward_funcs" in shown
