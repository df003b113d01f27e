"""Checkpoints: what is in one, damage, full disks, kills in the middle, which ones stay."""

import errno
import json
import os
import shlex
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.groups import OptimizerSettings
from grpo.errors import UserError
from grpo.learning.optimizer import make_optimizer
from grpo.model.activation_checkpointing import recompute_activations
from grpo.run import checkpoint as checkpoint_module
from grpo.run.checkpoint import CheckpointFolder, find_damage
from grpo.run.folder import model_of, step_of
from grpo.run.inputs import Inputs
from grpo.run.setup import open_run
from grpo.run.training_state import restore_optimizer
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")
killed = mock.Mock(side_effect=KeyboardInterrupt)
forbid = mock.Mock(side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM)))


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
    return lambda folder, step, **more: folder.save(step, policy, optimizer, {"note": f"of {step}"}, **more)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def steps(folder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.all()]


def test_a_checkpoint_is_a_plain_hugging_face_folder(folder, save, policy, monkeypatch):
    path = save(folder, 3)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    # Computed as the policy is, by the same formula in one kernel, it is the policy bit for bit.
    model = AutoModelForCausalLM.from_pretrained(path, activation_function="gelu_pytorch_tanh").eval()
    recompute_activations(model)
    assert torch.equal(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    text = "P: 8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56 M: d4c5"
    assert AutoTokenizer.from_pretrained(path)(text)["input_ids"] == policy.tokenizer(text)["input_ids"]
    assert not list(path.glob("*.bin")) and not list(path.glob("*.pt"))  # no pickles
    monkeypatch.setattr(policy.tokenizer, "chat_template", {"default": "{{ a }}", "other": "{{ b }}"})
    path = save(folder, 4)
    assert find_damage(path) is None
    os.remove(path / "additional_chat_templates" / "other.jinja")
    assert "additional_chat_templates/other.jinja is missing" in find_damage(path)


def test_everything_comes_back_bit_for_bit_and_moments_by_name(folder, save, policy, optimizer):
    torch.manual_seed(5)
    save(folder, 3)
    drawn = torch.rand(4)
    saved = folder.newest_intact()
    assert saved.state == {"step": 3, "note": "of 3"}
    moments = {p: {k: v.clone() for k, v in entry.items()} for p, entry in optimizer.state.items()}
    bias = policy.model.transformer.ln_f.bias
    with saved.tensors() as tensors:
        assert torch.equal(tensors["transformer.ln_f.bias|exp_avg"], moments[bias]["exp_avg"])
        assert tensors["transformer.ln_f.bias|step"] == 1
        assert tensors.get("another") is None and len(tensors) == len([*tensors])
    for entry in optimizer.state.values():
        for value in entry.values():
            value.fill_(7)
    with saved.tensors() as tensors:
        restore_optimizer(policy.model, optimizer, tensors, saved.folder)
    for parameter, entry in moments.items():
        assert entry["exp_avg"].any()
        assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in entry.items())
    assert torch.equal(torch.rand(4), drawn)  # the random state, too
    other = torch.optim.Adamax(policy.model.parameters())
    other.step()  # by the gradients of before
    refused = pytest.raises(ValueError, match=r"has no exp_inf of .*--optimizer-kind")
    with saved.tensors() as tensors, refused:
        restore_optimizer(policy.model, other, tensors, saved.folder)


def test_whoever_is_stopped_is_told_what_there_is_to_go_on_from(folder, save):
    assert folder.how_to_go_on() == "no checkpoint was saved yet"
    folder.folder = folder.folder.parent / "my run's" / "checkpoints"
    save(folder, 3)
    words = shlex.split(folder.how_to_go_on().partition("go on with: ")[2])
    assert words == ["python", "train_lean.py", "--resume", str(folder.folder.parent)]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.generation_config, "temperature", 0.7),  # not saved without sampling
        lambda model: setattr(model.config, "mine", object()),
        lambda model: setattr(model.transformer.h[1].ln_1, "weight", model.transformer.h[0].ln_1.weight),
    ],
)
def test_what_cannot_be_saved_is_found_before_the_first_step(config, policy, change):
    change(policy.model)
    given = Inputs(policy.model, policy.tokenizer)
    with pytest.raises(ValueError, match="the model could not be saved in"), open_run(config, given):
        raise AssertionError
    assert not (config.runs_dir / "test").exists()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_is_recognised_and_the_one_before_used(folder, save, logged):
    save(folder, 3)
    for name, damage, reason in (
        ("model.safetensors", truncate, "bytes instead of"),
        ("model.safetensors", flip_a_byte, "does not have the content"),
        ("trainer.json", os.remove, "is missing"),
        ("manifest.json", truncate, "cannot be read"),
        ("manifest.json", os.remove, "cannot be read"),
        ("manifest.json", b"[]", "cannot be read"),
        ("manifest.json", b"{}", "names no weights"),
        ("manifest.json", b'{"config.json": 3}', "cannot be read"),
        ("manifest.json", b"\xff\xfe\x00", "cannot be read"),
    ):
        newest = save(folder, 4)  # made anew over its damaged self
        assert find_damage(newest) is None
        logged.clear()
        damage(newest / name) if callable(damage) else (newest / name).write_bytes(damage)
        assert reason in find_damage(newest)
        assert folder.newest_intact().state["note"] == "of 3"
        (warning,) = [line for line in logged if line.startswith("WARNING")]
        assert str(newest) in warning and name in warning and "the one before" in warning


