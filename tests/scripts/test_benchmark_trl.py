"""scripts/benchmark_trl.py at its smallest: one run of ours, and TRL's own tests made to run."""

import json

import pytest
from benchmarks.trl_own_tests import OUTCOME, make_dataset, make_model
from benchmarks.trl_runs import Run, perform
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.usefixtures("own_accelerator")


def test_a_run_tells_its_steps(capsys):
    perform(Run("ours", batch=8, tokens=2, steps=1))
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"step')]
    assert told["step_s"] > 0 and told["peak_mb"] > 100 and told["rows"] == 8


def test_models_and_data_of_trls_own_tests_are_found_by_their_names(tmp_path, monkeypatch):
    make_dataset(tmp_path)
    make_model(tmp_path, "Qwen2ForCausalLM-2.5", "qwen2_5")
    monkeypatch.chdir(tmp_path)
    rows = load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train")
    assert rows["prompt"][0] == "Beautiful is better than" and len(rows) == 17
    tokenizer = AutoTokenizer.from_pretrained("trl-internal-testing/tiny-Qwen2ForCausalLM-2.5")
    assert tokenizer.decode(tokenizer("Now is better")["input_ids"]) == "Now is better"
    AutoModelForCausalLM.from_pretrained("trl-internal-testing/tiny-Qwen2ForCausalLM-2.5")


def test_outcomes_are_read_from_what_pytest_says():
    said = "PASSED a.py::T::test_one[x]\nFAILED a.py::T::test_two - Error: no\nSKIPPED [1] a.py:3: no hub\n"
    assert OUTCOME.findall(said)[:2] == [("PASSED", "a.py::T::test_one[x]"), ("FAILED", "a.py::T::test_two")]
