"""A disk that fails at any call a run makes in its folder: nothing earned is lost, and nothing is hidden."""

import dataclasses
from pathlib import Path

import pytest
import torch
from benchmarks.disk_calls import Calls, calls_watched, disk_is_full
from commands import run
from rich.console import Console
from safetensors.torch import load_file

from grpo.config import CONFIG_FILE, Config, SettingsError, parse_command_line, read_yaml, write_yaml
from grpo.run import disk
from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, RunTracker, read_lines
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")
PLACES = [0.01, 0.12, 0.25, 0.4, 0.5, 0.63, 0.75, 0.88, 0.99]
"""Of a run's calls; one after another they fail once, and with all that follow."""


def train(config: Config, calls: Calls | None = None) -> str | None:
    """What is lost of a run at its end, as it says itself."""
    with calls_watched(config.runs_dir, calls or Calls()), open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        trainer.train(StopRequest())
        return run.checkpoints.damage(trainer.finished)


def weights(config: Config) -> torch.Tensor:
    file = config.runs_dir / str(config.name) / f"checkpoints/step-{config.steps:06d}/model.safetensors"
    return torch.cat([tensor.flatten() for tensor in load_file(file).values()])


@pytest.fixture
def straight(config: Config) -> tuple[Config, int, torch.Tensor]:
    """A run that nothing happens to: how many calls it makes in its folder, and its weights."""
    config = dataclasses.replace(config, steps=2, name="straight")
    calls = Calls()
    assert train(config, calls) is None
    return config, calls.made, weights(config)


@pytest.mark.parametrize("on_and_on", [False, True], ids=["once", "from there on"])
def test_a_call_that_fails_is_said_and_the_run_goes_on_to_the_same_end(straight, on_and_on):
    config, num_calls, expected = straight
    for place in PLACES[on_and_on::2]:
        one = dataclasses.replace(config, name=f"fails at {place}")
        folder = one.runs_dir / str(one.name)
        try:
            lost = train(one, Calls(1 + int(place * num_calls), disk_is_full, on_and_on))
        except (ValueError, OSError) as error:
            lost = str(error)
        if lost is None:
            assert find_damage(folder / "checkpoints/step-000002") is None
            assert torch.equal(weights(one), expected)
            continue
        if CheckpointFolder(folder / "checkpoints", keep=9).all():
            again = dataclasses.replace(one, resume=folder)
        else:
            again = dataclasses.replace(one, name=f"anew {place}")
        assert train(again) is None
        assert torch.equal(weights(again), expected)


def test_a_last_model_that_is_not_on_the_disk_is_no_success(tmp_path, quick_flags):
    """The command's status is 1 and says what is missing. Logs and settings fit, a model does not."""
    flags = [*quick_flags, "--steps", 2]
    done = run(_with_small_files(tmp_path), *flags, "--name", "a", "--trackers", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the model of step 2 is not in runs/a: it could not be written; make room" in done.stderr
    assert "could not be written: the checkpoint of step 2" in " ".join(done.stderr.split())
    assert "done after" not in done.stderr and "Traceback" not in done.stderr


def _with_small_files(folder: Path) -> Path:
    """train_lean.py where no file may grow beyond 60 kB: a tokenizer fits."""
    script = folder / "train_on_a_full_disk.py"
    script.write_text(
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "from grpo.commands.train import main\n"
        "sys.exit(main())\n"
    )
    return script


def test_room_is_looked_for_before_the_first_step(config, monkeypatch, logged):
    def disk_with(free: int) -> None:
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))

    disk_with(5 * 2**20)
    with pytest.raises(
        SettingsError, match=r"runs_dir is .* with 5 MB free, where a checkpoint takes 6 MB: make room"
    ):
        disk.check_room(config, config.runs_dir, 6 * 2**20, 0)
    with pytest.raises(SettingsError, match="free, where a checkpoint takes"):
        disk_with(1000)
        train(config)
    assert not (config.runs_dir / "test").exists()
    disk_with(13 * 2**20)
    disk.check_room(config, config.runs_dir, 6 * 2**20, 0)  # two stay, the best one, one is written
    assert "will take up to 24 MB: make room, or lower --keep-checkpoints" in logged[-1]
    num_said = len(logged)
    disk_with(24 * 2**20)
    disk.check_room(config, config.runs_dir, 6 * 2**20, 0)
    assert len(logged) == num_said


# ----------------------------------------------------------------------- settings, marks, lines


