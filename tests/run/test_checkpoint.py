import dataclasses
import errno
import json
import os
import resource
import shlex
import shutil

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.groups import OptimizerSettings
from grpo.learning.optimizer import make_optimizer
from grpo.model.cpu.feed_forward import slice_feed_forward
from grpo.run import checkpoint as checkpoint_module
from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.run.folder import checkpoint_of
from grpo.run.given import Given
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.training_state import restore_optimizer
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")


@pytest.fixture
def policy(load):
    return load("gpt2", "fp32")


@pytest.fixture
def optimizer(policy):
    """After one step, so that its moments are not all zero."""
    optimizer = make_optimizer(policy.model, OptimizerSettings(learning_rate=1e-3))
    policy.model(input_ids=torch.tensor([[5, 6, 7]])).logits.square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def save(policy, optimizer):
    """save(folder, 3): a checkpoint of step 3."""
    return lambda folder, step, **options: folder.save(
        step, policy.model, policy.tokenizer, optimizer, {"note": f"of {step}"}, **options
    )


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def steps(folder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.all()]


def contents(folder) -> set[str]:
    return {path.name for path in folder.folder.iterdir()}


# ------------------------------------------------------------------------------------ what is saved


def test_a_checkpoint_is_a_plain_hugging_face_folder(folder, save, policy):
    path = save(folder, 3)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    slice_feed_forward(model)  # and computed as the policy is, bit for bit
    assert torch.equal(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    text = "P: 8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56 M: d4c5"
    assert tokenizer(text)["input_ids"] == policy.tokenizer(text)["input_ids"]
    assert not list(path.glob("*.bin")) and not list(path.glob("*.pt"))  # no pickles


def test_everything_comes_back_bit_for_bit(folder, save, policy, optimizer):
    torch.manual_seed(5)
    save(folder, 3)
    drawn = torch.rand(4)
    checkpoint = folder.newest_intact()
    assert checkpoint.state == {"step": 3, "note": "of 3"}
    moments = {p: {k: v.clone() for k, v in entry.items()} for p, entry in optimizer.state.items()}
    assert any(entry["exp_avg"].any() for entry in moments.values())
    for entry in optimizer.state.values():
        for value in entry.values():
            value.fill_(7)
    restore_optimizer(policy.model, optimizer, checkpoint.tensors, checkpoint.folder)
    for parameter, entry in moments.items():
        assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in entry.items())
    assert torch.equal(torch.rand(4), drawn)  # the random state, too


def test_moments_belong_to_parameters_by_name(folder, save, policy, optimizer):
    save(folder, 3)
    tensors = folder.newest_intact().tensors
    bias = policy.model.transformer.ln_f.bias
    assert torch.equal(tensors["transformer.ln_f.bias|exp_avg"], optimizer.state[bias]["exp_avg"])
    assert tensors["transformer.ln_f.bias|step"] == 1


def test_another_optimizers_moments_are_refused_with_what_to_do(folder, save, policy):
    save(folder, 3)
    other = torch.optim.Adamax(policy.model.parameters())
    policy.model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    other.step()
    saved = folder.newest_intact()
    with pytest.raises(ValueError, match=r"has no exp_inf of .*--optimizer-kind .* saved with"):
        restore_optimizer(policy.model, other, saved.tensors, saved.folder)


def test_whoever_is_stopped_is_told_what_there_is_to_go_on_from(folder, save):
    assert folder.how_to_go_on() == "no checkpoint was saved yet"
    save(folder, 3)
    assert folder.how_to_go_on().endswith(f"python train_lean.py --resume {folder.folder.parent}")
    folder.folder = folder.folder.parent / "my run's" / "checkpoints"
    save(folder, 3)
    assert shlex.split(folder.how_to_go_on().partition("go on with: ")[2])[-1] == str(folder.folder.parent)


