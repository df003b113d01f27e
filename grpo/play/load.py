"""A player from a model's name."""

from dataclasses import replace
from pathlib import Path

from loguru import logger

from grpo.config import CONFIG_FILE, Config, from_flat
from grpo.config.groups import Precision
from grpo.config.reading import read_run_settings
from grpo.model.load import RolloutModel, context_length, load_policy
from grpo.model.target import choose_device, choose_model
from grpo.play.player import Player
from grpo.run.folder import checkpoint_of

_LONGEST_PROMPT = 96
"""Tokens, were each letter of a position one."""


def settings_of(model: str) -> Config:
    """Those that a run was trained with; of another model the defaults."""
    is_run = (Path(model) / CONFIG_FILE).is_file()
    return from_flat(read_run_settings(Path(model))) if is_run else Config()


def known_as(model: str) -> str:
    """Its name, of a folder the last part, of a run with the checkpoint that is taken."""
    if not Path(model).is_dir():
        return model
    taken = checkpoint_of(model)
    step = "" if taken == model else f" {Path(taken).resolve().name}"
    return f"{Path(model).resolve().name}{step}"


def load_player(
    model: str, device_name: str, precision: Precision = "auto", *, temperature: float = 0.0, rows: int = 64
) -> Player:
    """model: auto, rook-tiny, a hub id, a model's folder, or a run's: its best checkpoint, else its newest.

    ValueError says what to do when it cannot be loaded.
    """
    settings, device = settings_of(model), choose_device(device_name)
    name = choose_model(checkpoint_of(model), device)
    logger.info("playing by {}", name)
    policy = load_policy(name, device, precision)
    room = context_length(policy.model.config) - _LONGEST_PROMPT
    if room < 1:
        raise ValueError(f"model {model!r} has a context too short for a position: give another one")
    return Player(
        RolloutModel(policy.model, policy.target.dtype).model, policy.tokenizer,
        replace(
            settings.sampling, temperature=temperature,
            max_new_tokens=min(settings.sampling.max_new_tokens, room),
        ),
        trailing_space=settings.asking.trailing_space, rows=rows,
    )  # fmt: skip
