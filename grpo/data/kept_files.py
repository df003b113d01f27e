"""Copies of a user's own files in a run's folder, rewards and templates, and its settings with them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from grpo.config import CONFIG_FILE, Config, from_plain
from grpo.config.reading import read_run_settings
from grpo.data.reward_files import AnyConfig, reward_file
from grpo.files import as_path


def keep_files(folder: Path, config: Config) -> None:
    """Copy a run's own files into its folder, once; one that has changed since is told."""
    for (what, path), copy in _copies(folder, config).items():
        if not copy.is_file():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        elif copy.read_bytes() != path.read_bytes():
            logger.warning("{} is not what it was: {} differs from its copy, {}", what, path, copy)


def as_kept(folder: Path, config: AnyConfig) -> AnyConfig:
    """A run's settings, with its own copies of files that have changed or gone since; that is told."""
    copies = _copies(folder, config)

    def kept(what: str, path: Path) -> Path:
        copy = copies[what, path]
        if not copy.is_file() or (path.is_file() and path.read_bytes() == copy.read_bytes()):
            return path
        state = "has changed" if path.is_file() else "is gone"
        logger.warning("{} is the run's copy, {}: {} {} since", what, copy, path, state)
        return copy

    rewards = []
    for spec in config.reward:
        path, name = reward_file(spec)
        rewards.append(spec if path is None else f"{kept(_reward(name), path)}:{name}")
    templates: dict[str, Any] = {name: kept(name, path) for name, path in _templates(config).items()}
    return replace(config, reward=tuple(rewards), **templates)


def settings_of_run(model: str) -> Config | None:
    """The settings of a run whose folder is named, with its copies of files; None for any other model."""
    folder = Path(model)
    if not (folder / CONFIG_FILE).is_file():
        return None
    return as_kept(folder.resolve(), from_plain(read_run_settings(folder)))


def with_prompts(settings: Config, prompts: str) -> Config:
    """The settings for other prompts than those of the training, all of which are used."""
    if are_same_prompts(settings.prompts, prompts):
        return settings
    return replace(settings, prompts=prompts, heldout_share=1.0)


def are_same_prompts(prompts: str, others: str) -> bool:
    """Whether two names mean the same prompts; a file's may be relative or absolute."""
    paths = [as_path(name) for name in (prompts, others)]
    return prompts == others or (paths[0].exists() and paths[0].resolve() == paths[1].resolve())


def _copies(folder: Path, config: Config) -> dict[tuple[str, Path], Path]:
    """Returns the place of each file's copy, by what the file is to the run and its path."""
    copies = {}
    for path, name in map(reward_file, config.reward):
        if path is not None:
            copies[_reward(name), path] = folder / "rewards" / f"{name}.py"
    for name, path in _templates(config).items():
        copies[name, path] = folder / "templates" / f"{name}.jinja"
    return copies


def _reward(name: str) -> str:
    return f"reward {name!r}"


def _templates(config: Config) -> dict[str, Path]:
    names = "prompt_template", "chat_template"
    return {name: path for name in names if (path := getattr(config, name)) is not None}
