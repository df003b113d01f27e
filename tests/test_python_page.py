"""docs/python.md: every example runs as it stands; the trainer as a library."""

import re
from dataclasses import replace

import pytest
import torch
from commands import ROOT
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from grpo import Trainer
from grpo.model.cpu import SWITCH
from grpo.run.checkpoint import find_damage
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run

PAGE = (ROOT / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
LAST_LINES = {
    "run": r"2 0\.\d+ '.*'\nthe model is in \S+/runs/[\d-]+/model\n",
    "loss": r"gradient of \(4, 6\)\n",
    "fit": r"1024 rows at once\n",
    "leaks": r"LEAK in 40 steps\n(.*\n)+  held: 20 tensors .*\n",
}


@pytest.mark.usefixtures("made_up_plans", "frozen")
@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_examples_run_as_they_stand(name, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{name}.py", "exec"), {"__name__": "__main__"})
    assert re.search(LAST_LINES[name] + r"\Z", capsys.readouterr().out)


def test_every_example_has_its_test():
    assert {name for name, _ in EXAMPLES} == LAST_LINES.keys() and PAGE.count("```python") == len(EXAMPLES)


def test_all_that_is_named_is_there():
    assert all(getattr(grpo, name) for name in grpo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = grpo.Trainr


def short(completions, **columns):
    return [1 / (1 + len(text)) for text in completions]


ROWS = [{"prompt": f"P: {letter}", "n": 1} for letter in "abcdefghijklmnop"]


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@pytest.mark.usefixtures("made_up_plans")
def test_a_loaded_model_is_trained_itself_as_one_by_name_is(config, model_folders, monkeypatch):
    """The rest of the arguments in both ways: rows and a `Dataset`, the tokenizer given or found."""
    monkeypatch.setenv(SWITCH, "sums,slices")  # others exchange layers, but not a given model's
    folder = str(model_folders["llama"])
    config = replace(config, steps=2, model=folder)
    named = Trainer(replace(config, name="a"), prompts=Dataset.from_list(ROWS), rewards=[short])
    named.train()
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    given = Trainer(
        replace(config, name="b"), model=model, prompts=ROWS, rewards=[short],
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    given.train()
    assert given.model is model and torch.equal(weights(model), weights(named.model))
    assert not torch.allclose(weights(model), weights(before).float(), atol=1e-7)
    assert given.run.folder.joinpath("config.yaml").read_text().count("in-memory") == 1  # the prompts
    found = Trainer(replace(config, name="c"), model=before, prompts=ROWS, rewards=[short])
    assert next(iter(found)).completions  # its tokenizer is where the model was; bf16 weights become fp32
    assert before.dtype == torch.float32


@pytest.mark.usefixtures("made_up_plans")
def test_steps_are_given_one_by_one_and_whoever_stops_keeps_them(config):
    trainer = Trainer(replace(config, checkpoint_interval=0), prompts=ROWS, rewards=[short])
    for step in trainer:
        assert step.number == trainer.finished and len(step.completions) == config.num_rows
        assert step.metrics["reward"] == pytest.approx(step.rewards.mean().item())
        assert step.advantages.shape == step.rewards.shape
        if step.number == 2:
            break
    (saved,) = trainer.run.checkpoints.all()
    assert saved.name == "step-000002" and find_damage(saved) is None
    assert not (trainer.run.folder / "in-use").exists()  # the folder is free again
    resumed = replace(config, resume=trainer.run.folder)
    on = Trainer(resumed, prompts=ROWS, rewards=[short])
    assert [step.number for step in on] == [3, 4]


@pytest.mark.usefixtures("made_up_plans")
def test_a_loaded_model_goes_on_from_a_checkpoint(config, model_folders):
    folder = str(model_folders["gpt2"])
    config = replace(config, steps=2)
    first = Trainer(config, model=AutoModelForCausalLM.from_pretrained(folder), prompts=ROWS, rewards=[short])
    first.train()
    model = AutoModelForCausalLM.from_pretrained(folder)
    resumed = replace(config, resume=first.run.folder, steps=3)
    on = Trainer(resumed, model=model, prompts=ROWS, rewards=[short])
    assert torch.equal(weights(model), weights(first.model))
    assert [step.number for step in on] == [3] and on.model is model
    kept = on.run.reference.model()
    with kept as reference:  # what the model was before either
        assert torch.equal(weights(reference), weights(AutoModelForCausalLM.from_pretrained(folder)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model is a int: give a name, or a model of transformers'"),
        ({"prompts": []}, "no prompts to train on in the prompts given"),
        ({"prompts": [{"question": "?"}]}, "none of the columns `prompt`"),
        ({"rewards": [short, short]}, "two rewards are called 'short': rename one"),
        ({"rewards": [lambda completions, limit, **columns: []]}, "needs the column limit"),
    ],
)
def test_what_cannot_be_is_said(config, given, message):
    with pytest.raises(ValueError, match=message):
        Trainer(config, **{"prompts": ROWS, "rewards": [short], **given})


@pytest.mark.usefixtures("made_up_plans")
def test_the_command_uses_the_same(config):
    with open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        stop = StopRequest()
        stop.requested = True
        trainer.train(stop)
    assert trainer.interrupted and trainer.finished == 0