# ---------------------------------------------------------------------------------------- damage


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 7)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = [
    ("model.safetensors", truncate, "bytes instead of"),
    ("model.safetensors", flip_a_byte, "does not have the content"),
    ("model.safetensors", os.remove, "is missing"),
    ("trainer.safetensors", flip_a_byte, "does not have the content"),
    ("trainer.json", os.remove, "is missing"),
    ("trainer.json", truncate, "bytes instead of"),
    ("tokenizer.json", flip_a_byte, "does not have the content"),
    ("config.json", os.remove, "is missing"),
    ("manifest.json", cut_in_half, "cannot be read"),
    ("manifest.json", os.remove, "cannot be read"),
    ("manifest.json", lambda path: path.write_text("[]"), "cannot be read"),
    ("manifest.json", lambda path: path.write_text("{}"), "cannot be read: it names no weights"),
    ("manifest.json", lambda path: path.write_text('{"config.json": 3}'), "cannot be read"),
    ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
]


@pytest.mark.parametrize(
    ("name", "damage", "reason"), DAMAGES, ids=[f"{d[1].__name__} {d[0]}" for d in DAMAGES]
)
def test_damage_is_recognised_and_the_one_before_used(folder, save, logged, name, damage, reason):
    save(folder, 3)
    newest = save(folder, 4)
    assert find_damage(newest) is None
    damage(newest / name)
    assert reason in find_damage(newest)
    assert folder.newest_intact().state["note"] == "of 3"
    (warning,) = [line for line in logged if line.startswith("WARNING")]
    assert str(newest) in warning and name in warning and "the one before" in warning


def test_without_an_intact_checkpoint_there_is_none(folder, save):
    assert folder.newest_intact() is None
    os.remove(save(folder, 3) / "manifest.json")
    assert folder.newest_intact() is None


def test_a_damaged_one_that_was_passed_over_does_not_outlive_its_successors(tmp_path, save):
    """Else, of two kept, the newer by name would be the damaged one, for ever."""
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 3)
    truncate(save(CheckpointFolder(tmp_path, keep=9), 9) / "model.safetensors")
    assert folder.newest_intact().state["step"] == 3
    save(folder, 4)
    assert steps(folder) == [4]
    assert folder.newest_intact().state["step"] == 4


# --------------------------------------------------------------------------------- a disk that is full


