"""Checkpoints: whole or not there, and enough to go on bit for bit.

A checkpoint is a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads, with
`trainer.safetensors` (optimizer moments by parameter name, random state), `trainer.json`
(everything else) and `manifest.json` (size and SHA-256 of each file) beside the weights; one of
adapters is a folder that peft loads on the base model. It is written to a temporary folder, flushed
to disk, and renamed.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from grpo.environment import command_hint
from grpo.errors import UserError
from grpo.files import replace_folder, restore_interrupted_replace, shown
from grpo.learning.masters import LOW_BITS, master_bytes
from grpo.logs.model_card import write_card
from grpo.model.adapters import MERGED, has_adapters, save_adapters, save_merged
from grpo.model.load import Policy
from grpo.model.names import MODEL_FOLDER
from grpo.run.training_state import Snapshot, take_snapshot

_MANIFEST = "manifest.json"
_STATE = "trainer.json"
_TENSORS = "trainer.safetensors"
_REFERENCE = "reference.safetensors"
_BEST = "best"
_CARD = "README.md"
"""The card of the model to use; peft writes one of its own into a checkpoint."""
ONLY_TO_TRAIN = (_MANIFEST, _STATE, _TENSORS, _REFERENCE)
"""Files of a checkpoint that are no part of its model."""
_OTHER_FILES_BYTES = 4 * 2**20
"""Bytes of tokenizer, settings and logs, about."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: its folder, and the trainer's state as JSON."""

    folder: Path
    state: dict[str, Any]

    @contextmanager
    def tensors(self) -> Iterator[Mapping[str, Tensor]]:
        """Moments and random state, each read when it is asked for: together they may not fit."""
        with safe_open(self.folder / _TENSORS, framework="pt") as file:
            yield StoredTensors(file)

    def reference(self) -> dict[str, Tensor]:
        """Returns the reference's tensors; none if it was as at first."""
        file = self.folder / _REFERENCE
        return load_file(file) if file.is_file() else {}


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of an open file of safetensors', by name."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._file.keys():  # noqa: SIM118  # no dictionary
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


