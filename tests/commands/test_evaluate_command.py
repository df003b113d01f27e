"""grpo-lean evaluate on a task of one's own: by the run's prompts and rewards, several side by side."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grpo.commands.evaluate import EvaluateConfig, show
from grpo.evaluate import Evaluation
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import read_lines
from grpo.trainer import Trainer

OWN_REWARD = """
def short(prompts, completions, limit, **columns):
    return [1 - min(len(text), most) / most for text, most in zip(completions, limit)]
"""


@pytest.fixture
def run_of_ones_own(config, tmp_path, made_up_plans) -> Path:
    """A short run on prompts and a reward of one's own."""
    (tmp_path / "mine.py").write_text(OWN_REWARD)
    rows = [json.dumps({"prompt": f"P: {letter}", "limit": 40}) for letter in "abcdefghijklmnopqrst"]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    settings = {
        "prompts": str(tmp_path / "mine.jsonl"), "reward": (f"{tmp_path}/mine.py:short",), "steps": 2,
    }  # fmt: skip
    with open_run(replace(config, **settings)) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    return run.folder


def test_runs_of_ones_own_task_are_evaluated_by_their_own_rewards(run_of_ones_own, model_folders, capsys):
    run, scores = str(run_of_ones_own), run_of_ones_own / "scores.json"
    show(EvaluateConfig((run,), json=scores))
    said = capsys.readouterr().out
    columns = {"reward", "rewards/short/mean"}
    assert Evaluation.load(scores).scores.keys() == columns | {f"sampled/{name}" for name in columns}
    assert "greedy" in said and "sampled" in said and "rewards/short/mean" in said
    show(EvaluateConfig((run,), before=scores, temperature=0.0))
    assert "+0.000" in capsys.readouterr().out  # compared with itself
    show(EvaluateConfig((str(model_folders["gpt2"]), run)))  # the model by what the run asks and judges
    said = capsys.readouterr().out
    assert said.count("rewards/short/mean") == 2 and "sampled" in said  # a table each
    for name in ("json", "before"):
        with pytest.raises(ValueError, match=f"--{name} is for one model, and 2 are named"):
            EvaluateConfig((run, run), **{name: scores})
    with pytest.raises(ValueError, match="which only rewards can score: give --reward"):
        mine = str(run_of_ones_own.parents[1] / "mine.jsonl")
        show(EvaluateConfig((str(model_folders["gpt2"]),), prompts=mine, heldout_share=1.0))


def test_a_run_that_was_made_in_python_says_what_it_lacks(config, made_up_plans, tmp_path):
    def short(completions, **columns):
        return [0.0] * len(completions)

    rows = [{"prompt": f"P: {letter}"} for letter in "abcdefgh"]
    trainer = Trainer(replace(config, steps=1, eval_interval=0), prompts=rows, rewards=[short])
    trainer.train()
    with pytest.raises(ValueError, match="was trained in Python, with reward short: give --reward"):
        EvaluateConfig((str(trainer.run.folder),))
    (tmp_path / "mine.py").write_text(OWN_REWARD)
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({**row, "limit": 9}) for row in rows))
    given = {"prompts": str(file), "reward": (f"{tmp_path}/mine.py:short",), "heldout_share": 1.0}
    show(EvaluateConfig((str(trainer.run.folder),), **given))


def test_in_training_each_reward_is_told_of_the_held_out_prompts(run_of_ones_own):
    evaluated = [line for line in read_lines(run_of_ones_own / "metrics.jsonl") if "eval_reward" in line]
    assert evaluated and all(line["eval_rewards/short/mean"] == line["eval_reward"] for line in evaluated)
