"""What comes out of a run: a model that plain transformers loads, and that later runs and commands take."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import Trainer
from grpo.config.groups import LoraSettings
from grpo.model.load import load_policy
from grpo.model.names import base_of

CPU, TRAIN = torch.device("cpu"), "train_lean.py"
LORA = LoraSettings(lora_rank=2)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[5, 9, 2, 7]])).logits


def short(config, name: str, **changes) -> Trainer:
    trainer = Trainer(replace(config, steps=2, eval_interval=0, name=name, **changes))
    trainer.train()
    return trainer


@pytest.mark.usefixtures("made_up_plans")
@pytest.mark.parametrize("lora", [LoraSettings(), LORA], ids=["whole", "adapters"])
def test_the_model_to_use_is_what_the_last_step_left(config, lora):
    config = replace(config, model="rook-tiny", lora=lora)
    trainer = short(config, "a")
    folder = trainer.run.checkpoints.model
    assert folder == trainer.run.folder / "model"
    assert not [
        path for path in folder.iterdir() if path.name.startswith(("trainer.", "manifest", "reference"))
    ]
    umask = os.umask(0)
    os.umask(umask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o666 & ~umask}  # others may read it
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.allclose(logits(plain), logits(trainer.model), atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder)("P: 8").input_ids
    newest = trainer.run.checkpoints.all()[-1]
    for name in (trainer.run.folder, newest):  # a run, and a path into it, are names of models as well
        loaded = load_policy(str(name), CPU, "fp32").model
        assert torch.allclose(logits(loaded), logits(trainer.model), atol=1e-5)
        assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.usefixtures("made_up_plans")
def test_adapters_on_a_model_that_had_some_have_a_base_that_is_found(config):
    first = short(config, "a", lora=LORA)
    again = short(config, "b", lora=LORA, model=str(first.run.folder))
    model = again.run.checkpoints.model
    base = json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base) == again.run.folder / "base"
    merged, whole = (
        AutoModelForCausalLM.from_pretrained(each) for each in (first.run.checkpoints.model, base)
    )
    assert torch.allclose(logits(merged), logits(whole), atol=1e-5)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(model)), logits(again.model), atol=1e-5)
    on = short(config, "c", model=str(first.run.folder))  # all of it is trained
    assert not (on.run.folder / "base").exists()
    assert not torch.equal(logits(on.model), logits(merged))


@pytest.mark.usefixtures("made_up_plans")
def test_the_bundled_base_of_adapters_is_found_where_it_is_now(config, tmp_path):
    adapters = short(config, "a", lora=LORA, model="rook-tiny").run.checkpoints.model
    file = adapters / "adapter_config.json"
    written = json.loads(file.read_text())
    assert Path(written["base_model_name_or_path"]).is_dir()
    file.write_text(json.dumps({**written, "base_model_name_or_path": "/elsewhere/grpo/assets/rook-tiny"}))
    assert base_of(str(adapters)) == "rook-tiny"


REWARD = """
def f(completions, **columns):
    return [float(len(text) % 3) for text in completions]
"""


def test_a_run_goes_on_from_any_folder_and_tells_of_a_reward_that_has_changed(tmp_path, model_folders):
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"P: {letter}"}) for letter in "abcdefgh"]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    flags = [
        "--model",
        model_folders["gpt2"],
        "--prompts",
        "mine.jsonl",
        "--reward",
        "mine.py:f",
        "--name",
        "a",
    ]
    flags += ["--batch-size", 8, "--group-size", 4, "--max-new-tokens", 8, "--eval-interval", 0, "--trackers"]
    done = run(TRAIN, *flags, "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where = repr(str(Path("runs") / "a" / "model"))
    assert f"AutoModelForCausalLM.from_pretrained({where})" in done.stderr
    (tmp_path / "mine.py").write_text(REWARD + "\n# another\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(TRAIN, "--resume", tmp_path / "runs/a", "--steps", 2, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "reward 'f' is not what it was" in said and "mine.py differs from its copy" in said
    assert (tmp_path / "runs/a/rewards/f.py").read_text() == REWARD
    assert "reward 'f' is not what it was" in (tmp_path / "runs/a/log.txt").read_text()
