"""A run that was stopped, killed or broken and resumed ends as one that was not (I5), bit for bit."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import CONTEXT
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen2Config
from whole_runs import BY_FIELD, assert_same_outcome, outcome, train

from grpo import phases
from grpo.learning.objectives import accumulate_grpo
from grpo.learning.step import GuardedOptimizer
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")

STEPS = 3
KNIGHTS = """
def knights(completions, **kwargs):  # often the same for a whole group
    return [float("n" in completion) for completion in completions]
"""
LORA = {"lora_rank": 4}
IN_4_BITS = {"lora_rank": 4, "lora_targets": ("all-linear",), "load_in_4bit": True}
FEATURES = {
    "plain": {},
    # everything that a step remembers of the steps before
    "rich": {
        "num_iterations": 2,
        "kl_target": 0.01,
        "refill_groups": 2,
        "importance_cap": 2.0,
        "lr_schedule": "cosine",
        "warmup_steps": 2,
        "learning_rate": 2e-3,
    },
    "credit by field": BY_FIELD,
    "bf16": {"precision": "bf16"},
    "adapters": LORA,
    "adapters on 4 bits": {**IN_4_BITS, "precision": "bf16"},
    "moments in 8 bits": {"optimizer_kind": "adamw8bit", "learning_rate": 1e-2},
    "a reference that follows": {"reference_sync": 1},
    "adapters that are followed": {"reference_sync": 2, **LORA},
    "sliding windows": {"model": "windows", "precision": "fp64", "rollout_rows": 4, "train_rows": 4},
}


@pytest.fixture(params=FEATURES)
def feature(request, config, tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(KNIGHTS)
    config = dataclasses.replace(
        config,
        steps=STEPS,
        reward=("policy", "environment", f"{tmp_path}/mine.py:knights"),
        eval_interval=2,
        learning_rate=2e-3,
        keep_checkpoints=9,
        checkpoint_interval=1,
    )
    changes = dict(FEATURES[request.param])
    if changes.get("model") == "windows":
        changes["model"] = str(tmp_path / "windows")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(windowed(len(tokenizer))).save_pretrained(tmp_path / "windows")
        tokenizer.save_pretrained(tmp_path / "windows")
    return dataclasses.replace(config, **changes)


def windowed(vocabulary: int) -> Qwen2Config:
    """Windows shorter than the prompts, in one layer of two."""
    return Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        sliding_window=12,
        use_sliding_window=True,
        max_window_layers=1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


CUTS = {
    "killed in step 3": {"die_in": 3},  # which is then done twice
    "asked after step 1": {"stop_after": 1},
    "asked before step 1": {"stop_after": 0},
    "broken in step 3": {"die_in": 3, "error": ZeroDivisionError},
}


def test_i5_an_interrupted_run_ends_as_one_that_was_not(feature, request):
    """Stopped politely after a step, or killed in the middle of one."""
    name = request.node.callspec.params["feature"]
    straight = outcome(train(dataclasses.replace(feature, name="straight")))
    assert [record["step"] for record in straight["metrics"] if "reward" in record] == [1, 2, 3]
    assert "eval_reward" in straight["metrics"][-1]
    for cut, how in itertools.islice(CUTS.items(), None if name in ("plain", "rich") else 1):
        config = dataclasses.replace(feature, name=cut, checkpoint_interval=2)
        folder = train(config, **how)
        steps = [path.name for path in sorted((folder / "checkpoints").glob("step-*"))]
        assert steps == [f"step-{how.get('stop_after', 2):06d}"]
        assert_same_outcome(straight, outcome(train(dataclasses.replace(config, resume=folder))))


def test_i5_rows_that_were_cut_down_before_the_cut_stay_so(config, monkeypatch):
    """Memory runs out in step 1. In fp32, where other rows give other sums."""
    config = dataclasses.replace(config, steps=STEPS, checkpoint_interval=1, keep_checkpoints=9)

    def short_of_memory(name: str, **how: int) -> Path:
        tries = []

        def runs_out(*given, **options):
            tries.append(options["rows"])
            if len(tries) <= 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return accumulate_grpo(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(phases, "accumulate_grpo", runs_out)
            folder = train(dataclasses.replace(config, name=name), **how)
        assert tries == [8, 8, *[4] * (len(tries) - 2)]
        return folder

    straight = outcome(short_of_memory("straight"))
    cut = short_of_memory("cut", stop_after=1)
    resumed = train(dataclasses.replace(config, name="cut", resume=cut))
    assert straight["state"]["memory"]["learn"] == (4, 4)
    assert_same_outcome(straight, outcome(resumed))
    rows = [line["rows"] for line in read_lines(resumed / MEMORY_FILE) if line["phase"] == "learn"]
    assert rows == [4] * STEPS
    enough = outcome(train(dataclasses.replace(config, name="enough")))["tensors"]
    assert not all(torch.equal(tensor, enough[name]) for name, tensor in straight["tensors"].items())


@pytest.mark.parametrize("feature", ["plain", "rich"], indirect=True)
def test_i5_is_no_accident(feature):
    """The same comparison tells runs of two seeds apart, the reward is no constant, groups are refilled."""
    one = outcome(train(dataclasses.replace(feature, name="one")))
    other = outcome(train(dataclasses.replace(feature, name="other", seed=1)))
    refilled = one["state"]["source"]["num_drawn"] > STEPS * feature.num_prompts
    assert refilled == (feature.refill_groups > 0)
    with pytest.raises(AssertionError):
        assert_same_outcome(one, other)
    assert len({record["reward"] for record in one["metrics"] if "reward" in record}) > 2
    assert all(math.isfinite(record["loss"]) for record in one["metrics"] if "loss" in record)


class AskedLate(StopRequest):
    """Somebody asks to stop after this has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", range(5))
