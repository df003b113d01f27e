"""TRL's own tests of its trainer, with theirs and with ours in its place.

They need its tests/test_grpo_trainer.py, in a copy of its repository of the version that is installed, which
TRL_TESTS names; some ten minutes. Without, a file like it is made up.
"""

import os
from pathlib import Path

import pytest
from trl_own_tests import make_all, outcomes

TESTS = """
import datasets, pytest, transformers, trl

@pytest.mark.parametrize("name", ["Qwen2ForCausalLM-2.5", "LlamaForCausalLM-3.2"])
def test_train(tmp_path, name):
    data = datasets.load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train")
    assert data["prompt"][0] == "Beautiful is better than"
    trainer = trl.GRPOTrainer(
        model=f"trl-internal-testing/tiny-{name}", train_dataset=data,
        reward_funcs="trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5",
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=3, num_generations=3, max_steps=2,
            max_completion_length=8, report_to="none", use_cpu=True, bf16=False, learning_rate=0.1,
        ),
    )
    before = {name: each.clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    assert any((each != before[name]).any() for name, each in trainer.model.named_parameters())

def test_whose_it_is():
    assert trl.GRPOTrainer.__module__.startswith("trl.")
"""


def test_models_and_data_are_found_and_what_differs_is_named(tmp_path):
    file = tmp_path / "trl" / "tests" / "test_grpo_trainer.py"
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    stock, ours = both(file, tmp_path)
    assert [*stock.values()] == ["PASSED"] * 3, stock
    assert sorted(ours.values()) == ["FAILED", "PASSED", "PASSED"] and ours["test_whose_it_is"] == "FAILED"


@pytest.mark.skipif("TRL_TESTS" not in os.environ, reason="TRL_TESTS names no file")
def test_what_passes_with_theirs_passes_with_ours(tmp_path):
    stock, ours = both(Path(os.environ["TRL_TESTS"]).resolve(), tmp_path)
    changed = {name: (found, ours.get(name)) for name, found in stock.items() if found != ours.get(name)}
    print(f"{len(stock)} tests; logs are in {tmp_path}")
    assert stock and not changed


def both(file: Path, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Outcomes by test, with theirs and with ours."""
    make_all(folder)
    stock, ours = (outcomes(file, folder, ours=swapped) for swapped in (False, True))
    return stock, ours