def test_names_in_a_manifest_stay_in_the_folder(folder, save):
    final = save(folder, 3)
    shutil.copy(final / "model.safetensors", folder.folder / "outside.safetensors")
    manifest = json.loads((final / "manifest.json").read_text())
    for name in ("../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors"):
        outside = {**manifest, name: manifest["model.safetensors"]}
        (final / "manifest.json").write_text(json.dumps(outside))
        assert find_damage(final) == f"{name} is missing"


def test_a_damaged_one_that_was_passed_over_does_not_outlive_its_successors(tmp_path, save):
    """Else, of two kept, the newer by name would be the damaged one, for ever."""
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.newest_intact() is None
    save(folder, 3)
    truncate(save(CheckpointFolder(tmp_path, keep=9), 9) / "model.safetensors")
    assert folder.newest_intact().state["step"] == 3
    save(folder, 4)
    assert steps(folder) == [4] and folder.newest_intact().state["step"] == 4


def test_a_mistake_of_the_program_is_no_full_disk(folder, save, policy, monkeypatch):
    """A disk that fails at any call, and one that is full, are faults/test_disk.py's."""
    assert not issubclass(SafetensorError, OSError)
    monkeypatch.setattr(policy.model, "save_pretrained", mock.Mock(side_effect=RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="a mistake"):
        save(folder, 5)
    assert not list(folder.folder.iterdir())


@pytest.mark.parametrize("at", ["save_file", "_manifest", "_flush", "rename"])
def test_a_kill_while_saving_leaves_what_was_there(folder, save, monkeypatch, at):
    """The folder has its name only when all is in it, and what a kill left over is cleaned up."""
    save(folder, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os if at == "rename" else checkpoint_module, at, killed)
        save(folder, 4)
    assert set(os.listdir(folder.folder)) == {"step-000003", ".step-000004.tmp"}
    assert folder.newest_intact().state["step"] == 3
    save(folder, 5)
    assert set(os.listdir(folder.folder)) == {"step-000003", "step-000005"}


def test_all_is_on_the_disk_before_the_rename(folder, save, monkeypatch):
    flushed, renamed = [], []
    flush, rename = checkpoint_module._flush, os.rename
    monkeypatch.setattr(checkpoint_module, "_flush", lambda path: (flushed.append(path), flush(path)))
    monkeypatch.setattr(os, "rename", lambda *args: (renamed.append(len(flushed)), rename(*args)))
    path = save(folder, 3)
    before = flushed[: renamed[0]]
    assert {p.name for p in before} == {p.name for p in path.iterdir()} | {".step-000003.tmp"}
    assert flushed[renamed[0] :] == [folder.folder]  # and then the new name itself


@pytest.mark.parametrize("place", ["model", "checkpoints/step-000003"])
def test_a_kill_while_one_folder_takes_anothers_place_leaves_one_of_them(folder, save, monkeypatch, place):
    save(folder, 3)
    place = folder.folder.parent / place
    rename = os.rename
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", lambda old, new: killed() if str(new) == str(place) else rename(old, new))
        save(folder, 3)
    assert not place.exists()
    folder.repair()
    assert AutoModelForCausalLM.from_pretrained(place) and folder.newest_intact().state["step"] == 3
    shutil.copytree(place, place.with_name(f".{place.name}.aside"))  # as a kill afterwards leaves it
    folder.repair()
    assert not list(folder.folder.parent.rglob("*.aside")) and place.is_dir()


def test_the_last_ones_are_kept_and_the_best_one_besides(folder, save):
    assert folder.best is None
    save(folder, 1, best=True)
    for step in (2, 3, 4):
        save(folder, step)
    assert steps(folder) == [1, 3, 4] and folder.best.name == "step-000001"
    save(folder, 5, best=True)
    save(folder, 6)
    assert steps(folder) == [5, 6] and folder.best.name == "step-000005"
    link = folder.folder / "best"
    assert AutoModelForCausalLM.from_pretrained(link)
    for killed_before in (lambda: None, lambda: link.symlink_to("step-000009")):
        link.unlink()
        killed_before()
        folder.repair()
        assert folder.best == link.resolve() == folder.folder / "step-000005"
    shutil.rmtree(folder.best)
    assert folder.best is None
    for step in (9_999_999, 10_000_000):
        save(folder, step)
    assert steps(folder) == [9_999_999, 10_000_000]
    assert folder.newest_intact().state["step"] == 10_000_000  # by number, not by name


def test_who_writes_to_model_leaves_the_checkpoints_as_they_are(folder, save):
    """As `save_pretrained("runs/NAME/model")` does, or an editor."""
    final = save(folder, 3)
    for path in folder.model.rglob("*"):
        if path.is_file():
            path.write_bytes(b"another")
    assert find_damage(final) is None
    assert save(folder, 4) and AutoModelForCausalLM.from_pretrained(folder.model)


def test_a_checkpoint_that_cannot_be_read_just_now_is_kept(folder, save, monkeypatch):
    save(folder, 2)
    newest = save(folder, 3)
    with monkeypatch.context() as patch:
        broken = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # noqa: E731
        patch.setattr(checkpoint_module.hashlib, "file_digest", broken)
        with pytest.raises(UserError, match=r"step-000003 cannot be read .*nothing was changed"):
            folder.newest_intact()
        assert folder.verify(3) == "it cannot be read: [Errno 5] Input/output error"
    assert folder.newest_intact().folder == newest


def test_of_a_run_the_model_is_taken_that_everybody_loads(folder, save, tmp_path):
    """`model/`, else the newest checkpoint; the best one, if it is named."""
    assert model_of("rook-tiny") == "rook-tiny" and step_of("rook-tiny") == ""
    run = folder.folder.parent
    assert model_of(str(run)) == str(run)
    folder.folder.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="a run without a checkpoint"):
        model_of(str(run))
    save(folder, 2, best=True)
    save(folder, 3)
    assert model_of(str(run)) == str(run / "model") and step_of(str(run)) == "step-000003"
    shutil.rmtree(run / "model")
    assert model_of(str(run)) == str(folder.folder / "step-000003")
    assert model_of(str(folder.best)) == str(folder.folder / "step-000002")