def refuse(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", ["model", "tokenizer", "save_file", "_manifest", "_flush"])
def test_a_full_disk_is_a_warning_and_leaves_nothing_behind(folder, save, policy, monkeypatch, logged, at):
    save(folder, 3)
    if at in ("model", "tokenizer"):
        monkeypatch.setattr(getattr(policy, at), "save_pretrained", refuse)
    else:
        monkeypatch.setattr(checkpoint_module, at, refuse)
    assert save(folder, 4) is None
    assert contents(folder) == {"step-000003"}
    assert any("WARNING" in line and "No space left" in line and "goes on" in line for line in logged)
    monkeypatch.undo()
    assert save(folder, 4).name == "step-000004"  # there is room again


def test_the_errors_of_safetensors_count_as_well(folder, save, logged):
    """A real one: no file may grow beyond 20 kB, and safetensors' error is no OSError."""
    assert not issubclass(SafetensorError, OSError)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert save(folder, 4) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(folder) == set()
    assert any("could not be written" in line for line in logged)


def test_a_mistake_in_the_program_is_no_full_disk(folder, save, policy, monkeypatch):
    def wrong(*args, **kwargs):
        raise RuntimeError("Some tensors share memory")

    monkeypatch.setattr(policy.model, "save_pretrained", wrong)
    with pytest.raises(RuntimeError, match="share memory"):
        save(folder, 4)


def test_a_full_disk_does_not_end_the_run(config, monkeypatch, logged):
    monkeypatch.setattr(checkpoint_module, "save_file", refuse)
    with open_run(config) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
        assert contents(run.checkpoints) == set()
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [1, 2, 3, 4]
    assert sum("could not be written" in line for line in logged) == 4


def test_resuming_passes_over_a_damaged_checkpoint_and_makes_it_anew(config, logged):
    with open_run(config) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    straight = load_file(run.folder / "checkpoints/step-000004/model.safetensors")
    flip_a_byte(run.folder / "checkpoints/step-000004/trainer.safetensors")
    with open_run(dataclasses.replace(config, resume=run.folder)) as run:
        trainer = Trainer(run, Console(quiet=True))
        assert trainer.finished == 3
        trainer.train(StopRequest())
    assert any("is damaged" in line for line in logged)
    assert find_damage(run.folder / "checkpoints/step-000004") is None
    again = load_file(run.folder / "checkpoints/step-000004/model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in straight.items())


# ---------------------------------------------------------------------------------------- accidents


def test_a_kill_while_saving_leaves_what_was_there(folder, save, monkeypatch):
    """The folder has its name only when all is in it, and what a kill left over is cleaned up."""
    save(folder, 3)

    def killed(*args):
        raise KeyboardInterrupt

    for at in ("save_file", "_manifest", "_flush"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoint_module, at, killed)
            save(folder, 4)
        assert contents(folder) == {"step-000003", ".step-000004.tmp"}
        assert folder.newest_intact().state["step"] == 3
    save(folder, 5)
    assert contents(folder) == {"step-000003", "step-000005"}


def test_a_kill_just_before_the_rename_leaves_no_checkpoint_of_that_step(folder, save, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        save(folder, 4)
    assert folder.all() == [] and folder.newest_intact() is None
    assert save(folder, 4) and steps(folder) == [4]


def test_all_is_on_the_disk_before_the_rename(folder, save, monkeypatch):
    flushed, renamed = [], []
    flush = checkpoint_module._flush
    monkeypatch.setattr(checkpoint_module, "_flush", lambda path: (flushed.append(path), flush(path)))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *args: (renamed.append(len(flushed)), rename(*args)))
    path = save(folder, 3)
    before = flushed[: renamed[0]]
    assert {p.name for p in before} == {p.name for p in path.iterdir()} | {".step-000003.tmp"}
    assert flushed[renamed[0] :] == [folder.folder]  # and then the new name itself


def test_a_step_is_saved_over_its_damaged_self(folder, save):
    truncate(save(folder, 3) / "config.json")
    assert find_damage(save(folder, 3)) is None


def test_files_in_folders_of_a_tokenizer_are_in_the_manifest(folder, save, policy, monkeypatch):
    """Tokenizers with several chat templates write a folder."""
    original = policy.tokenizer.save_pretrained

    def with_folder(path):
        original(path)
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "a.jinja").write_text("{{ messages }}")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", with_folder)
    path = save(folder, 3)
    assert find_damage(path) is None
    os.remove(path / "additional_chat_templates" / "a.jinja")
    assert "additional_chat_templates/a.jinja is missing" in find_damage(path)


# ------------------------------------------------------------------------------------------ pruning


def test_the_last_ones_are_kept(folder, save):
    for step in (1, 2, 3, 4):
        save(folder, step)
    assert steps(folder) == [3, 4]


def test_the_best_one_is_kept_besides(folder, save):
    assert folder.best is None
    save(folder, 1, best=True)
    for step in (2, 3, 4):
        save(folder, step)
    assert steps(folder) == [1, 3, 4] and folder.best.name == "step-000001"
    save(folder, 5, best=True)
    save(folder, 6)
    assert steps(folder) == [5, 6] and folder.best.name == "step-000005"
    assert AutoModelForCausalLM.from_pretrained(folder.folder / "best")


def test_a_best_one_that_is_gone_is_none(folder, save):
    shutil.rmtree(save(folder, 1, best=True))
    assert folder.best is None
    save(folder, 2)
    assert steps(folder) == [2]


def test_step_10_000_000_is_newer_than_step_9_999_999(folder, save):
    save(folder, 9_999_999)
    save(folder, 10_000_000)
    assert steps(folder) == [9_999_999, 10_000_000]
    assert folder.newest_intact().state["step"] == 10_000_000


def test_of_a_run_the_best_checkpoint_is_taken(tmp_path):
    assert checkpoint_of("rook-tiny") == "rook-tiny" and checkpoint_of(str(tmp_path)) == str(tmp_path)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with pytest.raises(ValueError, match="a run without a checkpoint"):
        checkpoint_of(str(tmp_path))
    (folder / "step-000002").mkdir()
    (folder / "best").symlink_to("step-000002")
    assert checkpoint_of(str(tmp_path)) == str(folder / "step-000002")


# ------------------------------------------------------------------------- disks that can do less


def forbid(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture
def plain_disk(monkeypatch):
    """As over a network or in a notebook's drive: no links, no modes, and folders cannot be flushed."""
    flush = checkpoint_module._flush
    monkeypatch.setattr(checkpoint_module, "_flush", lambda path: forbid() if path.is_dir() else flush(path))
    for place, name in ((os, "link"), (os, "symlink"), (os, "chmod"), (checkpoint_module.Path, "chmod")):
        monkeypatch.setattr(place, name, forbid)


@pytest.mark.usefixtures("plain_disk")
def test_on_a_disk_without_links_and_modes_everything_is_saved(folder, save, policy, logged):
    for step in range(1, 5):
        assert save(folder, step, best=step == 1) is not None
    assert steps(folder) == [1, 3, 4] and folder.best == folder.folder / "step-000001"  # which stays
    assert find_damage(folder.folder / "step-000004") is None and folder.newest_intact().state["step"] == 4
    assert folder.to_use == folder.model
    weights = load_file(folder.model / "model.safetensors")
    assert torch.equal(weights["transformer.wte.weight"], policy.model.transformer.wte.weight)
    what = ("change modes", "flush folders", "hold links such as best")
    assert [sum(each in line for line in logged) for each in what] == [1, 1, 1] and len(logged) == 3


def test_a_model_that_cannot_be_put_beside_its_checkpoint_is_found_in_it(folder, save, monkeypatch, logged):
    monkeypatch.setattr(os, "link", forbid)
    monkeypatch.setattr(shutil, "copyfile", forbid)
    final = save(folder, 3)
    assert folder.to_use == final and AutoModelForCausalLM.from_pretrained(folder.to_use)
    assert not folder.model.exists() and any("does not hold model/ as well" in line for line in logged)


@pytest.mark.parametrize("place", ["model", "checkpoints/step-000003"])
def test_a_kill_while_one_folder_takes_anothers_place_leaves_one_of_them(folder, save, monkeypatch, place):
    save(folder, 3)
    place = folder.folder.parent / place
    rename = os.rename

    def killed(old, new):
        if str(new) == str(place):
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 3)
    monkeypatch.undo()
    assert not place.exists()
    folder.mend()
    assert AutoModelForCausalLM.from_pretrained(place) and folder.newest_intact().state["step"] == 3
    shutil.copytree(place, place.with_name(f".{place.name}.aside"))  # as a kill afterwards leaves it
    folder.mend()
    assert not list(folder.folder.parent.rglob("*.aside")) and place.is_dir()


def unwritable_generation(model) -> None:
    model.generation_config.temperature = 0.7  # which transformers does not save without sampling


def unwritable_config(model) -> None:
    model.config.mine = object()


def unknown_tie(model) -> None:
    model.transformer.h[1].ln_1.weight = model.transformer.h[0].ln_1.weight


@pytest.mark.parametrize("change", [unwritable_generation, unwritable_config, unknown_tie])
def test_what_cannot_be_saved_is_found_before_the_first_step(config, policy, change):
    change(policy.model)
    given = Given(policy.model, policy.tokenizer)
    said = pytest.raises(ValueError, match=r"the model could not be saved in .*test when it is trained: ")
    with said, open_run(config, given):
        pass
    assert not (config.runs_dir / "test").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors"])
def test_names_in_a_manifest_stay_in_the_folder(folder, save, name):
    final = save(folder, 3)
    shutil.copy(final / "model.safetensors", folder.folder / "outside.safetensors")
    manifest = json.loads((final / "manifest.json").read_text())
    manifest[name] = manifest["model.safetensors"]
    (final / "manifest.json").write_text(json.dumps(manifest))
    assert "which is outside the folder" in find_damage(final)


def test_a_run_stays_in_its_folder_wherever_the_process_goes(config, tmp_path, monkeypatch):
    """As when code goes elsewhere between two steps; runs_dir is named from where the run began."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    config = dataclasses.replace(config, runs_dir="runs", steps=2)
    for _ in Trainer(config):
        os.chdir(tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert find_damage(tmp_path / "runs/test/checkpoints/step-000002") is None
    assert (tmp_path / "runs/test/model").is_dir()
