"""A disk that fails at any call a run makes in its folder: nothing earned is lost, and nothing is hidden."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import whole_runs
from commands import run
from disk_calls import Calls, calls_watched, disk_is_full
from safetensors.torch import load_file

from grpo.config import CONFIG_FILE, Config, SettingsError, parse_command_line, read_yaml, write_yaml
from grpo.logs.tracking import METRICS_FILE, RunTracker, read_lines
from grpo.run import folder as folder_module
from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")
PLACES = [0.01, 0.12, 0.25, 0.4, 0.5, 0.63, 0.75, 0.88, 0.97]
"""Calls of a run; one after another they fail once, and with all that follow."""


def train(config: Config, calls: Calls | None = None) -> str | None:
    """Returns the losses of a run at its end, as it says itself."""
    held: list[Trainer] = []
    with calls_watched(config.runs_dir, calls or Calls()):
        whole_runs.train(config, held.append)
        return held[0].run.checkpoints.verify(held[0].finished)


def weights(config: Config) -> torch.Tensor:
    """Returns the state of the run's last checkpoint, which is intact."""
    last = config.runs_dir / str(config.name) / f"checkpoints/step-{config.steps:06d}"
    assert find_damage(last) is None
    return torch.cat([tensor.flatten() for tensor in load_file(last / "model.safetensors").values()])


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_call_that_fails_is_said_and_the_run_goes_on_to_the_same_end(config, logged):
    """A failure that is not said has done no harm, as where a folder is made that is there already."""
    config = replace(config, name="straight", checkpoint_interval=1, eval_interval=2)
    calls = Calls()
    assert train(config, calls) is None
    expected, written, num_silent = weights(config), files(config.runs_dir / "straight"), 0
    for number, place in enumerate(PLACES):
        one = replace(config, name=f"fails at {place}")
        folder = one.runs_dir / str(one.name)
        logged.clear()
        try:
            lost = train(one, Calls(1 + int(place * calls.made), disk_is_full, on_and_on=number % 2 == 1))
        except (ValueError, OSError) as error:
            lost = str(error)
            logged.append(f"ERROR {error}")
        if not any(line.startswith(("WARNING", "ERROR")) and "No space left" in line for line in logged):
            assert lost is None and files(folder) == written
            num_silent += 1
        if lost is not None:
            begun = CheckpointFolder(folder / "checkpoints", keep=9).all()
            one = replace(one, resume=folder) if begun else replace(one, name=f"anew {place}")
            assert train(one) is None
        assert torch.equal(weights(one), expected)
    assert num_silent < len(PLACES) // 2


SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
from grpo.commands import call
sys.exit(call("train"))
"""


def test_a_last_model_that_is_not_on_the_disk_is_no_success(tmp_path, quick_flags):
    """Status 1, and it is said what is missing; one of a step before ends no run. Only logs fit."""
    (script := tmp_path / "train_on_a_full_disk.py").write_text(SMALL_FILES)
    flags = [*quick_flags, "--steps", 2, "--checkpoint-interval", 1, "--name", "a", "--trackers"]
    done = run(script, *flags, cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "the model of step 2 is not in runs/a: it could not be written; make room" in said
    assert "could not be written: the checkpoint of step 1, the checkpoint of step 2" in said
    assert "done after" not in said and "Traceback" not in said
    assert not any((tmp_path / "runs/a/checkpoints").iterdir())


def test_room_is_looked_for_before_the_first_step(config, monkeypatch, logged):
    """A checkpoint takes 6 MB: two stay, the best one, one is written; its model 1 MB, twice."""

    def check_with(free: int) -> None:
        usage.return_value.free = free
        folder_module.check_room(
            config, config.runs_dir, checkpoint_bytes=6 * 2**20, model_bytes=2**20, num_there=0
        )

    monkeypatch.setattr(folder_module.shutil, "disk_usage", usage := mock.Mock(**{"return_value.free": 1000}))
    with pytest.raises(SettingsError, match="free, where a checkpoint takes"):
        train(config)
    assert not (config.runs_dir / "test").exists()
    with pytest.raises(SettingsError, match=r"runs_dir is .* 5 MB free, where a checkpoint takes 6 MB"):
        check_with(5 * 2**20)
    logged.clear()
    check_with(13 * 2**20)
    check_with(26 * 2**20)
    (said,) = logged
    assert "will take up to 26 MB: make room, or lower --keep-checkpoints" in said


def test_settings_are_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / CONFIG_FILE
    write_yaml(Config(steps=3), file)
    before = file.read_text()
    with calls_watched(tmp_path, calls := Calls()):
        write_yaml(Config(steps=3), file)
    assert calls.made
    for at in range(1, calls.made + 1):
        with pytest.raises(OSError, match="No space"), calls_watched(tmp_path, Calls(at, disk_is_full)):
            write_yaml(Config(steps=4), file)
        assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


def test_settings_of_a_run_may_be_changed_or_cut_off_and_are_never_taken_for_others(config, logged):
    """Settings that a file lacks are as the checkpoint has them (a rate of 7e-5 once became the default,
    silently). Changes are said; older files have no mark of their end."""
    train(replace(config, steps=1, learning_rate=7e-5))
    file = config.runs_dir / "test" / CONFIG_FILE
    text, resume = file.read_text(), ["--resume", str(file.parent)]
    file.write_text("steps: 3\n")
    resumed = parse_command_line(resume)
    assert (resumed.steps, resumed.learning_rate, resumed.batch_size) == (3, 7e-5, 8)
    assert "lacks batch_size" in logged[-1]
    file.write_text("\n".join(text.splitlines()[1:-1]))
    assert parse_command_line(resume).kl_coef == 0.05
    file.write_text(text.replace("kl_coef: 0.05", "kl_coef: 0.5"))
    train(parse_command_line([*resume, "--steps", "2"]))
    assert any("kl_coef 0.05 -> 0.5" in line for line in logged)
    text, typed = file.read_text(), [*resume, "--steps", "3"]
    for share in (0.1, 0.5, 0.9, 0.999):
        file.write_text(text[: int(share * len(text))])
        with pytest.raises(SettingsError, match="was cut off: its last line, '# end', is missing"):
            read_yaml(file)
        resumed = parse_command_line(typed)
        assert resumed.learning_rate == 7e-5 and resumed.steps == 3
        assert "Its settings are taken from" in logged[-1]
    train(resumed)
    assert read_yaml(file)["learning_rate"] == 7e-5  # written again
    file.write_text(text[: len(text) // 2])
    for state in file.parent.glob("checkpoints/*/trainer.json"):
        state.unlink()
    with pytest.raises(SettingsError, match="No checkpoint has a copy: write it again"):
        parse_command_line(typed)


def test_whatever_is_in_a_log_a_resumed_run_goes_on(tmp_path, logged):
    """Binary data, no objects, a last line that a kill cut short: all of it with a warning."""
    file = tmp_path / METRICS_FILE
    for content, kept, words in (
        (None, [], "is gone: it begins anew after step 3"),
        (b'{"step": 1}\n\xff\xfe\x00\n', [1], "a broken line was left out"),
        (b'{"step": 1}\nnull\n[1]\n3\n', [1], "a broken line was left out"),
        (b'{"step": 1}\n{"step": 2}\n{"step": 3, "rew', [1, 2], "a broken line was left out"),
        (b'{"step": 1}\n\0\0\0\0', [1], "a broken line was left out"),
        (b'{"reward": 1}\n{"step": 1}\n', [1], ""),  # no step
    ):
        if content is not None:
            file.write_bytes(content)
        logged.clear()
        tracker = RunTracker(tmp_path, trackers=(), settings={}, before_step=3)
        tracker.log(4, {"reward": 1.0})
        tracker.close()
        assert [record["step"] for record in read_lines(file)] == [*kept, 4]
        assert len(file.read_bytes().splitlines()) == len(kept) + 1
        assert not words or any(str(file) in line and words in line for line in logged)
