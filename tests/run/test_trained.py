"""A model that is evaluated or plays is asked and computed as its run was."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo.config import CONFIG_FILE, Config, write_yaml
from grpo.data.kept_files import settings_of_run, with_prompts
from grpo.run.trained import TrainedModel


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run that has saved a model."""
    for name in ("model", "checkpoints/step-000050"):
        (tmp_path / "run" / name).mkdir(parents=True)
    config = Config(precision="fp32", trailing_space=True, max_new_tokens=37, heldout_share=0.25)
    write_yaml(config, tmp_path / "run" / CONFIG_FILE)
    return tmp_path / "run"


def test_a_run_keeps_its_settings_and_what_is_given_goes_before(run):
    trained = TrainedModel.of(str(run), "cpu")
    assert (trained.name, trained.step) == (str(run / "model"), "step-000050")
    settings = trained.settings
    assert (settings.precision, settings.trailing_space, settings.max_new_tokens) == ("fp32", True, 37)
    assert TrainedModel.of(str(run), "cpu", precision="bf16").settings == replace(settings, precision="bf16")


def test_another_model_has_the_defaults(run):
    trained = TrainedModel.of("rook-tiny", "cpu")
    assert trained.step == "" and trained.settings == Config(max_new_tokens=144)
    assert settings_of_run("rook-tiny") is None and settings_of_run(str(run / "model")) is None


def test_other_prompts_are_used_whole_and_the_runs_own_are_not(run, tmp_path, monkeypatch):
    own = settings_of_run(str(run))
    assert with_prompts(own, "bundled").heldout_share == 0.25
    assert with_prompts(own, "mine.jsonl").heldout_share == 1.0
    (tmp_path / "mine.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    of_file = replace(own, prompts="mine.jsonl")
    assert with_prompts(of_file, str(tmp_path / "mine.jsonl")).heldout_share == 0.25