def test_i5_whenever_somebody_asks_to_stop_what_is_finished_is_saved(config, looks):
    with open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        trainer.train(AskedLate(looks))
        assert run.checkpoints.newest_intact().state["step"] == trainer.saved == trainer.finished
        assert trainer.interrupted == (trainer.finished < 2)
        assert trainer.finished == max(0, min(2, looks - 1))


def test_i5_tokens_of_half_a_step_are_not_counted(config, monkeypatch):
    with open_run(dataclasses.replace(config, steps=3)) as run:
        trainer, calls = Trainer(run, Console(quiet=True)), itertools.count(1)
        accumulate = trainer.phases.accumulate

        def fails(*arguments, **options):
            if next(calls) == 3:
                raise ZeroDivisionError
            return accumulate(*arguments, **options)

        monkeypatch.setattr(trainer.phases, "accumulate", fails)
        with pytest.raises(ZeroDivisionError):
            trainer.train(StopRequest())
        saved = run.checkpoints.newest_intact().state
        last = [line for line in read_lines(run.folder / METRICS_FILE) if "num_tokens" in line][-1]
        assert saved["step"] == last["step"] == 2 and saved["num_tokens"] == last["num_tokens"] > 0


def test_i5_half_a_step_is_never_saved(config, monkeypatch):
    """An error between the two updates of step 3: its weights are neither step 2's nor step 3's."""
    config = dataclasses.replace(config, steps=3, num_iterations=2)
    calls = itertools.count(1)

    def step(self, accumulate):
        if next(calls) == 6:
            raise ZeroDivisionError
        return original(self, accumulate)

    original = GuardedOptimizer.step
    monkeypatch.setattr(GuardedOptimizer, "step", step)
    with open_run(config) as run, pytest.raises(ZeroDivisionError):
        Trainer(run, Console(quiet=True)).train(StopRequest())
    assert run.checkpoints.all() == []


def test_i5_the_best_so_far_is_remembered(config):
    """Else a resumed run would call its first evaluation the best, however bad."""
    config = dataclasses.replace(config, steps=3, eval_interval=1)
    folder = train(config, stop_after=2)
    best = max(r["eval_reward"] for r in read_lines(folder / METRICS_FILE) if "eval_reward" in r)
    with open_run(dataclasses.replace(config, resume=folder)) as run:
        trainer = Trainer(run, Console(quiet=True))
        assert trainer.best_reward == best
        trainer.best_reward = best + 1
        assert trainer.evaluate(3) is False and trainer.best_reward == best + 1