def test_on_a_disk_without_links_and_modes_everything_is_saved(folder, save, policy, logged, monkeypatch):
    """As over a network; nor are folders flushed. At last, a model without a copy is in its checkpoint."""
    flush = checkpoint_module._flush
    monkeypatch.setattr(checkpoint_module, "_flush", lambda path: forbid() if path.is_dir() else flush(path))
    for place, name in ((os, "symlink"), (os, "chmod"), (checkpoint_module.Path, "chmod")):
        monkeypatch.setattr(place, name, forbid)
    for step in range(1, 5):
        assert save(folder, step, best=step == 1) is not None
    assert steps(folder) == [1, 3, 4] and folder.best == folder.folder / "step-000001"  # which stays
    assert find_damage(folder.folder / "step-000004") is None and folder.newest_intact().state["step"] == 4
    assert folder.to_use == folder.model
    weights = load_file(folder.model / "model.safetensors")
    assert torch.equal(weights["transformer.wte.weight"], policy.model.transformer.wte.weight)
    what = ("change modes", "flush folders", "hold links such as best")
    assert [sum(each in line for line in logged) for each in what] == [1, 1, 1] and len(logged) == 3
    monkeypatch.setattr(shutil, "copyfile", forbid)
    folder = CheckpointFolder(folder.folder.parent / "other/checkpoints", keep=2)
    final = save(folder, 3)
    assert folder.to_use == final and AutoModelForCausalLM.from_pretrained(folder.to_use)
    assert not folder.model.exists() and any("does not hold model/ as well" in line for line in logged)


def test_a_run_stays_in_its_folder_wherever_the_process_goes(config, tmp_path, monkeypatch):
    """As when code goes elsewhere between two steps; runs_dir is named from where the run began."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for _ in Trainer(replace(config, runs_dir="runs")):
        os.chdir(tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert find_damage(tmp_path / "runs/test/checkpoints/step-000002") is None
    assert (tmp_path / "runs/test/model").is_dir()
