"""The folder of a run: chosen, opened to go on with, claimed."""

import itertools
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from grpo.adapters import check_resumed
from grpo.checkpoint import Checkpoint, CheckpointFolder
from grpo.config import CONFIG_FILE, Config, SettingsError, write_yaml


def choose_folder(config: Config) -> Path:
    """The run's folder; one of date and time gets a number if another run has just taken it."""
    if config.resume is not None:
        return config.resume
    if config.name is None:
        stem = config.runs_dir / datetime.now().strftime("%Y%m%d-%H%M%S")
        folders = (stem if i == 1 else stem.with_name(f"{stem.name}-{i}") for i in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())
    folder = config.runs_dir / config.name
    if CheckpointFolder(folder / "checkpoints", keep=1).all():
        raise SettingsError(
            f"name is {folder.name!r}, but {str(folder)!r} is a run already: "
            f"go on with --resume {folder}, or choose another name."
        )
    return folder


def open_checkpoints(config: Config, folder: Path) -> tuple[CheckpointFolder, Checkpoint | None]:
    """The run's checkpoints, and the one it goes on from, if it is to."""
    checkpoints = CheckpointFolder(
        folder / "checkpoints", keep=config.keep_checkpoints, merge=config.lora.lora_merge
    )
    if not config.resume:
        return checkpoints, None
    checkpoint = checkpoints.newest_intact()
    if checkpoint is None:
        raise SettingsError(f"resume: {str(folder)!r} holds no intact checkpoint; start without --resume.")
    check_resumed(config.lora, checkpoint.folder)
    return checkpoints, checkpoint


def claim_folder(folder: Path, config: Config) -> None:
    """Make the folder and write the settings that repeat the run (to repeat it is not to resume it)."""
    folder.mkdir(parents=True, exist_ok=config.name is not None or config.resume is not None)
    write_yaml(replace(config, resume=None), folder / CONFIG_FILE)
