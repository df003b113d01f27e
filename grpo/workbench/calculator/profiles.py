"""Profiles: named sets of settings that `train_lean.py --config FILE --profile NAME` reads.

A profile's batch size is what an optimizer step sees on all its cards together; how many rows of it go
through at once, the trainer plans by itself.
"""

import shlex
from pathlib import Path
from typing import Any

import yaml

from grpo.config import SettingsError
from grpo.workbench.calculator.calculate import Calculation

NAMES = {1: "single", 2: "dual", 4: "quad", 8: "octo"}


def profile_name(card: str, count: int) -> str:
    """h100_quad, h100_x3."""
    return f"{card}_{NAMES.get(count, f'x{count}')}"


def write_profiles(found: Calculation, file: Path) -> list[str]:
    """Write a profile for each number of cards, and return their names. SettingsError without a batch."""
    settings, card = found.settings, found.card.name
    group = settings.group_size
    size = (found.row.batch_size or 0) // group * group
    if not size:
        raise SettingsError(
            f"yaml is {file}, but no batch of whole groups of {group} is known to fit {card} at "
            f"{settings.memory_utilization:.0%}: give a larger card, shorter texts, or what a sample takes."
        )
    names = {count: profile_name(card, count) for count in found.totals()}
    text = [f"# Calculated for {card}, not measured on it: {size} samples at once at most on each card.\n"]
    if "model" not in _shared(found):
        text.append("# The model is not named here: add --model FOLDER of the one it was calculated for.\n")
    text += [yaml.safe_dump(_shared(found), sort_keys=False), "profiles:\n"]
    for count, name in names.items():
        total = count * size * settings.accumulate
        launch = "python" if count == 1 else f"accelerate launch --num_processes {count}"
        text.append(f"  # {launch} train_lean.py --config {shlex.quote(file.name)} --profile {name}\n")
        text.append(f"  {name}:\n    batch_size: {total}\n")
    file.write_text("".join(text))
    return list(names.values())


def _shared(found: Calculation) -> dict[str, Any]:
    """Settings that all profiles have."""
    settings = found.settings
    named = found.precision is not None and settings.model.arch is None
    return {
        **({"model": settings.model.name} if named else {}),
        "group_size": settings.group_size,
        "max_new_tokens": settings.max_new_tokens,
        **({} if found.precision is None else {"precision": found.precision}),
        **({} if settings.kl else {"kl_coef": 0.0}),
        **({"lora_rank": settings.lora_rank} if settings.lora_rank else {}),
        **({"load_in_4bit": True} if settings.load_in_4bit else {}),
        "gradient_checkpointing": settings.gradient_checkpointing,
        "memory_utilization": settings.memory_utilization,
    }