class CheckpointFolder:
    """The checkpoints of a run, `step-000100` and so on; the last `keep` stay, and the best one.

    merge: write models with adapters as a whole, too.
    """

    def __init__(self, folder: Path, *, keep: int, merge: bool = False) -> None:
        self.folder = folder
        self.model = folder.parent / MODEL_FOLDER
        """The model of the newest checkpoint, without what only training needs."""
        self.to_use: Path | None = None
        """The place where a person finds the model that was saved last: that folder, or a checkpoint."""
        self.unwritten: list[int] = []
        """Steps whose checkpoint could not be written."""
        self._keep, self._merge = keep, merge
        self._refused: set[str] = set()

    def save(
        self,
        step: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        reference: Mapping[str, Tensor] | None = None,
        best: bool = False,
        snapshot: Snapshot | None = None,
    ) -> Path | None:
        """Write the checkpoint of `step`. A full disk is a warning and None, not the end of a run.

        reference: what the reference has become, if it is not as at first. snapshot: taken beforehand, as
        of a sharded model it has to be, by all processes.
        """
        final = self._of_step(step)  # perhaps one is there, of before a resume
        state = {"step": step, **state} | ({"best": True} if best else {})
        for left_over in self.folder.glob(".step-*.tmp"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            with self._replacing(final) as folder:
                weights, tensors = snapshot or take_snapshot(policy.model, optimizer)
                _save_model(policy, folder, weights)
                if self._merge and has_adapters(policy.model):
                    with policy.as_it_came():
                        save_merged(policy.model, folder / MERGED)
                    policy.tokenizer.save_pretrained(folder / MERGED)
                save_file(tensors, folder / _TENSORS)
                if reference:
                    save_file(dict(reference), folder / _REFERENCE)
                (folder / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
                (folder / _MANIFEST).write_text(json.dumps(_manifest(folder), indent=1), encoding="utf-8")
        except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
            logger.warning("checkpoint of step {} could not be written ({}); training goes on", step, error)
            self.unwritten.append(step)
            return None
        with self._optional("flush folders"):
            _flush(self.folder)
        if best:
            self._mark_best(final)
        self.to_use = final
        with self._optional(f"hold {MODEL_FOLDER}/ as well"):
            try:
                self._publish(final)
                self.to_use = self.model
            except OSError:
                shutil.rmtree(self.model, ignore_errors=True)  # nobody is to take an earlier step's for it
                raise
        self._prune(final)
        return final

    def check_saveable(self, policy: Policy) -> None:
        """ValueError for what would stand in the way of saving: tried with a number for each tensor."""
        trial = self.folder / ".trial"
        numerics: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights have one
        tensors = {} if has_adapters(policy.model) else policy.model.state_dict()
        weights = {
            name: numerics.setdefault((tensor.data_ptr(), tensor.shape), torch.zeros(1))
            for name, tensor in tensors.items()
        }
        try:
            with self._replacing(trial) as folder:
                _save_model(policy, folder, weights, save_original_format=False)
        except Exception as error:  # of whoever takes part: transformers, peft, a tokenizer, the disk
            raise UserError(
                f"the model could not be saved in {shown(self.folder.parent)} when it is trained: "
                f"{' '.join(str(error).split())}"
            ) from error
        finally:
            shutil.rmtree(trial, ignore_errors=True)
            with suppress(OSError):  # a resumed run has checkpoints in it
                self.folder.rmdir()

    def how_to_go_on(self) -> str:
        """For somebody whose run has just ended before its end."""
        if not self.all():
            return "no checkpoint was saved yet"
        run = shlex.quote(str(shown(self.folder.parent)))
        return f"the last checkpoint is good; go on with: {command_hint('train')} --resume {run}"

    def verify(self, step: int) -> str | None:
        """Why the checkpoint of `step` is not on the disk as it should be, read back from there; or None."""
        folder = self._of_step(step)
        try:
            return find_damage(folder) if folder.is_dir() else "it could not be written"
        except OSError as error:
            return f"it cannot be read: {error}"

    def newest_intact(self) -> Checkpoint | None:
        """Returns the newest checkpoint whose files are all as they were written; None if there is none.

        UserError for one that cannot be read: that may pass, and a run that went on from an earlier one
        would delete it.
        """
        for folder in reversed(self.all()):
            try:
                damage = find_damage(folder)
            except OSError as error:
                raise UserError(
                    f"checkpoint {shown(folder)} cannot be read ({error}); nothing was changed. Try again, "
                    "or move that folder away to go on from the checkpoint before it."
                ) from error
            if damage:
                logger.warning("checkpoint {} is damaged ({}); trying the one before", folder, damage)
                continue
            return Checkpoint(folder, json.loads((folder / _STATE).read_text(encoding="utf-8")))
        return None

    def all(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        folders = [path for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(folders, key=lambda path: (len(path.name), path.name))

    @property
    def best(self) -> Path | None:
        """The checkpoint with the highest held-out reward so far: the newest that was saved as the best."""
        for folder in reversed(self.all()):
            with suppress(OSError, ValueError, AttributeError):  # damaged
                if json.loads((folder / _STATE).read_text(encoding="utf-8")).get("best"):
                    return folder.resolve()
        link = self.folder / _BEST
        return link.resolve() if link.is_dir() else None

    def repair(self) -> None:
        """Finishes what a killed process has left half done: folders set aside, and the mark of the best."""
        restore_interrupted_replace(self.folder)
        restore_interrupted_replace(self.folder.parent)
        if (best := self.best) is not None:
            self._mark_best(best)

    def _of_step(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _mark_best(self, folder: Path) -> None:
        """With a link, for people; what it says is in the checkpoint, too."""
        link = self.folder / f".{_BEST}.tmp"
        with self._optional(f"hold links such as {_BEST}"):
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            os.replace(link, self.folder / _BEST)

    def _publish(self, checkpoint: Path) -> None:
        """Copies a checkpoint's model to `model/`.

        Hard links would take no room, but whoever writes to `model/` would damage the checkpoint with it.
        """
        temporary = self.model.with_name(f".{MODEL_FOLDER}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        for path in checkpoint.rglob("*"):
            if path.is_file() and path.name not in (*ONLY_TO_TRAIN, _CARD):
                target = temporary / path.relative_to(checkpoint)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        try:
            write_card(self.folder.parent, temporary / _CARD)
        except Exception as error:  # of files that a person may have edited: a card is no part of the model
            if "card" not in self._refused:
                logger.warning("{} has no card: {}", shown(self.model), " ".join(str(error).split()))
            self._refused.add("card")
        replace_folder(temporary, self.model)

    def _prune(self, newest: Path) -> None:
        folders = self.all()
        end = folders.index(newest) + 1
        for folder in folders[end:]:  # damaged ones that a resume went back behind
            shutil.rmtree(folder, ignore_errors=True)
        best = self.best  # which reads the state of each
        for folder in folders[:end][: -self._keep]:
            if folder.resolve() != best:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _replacing(self, place: Path) -> Iterator[Path]:
        """A folder to write to, which takes the place of `place` when all is on the disk.

        Its files get the usual modes: safetensors makes files for their owner alone.
        """
        temporary = place.with_name(f".{place.name}.tmp")
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            usual = temporary.stat().st_mode & 0o666
            for path in (*temporary.rglob("*"), temporary):
                if path.is_dir():
                    with self._optional("flush folders"):
                        _flush(path)
                else:
                    _flush(path)
                    with self._optional("change modes"):
                        path.chmod(usual)
            replace_folder(temporary, place)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    @contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        """Inside, a step that not every disk can do: where it refuses, that is said once, and it is left
        out."""
        try:
            yield
        except OSError as error:
            if what not in self._refused:
                logger.warning("{} does not {} ({}): it is done without", shown(self.folder), what, error)
            self._refused.add(what)


def saved_model_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that are saved: of adapters alone, where there are any."""
    only_trained = has_adapters(model)
    return sum(master_bytes(p) for p in model.parameters() if p.requires_grad or not only_trained)


def checkpoint_bytes(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a checkpoint takes on the disk: the weights that are saved and the optimizer's state."""
    weights = saved_model_bytes(model)
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and name != LOW_BITS  # which are a part of the weights, as they are saved
    ]
    return weights + sum(state.nbytes for state in states) + _OTHER_FILES_BYTES


def find_damage(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint folder, or None. OSError where it cannot be read."""
    try:
        written, on_disk = json.loads((folder / _MANIFEST).read_text(encoding="utf-8")), _manifest(folder)
        weights = {name for name in written if name.endswith(".safetensors")} - {_TENSORS, _REFERENCE}
        if not weights or not {_STATE, _TENSORS} <= set(written):
            return f"{_MANIFEST} cannot be read: it names no weights, {_STATE} and {_TENSORS}"
        for name, entry in written.items():
            if name not in on_disk:
                return f"{name} is missing"
            if on_disk[name]["bytes"] != entry["bytes"]:
                return f"{name} has {on_disk[name]['bytes']} bytes instead of {entry['bytes']}"
            if on_disk[name]["sha256"] != entry["sha256"]:
                return f"{name} does not have the content that was written"
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return None


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file, by its path within the folder."""
    entries = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return entries


def _save_model(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None, **options: Any) -> None:
    if has_adapters(policy.model):
        save_adapters(policy.model, folder)
    else:
        with _saving_in_this_process(policy.model), policy.as_it_came():
            policy.model.save_pretrained(folder, state_dict=weights, **options)
    policy.tokenizer.save_pretrained(folder)


@contextmanager
def _saving_in_this_process(model: Any) -> Iterator[None]:
    """Inside, transformers writes a model whichever process this is: that has been decided before.

    By itself it writes in the first process alone, and in others leaves out the weights in silence.
    """
    model.should_save_on_this_rank = lambda is_main_process: True
    try:
        yield
    finally:
        del model.should_save_on_this_rank


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
