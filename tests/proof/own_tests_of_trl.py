"""`benchmark_trl.py own-tests`, on a file like TRL's: its models and data are made up under their names."""

from commands import fresh

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
    done = fresh("scripts/benchmark_trl.py", "own-tests", "--file", file, cwd=tmp_path)
    said = done.stdout
    assert done.returncode == 1 and "theirs: 3 PASSED" in said, said + done.stderr
    assert "ours: 1 FAILED, 2 PASSED" in said and "PASSED -> FAILED: test_whose_it_is" in said, said
