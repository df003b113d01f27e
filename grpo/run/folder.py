"""The folder of a run: chosen, held by one run at a time, opened to go on with."""

import fcntl
import itertools
import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from loguru import logger

from grpo.config import CONFIG_FILE, Config, SettingsError, read_yaml, to_plain, write_yaml
from grpo.data.reward_files import reward_file
from grpo.files import shown
from grpo.memory.budget import readable
from grpo.model.adapters import check_resumed
from grpo.run.checkpoint import Checkpoint, CheckpointFolder

REWARDS_FOLDER = "rewards"
LOCK_FILE = ".in-use"
"""In a run's folder, where it stays: which process trains there, or was the last to; the lock is on it."""


@contextmanager
def hold_folder(config: Config) -> Iterator[Path]:
    """The run's folder, this run's alone meanwhile; made if need be, and gone again if nothing came into it.

    SettingsError where another run has it, or a checkpoint of one is in it.
    """
    made: list[Path] = []
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            folder = (config.resume or _new_folder(config, made)).absolute()  # wherever a reward may go
            stack.enter_context(_locked(folder, config))
        except OSError as error:
            raise SettingsError(_cannot_write(config, error)) from error
        if not config.resume and CheckpointFolder(folder / "checkpoints", keep=1).all():
            raise SettingsError(
                f"name is {folder.name!r}, but {str(shown(folder))!r} is a run already: "
                f"go on with --resume {shlex.quote(str(shown(folder)))}, or choose another name."
            )
        yield folder


def _remove_empty(made: list[Path]) -> None:
    with suppress(OSError):  # the run has begun: not empty
        for folder in reversed(made):
            folder.rmdir()


def _where(config: Config) -> str:
    """The setting that names the run's folder, or the one in which it is made."""
    return f"resume is {str(config.resume)!r}" if config.resume else f"runs_dir is {str(config.runs_dir)!r}"


def _cannot_write(config: Config, error: OSError) -> str:
    what = "a run's folder that can be written" if config.resume else "a folder in which others can be made"
    return f"{_where(config)}, where a run cannot write ({error}): give {what}."


def _new_folder(config: Config, made: list[Path]) -> Path:
    """A run's folder is made; one of date and time gets a number if another run has just taken it."""
    if config.name is not None:
        folder = config.runs_dir / config.name
        _make(folder, made)
        return folder
    stem = config.runs_dir / datetime.now().strftime("%Y%m%d-%H%M%S")
    folders = (stem if i == 1 else stem.with_name(f"{stem.name}-{i}") for i in itertools.count(1))
    return next(folder for folder in folders if _make(folder, made))


def _make(folder: Path, made: list[Path]) -> bool:
    """Make a folder and those above it, noting which; whether it is new."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        with suppress(FileExistsError):  # another run was faster
            path.mkdir()
            made.append(path)
    return folder in made


@contextmanager
def _locked(folder: Path, config: Config) -> Iterator[None]:
    """Hold the lock of a folder, which ends with this process, however it ends."""
    path, own_name = folder / LOCK_FILE, f"process {os.getpid()} on {socket.gethostname()}"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read() or "another process"
            given, remedy = ("resume", "") if config.resume else ("name", ", or choose another name")
            if who == own_name:
                remedy += "; it is this process: close() a Trainer that takes no step, or open it by with"
            raise SettingsError(
                f"{given} is {str(config.resume or folder.name)!r}, but {who} is training in "
                f"{str(shown(folder))!r}: let it end, or stop it{remedy}."
            ) from None
        except OSError as error:
            logger.debug("{} is on a disk that knows no locks: {}", folder, error)
        if not path.exists():  # with its folder, which a run that did not begin has just taken away
            raise FileNotFoundError(f"{folder} is gone")
        file.truncate(0)
        file.write(own_name)
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                if list(folder.iterdir()) == [path]:  # the run has not begun
                    path.unlink()


def check_room(config: Config, folder: Path, each_bytes: int, num_there: int) -> None:
    """SettingsError where not one checkpoint fits on the disk of `folder`, a warning where not all will.

    each_bytes: of a checkpoint. num_there: checkpoints that the folder has, of which old ones go.
    """
    free = shutil.disk_usage(folder).free
    # Beside those that stay there are the best one and the one that is being written.
    most = max(1, config.keep_checkpoints + 2 - num_there) * each_bytes
    if free < each_bytes:
        raise SettingsError(
            f"{_where(config)}, on a disk with {readable(free)} free, where a checkpoint takes "
            f"{readable(each_bytes)}: make room, or have the run's folder elsewhere (--runs-dir)."
        )
    if free < most:
        logger.warning(
            "{} are free in {}, and checkpoints will take up to {}: make room, or lower --keep-checkpoints",
            readable(free), folder, readable(most),
        )  # fmt: skip


def open_checkpoints(config: Config, folder: Path) -> tuple[CheckpointFolder, Checkpoint | None]:
    """The run's checkpoints, and the one it goes on from, if it is to; what is changed then is said.

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
    checkpoints.mend()
    if changes := _changes(config, folder, checkpoint.state.get("settings")):
        logger.info("changed from here on: {}", ", ".join(changes))
    return checkpoints, checkpoint


def checkpoint_of(model: str) -> str:
    """Of a run's folder the best checkpoint, else the newest; any other model as it is.

    ValueError where a run has none.
    """
    checkpoints = CheckpointFolder(Path(model) / "checkpoints", keep=1)
    if not checkpoints.folder.is_dir():
        return model
    chosen = checkpoints.best
    if chosen is None and (newest := checkpoints.newest_intact()):  # which reads all of its files
        chosen = newest.folder
    if chosen is None:
        raise ValueError(f"model is {model!r}, a run without a checkpoint: let it train on, or name a model")
    return str(chosen)


def _changes(config: Config, folder: Path, saved: dict[str, Any] | None) -> list[str]:
    """What of a resumed run's settings is no longer as it was when its checkpoint was `saved`."""
    file = folder / CONFIG_FILE
    before = saved or (read_yaml(file) if file.is_file() else {})
    now = to_plain(replace(config, resume=None))
    return [
        f"{name} {before[name]} -> {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def keep_rewards(folder: Path, config: Config) -> None:
    """Copies of the user's files that judge, by the rewards' names; one that has changed since is told."""
    for spec in config.reward:
        path, name = reward_file(spec)
        if path is None:
            continue
        kept = folder / REWARDS_FOLDER / f"{name}.py"
        if kept.is_file() and kept.read_bytes() != path.read_bytes():
            logger.warning("reward {!r} is not what it was: {} differs from its copy, {}", name, path, kept)
        elif not kept.is_file():
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, kept)


def write_settings(folder: Path, config: Config) -> None:
    """The settings that repeat the run (to repeat it is not to resume it): from here on it has begun."""
    try:
        write_yaml(replace(config, resume=None), folder / CONFIG_FILE)
    except OSError as error:
        raise SettingsError(_cannot_write(config, error)) from error