def test_settings_are_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / CONFIG_FILE
    write_yaml(Config(steps=3), file)
    before = file.read_text()
    calls = Calls()
    with calls_watched(tmp_path, calls):
        write_yaml(Config(steps=3), file)
    for at in range(1, calls.made + 1):
        with pytest.raises(OSError, match="No space"), calls_watched(tmp_path, Calls(at, disk_is_full)):
            write_yaml(Config(steps=4), file)
        assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_settings_that_were_cut_off_are_never_taken_for_others(config, logged, share):
    """A learning rate of 7e-5 became the default, silently."""
    config = dataclasses.replace(
        config, steps=1, optimizer=dataclasses.replace(config.optimizer, learning_rate=7e-5)
    )
    train(config)
    folder = config.runs_dir / "test"
    text = (folder / CONFIG_FILE).read_text()
    (folder / CONFIG_FILE).write_text(text[: int(share * len(text))])
    with pytest.raises(SettingsError, match="was cut off: its last line, '# end', is missing"):
        read_yaml(folder / CONFIG_FILE)
    resumed = parse_command_line(["--resume", str(folder), "--steps", "2"])
    assert resumed.optimizer.learning_rate == 7e-5 and resumed.steps == 2
    assert "Its settings are taken from" in logged[-1]
    train(resumed)
    (folder / CONFIG_FILE).write_text(text[: int(share * len(text))])
    for state in folder.glob("checkpoints/*/trainer.json"):
        state.unlink()
    with pytest.raises(SettingsError, match="No checkpoint has a copy: write it again"):
        parse_command_line(["--resume", str(folder)])


def test_settings_that_a_file_lacks_are_those_of_the_checkpoint(config, logged):
    train(dataclasses.replace(config, steps=1))
    folder = config.runs_dir / "test"
    (folder / CONFIG_FILE).write_text("steps: 3\n")
    resumed = parse_command_line(["--resume", str(folder)])
    assert (resumed.steps, resumed.loss.kl_coef, resumed.model) == (3, 0.05, config.model)
    assert "lacks batch_size" in logged[-1]


def test_settings_that_a_person_changed_are_said(config, logged):
    train(dataclasses.replace(config, steps=1))
    file = config.runs_dir / "test" / CONFIG_FILE
    file.write_text(file.read_text().replace("kl_coef: 0.05", "kl_coef: 0.5"))
    train(parse_command_line(["--resume", str(file.parent), "--steps", "2"]))
    assert any("kl_coef 0.05 -> 0.5" in line for line in logged)


def test_a_run_without_an_end_mark_is_one_of_before(config):
    train(dataclasses.replace(config, steps=1))
    file = config.runs_dir / "test" / CONFIG_FILE
    file.write_text("\n".join(file.read_text().splitlines()[1:-1]))
    assert parse_command_line(["--resume", str(file.parent)]).loss.kl_coef == 0.05


def test_the_best_mark_is_made_again_after_a_kill_in_between(config):
    train(config)
    folder = CheckpointFolder(config.runs_dir / "test/checkpoints", keep=9)
    best = folder.best
    if best is None:  # no evaluation was better than the first
        with open_run(dataclasses.replace(config, resume=config.runs_dir / "test", steps=5)) as run:
            trainer = Trainer(run, Console(quiet=True))
            trainer.save(best=True)
        best = folder.best
    assert best is not None
    for make in (lambda link: None, lambda link: link.symlink_to("step-000009")):
        (folder.folder / "best").unlink()
        make(folder.folder / "best")
        folder.mend()
        assert folder.best == best == (folder.folder / "best").resolve()


@pytest.mark.parametrize(
    ("content", "kept", "words"),
    [
        (b'{"step": 1}\n\xff\xfe\x00\n', 1, "a broken line was left out"),
        (b'{"step": 1}\nnull\n[1]\n3\n', 1, "a broken line was left out"),
        (b'{"reward": 1}\n{"step": 1}\n', 1, None),
        (None, 0, "is gone: it begins anew after step 3"),
    ],
    ids=["binary", "no objects", "no step", "deleted"],
)  # fmt: skip
def test_whatever_is_in_a_log_a_resumed_run_goes_on(tmp_path, logged, content, kept, words):
    file = tmp_path / METRICS_FILE
    if content is not None:
        file.write_bytes(content)
    tracker = RunTracker(tmp_path, trackers=(), settings={}, before_step=3)
    tracker.log(4, {"reward": 1.0})
    tracker.close()
    assert [record["step"] for record in read_lines(file)] == [1] * kept + [4]
    assert words is None or any(str(file) in line and words in line for line in logged)


def test_a_folder_in_the_place_of_a_log_is_named(tmp_path):
    (tmp_path / METRICS_FILE).mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be written \(Is a directory\): make room"):
        RunTracker(tmp_path, trackers=(), settings={}, before_step=3)
