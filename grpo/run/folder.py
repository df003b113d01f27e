"""The folder of a run: chosen, held by one run at a time, opened to go on with."""

import fcntl
import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path

from loguru import logger

from grpo.config import CONFIG_FILE, Config, SettingsError, read_yaml, to_plain, write_yaml
from grpo.errors import UserError
from grpo.files import shown
from grpo.memory.budget import readable
from grpo.model.adapters import check_resumed
from grpo.model.names import MODEL_FOLDER
from grpo.run.checkpoint import Checkpoint, CheckpointFolder

LOCK_FILE = ".in-use"
"""In a run's folder: which process trains there, or was the last to; the lock is on it."""


@contextmanager
def hold_folder(config: Config) -> Iterator[Path]:
    """The run's folder, this run's alone meanwhile; made if need be, and gone again if nothing came into it.

    SettingsError where another run has it, or a checkpoint of one is in it.
    """
    with ExitStack() as stack:
        try:
            folder = (config.resume or _new_folder(config)).absolute()  # wherever a reward may go
            stack.enter_context(_locked(folder, config))
        except OSError as error:
            raise _cannot_write(config, error) from error
        if not config.resume and CheckpointFolder(folder / "checkpoints", keep=1).all():
            raise SettingsError(
                f"name is {folder.name!r}, but {str(shown(folder))!r} is a run already: "
                f"go on with --resume {shlex.quote(str(shown(folder)))}, or choose another name."
            )
        yield folder


def _new_folder(config: Config) -> Path:
    """That of the run's name; one of date and time has a number if another run has just taken it."""
    if config.name is not None:
        (config.runs_dir / config.name).mkdir(parents=True, exist_ok=True)
        return config.runs_dir / config.name
    folder = stem = config.runs_dir / datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in count(2):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


@contextmanager
def _locked(folder: Path, config: Config) -> Iterator[None]:
    """Hold the lock of a folder, which ends with this process, however it ends."""
    path, this_process = folder / LOCK_FILE, f"process {os.getpid()} on {socket.gethostname()}"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            setting, remedy = ("resume", "") if config.resume else ("name", ", or choose another name")
            if holder == this_process:
                remedy += "; it is this process: close() a Trainer that takes no step, or open it by with"
            raise SettingsError(
                f"{setting} is {str(config.resume or folder.name)!r}, but {holder} is training in "
                f"{str(shown(folder))!r}: let it end, or stop it{remedy}."
            ) from None
        except OSError as error:
            logger.debug("{} is on a disk that knows no locks: {}", folder, error)
        if not path.exists():  # with its folder, which a run that did not begin has just taken away
            raise FileNotFoundError(f"{folder} is gone")
        file.truncate(0)
        file.write(this_process)
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                if list(folder.iterdir()) == [path]:  # the run has not begun
                    path.unlink()
                    if not config.resume:
                        folder.rmdir()
                        folder.parent.rmdir()  # if it is empty


def _where(config: Config) -> str:
    """The setting that names the run's folder, or the one in which it is made."""
    return f"resume is {str(config.resume)!r}" if config.resume else f"runs_dir is {str(config.runs_dir)!r}"


def _cannot_write(config: Config, error: OSError) -> SettingsError:
    what = "a run's folder that can be written" if config.resume else "a folder in which others can be made"
    return SettingsError(f"{_where(config)}, where a run cannot write ({error}): give {what}.")


def check_room(
    config: Config, folder: Path, *, checkpoint_bytes: int, model_bytes: int, num_there: int
) -> None:
    """SettingsError where not one checkpoint fits on the disk of `folder`, a warning where not all will.

    num_there: checkpoints that the folder has, of which old ones go.
    """
    free = shutil.disk_usage(folder).free
    # Beside those that stay there are the best one and the one that is being written; beside `model/` the
    # one that takes its place.
    most = max(1, config.keep_checkpoints + 2 - num_there) * checkpoint_bytes + 2 * model_bytes
    if free < checkpoint_bytes:
        raise SettingsError(
            f"{_where(config)}, on a disk with {readable(free)} free, where a checkpoint takes "
            f"{readable(checkpoint_bytes)}: make room, or have the run's folder elsewhere (--runs-dir)."
        )
    if free < most:
        text = "{} are free in {}, and checkpoints will take up to {}: make room, or lower --keep-checkpoints"
        logger.warning(text, readable(free), folder, readable(most))


def open_checkpoints(
    config: Config, folder: Path, *, repairs: bool = True
) -> tuple[CheckpointFolder, Checkpoint | None]:
    """The run's checkpoints, and the one it goes on from, if it is to; what is changed then is said.

    repairs: whether to repair what a process that was killed has left: one of several does.
    SettingsError where there is none, or nothing left to do.
    """
    checkpoints = CheckpointFolder(
        folder / "checkpoints", keep=config.keep_checkpoints, merge=config.lora_merge
    )
    if not config.resume:
        return checkpoints, None
    checkpoint = checkpoints.newest_intact()
    if checkpoint is None:
        raise SettingsError(
            f"resume: {str(shown(folder))!r} holds no intact checkpoint; start without --resume."
        )
    check_resumed(config, checkpoint.folder)
    if config.steps <= (done := checkpoint.state["step"]):
        raise SettingsError(f"steps is {config.steps}, but {done} steps are done: give --steps above {done}.")
    if repairs:
        checkpoints.repair()
    file = folder / CONFIG_FILE  # older checkpoints have no copy of the settings
    before = checkpoint.state.get("settings") or (read_yaml(file) if file.is_file() else {})
    now = to_plain(replace(config, resume=None))
    changes = [
        f"{name} {before[name]} -> {value}" for name, value in now.items() if before.get(name, value) != value
    ]
    if changes:
        logger.info("changed from here on: {}", ", ".join(changes))
    return checkpoints, checkpoint


def model_of(model: str) -> str:
    """The folder of the model that a run has come to, `model/`, or without one its newest checkpoint.

    Any other model as it is named. ValueError for a run that has saved none.
    """
    folder = Path(model) / MODEL_FOLDER
    checkpoints = CheckpointFolder(Path(model) / "checkpoints", keep=1)
    if not checkpoints.folder.is_dir():
        return model
    if folder.is_dir():
        return str(folder)
    newest = checkpoints.newest_intact()  # which reads all of its files
    if newest is None:
        raise UserError(f"model is {model!r}, a run without a checkpoint: let it train on, or name a model")
    return str(newest.folder)


def step_of(model: str) -> str:
    """The step that a run's `model_of` was saved after, such as step-000050; empty for any other model."""
    checkpoints = CheckpointFolder(Path(model) / "checkpoints", keep=1).all()
    return checkpoints[-1].name if checkpoints else ""


def write_settings(folder: Path, config: Config) -> None:
    """The settings that repeat the run (to repeat it is not to resume it): from here on it has begun."""
    try:
        write_yaml(replace(config, resume=None), folder / CONFIG_FILE)
    except OSError as error:
        raise _cannot_write(config, error) from error
