"""A sweep as people type it: defaults by objective, a file of settings for GRPO, and less for a laptop."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import tyro

from grpo.config import Config, SettingsError, read_config
from grpo.workbench.flags import Objective
from grpo.workbench.spec import ModelSpec
from grpo.workbench.sweep.settings import SweepSettings

LOW_RESOURCE: dict[str, int] = {
    "batch_sizes": 64, "total_tokens": 100_000, "total_samples": 256, "heldout": 32, "evaluations": 4,
    "max_new_tokens": 48, "layers": 2, "width": 128, "context": 64,
}  # fmt: skip
"""What --low-resource lets no setting exceed; layers and width are of a model made by --arch."""


def parse_sweep(arguments: Sequence[str] | None = None) -> SweepSettings:
    """Settings from the command line; for grpo over those of `--config FILE [--profile NAME]`.

    SettingsError for bad ones.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--profile")
    first.add_argument("--objective", choices=get_args(Objective), default="lm")
    known, rest = first.parse_known_args(arguments)
    default = SweepSettings()
    if known.objective == "grpo":
        default = grpo_defaults(read_config(known.config, known.profile) if known.config else Config())
    elif known.config is not None:
        raise SettingsError(f"config is {str(known.config)!r}, which is for --objective grpo: add that.")
    return tyro.cli(
        SweepSettings, args=rest, default=default, config=(tyro.conf.OmitArgPrefixes,),
        description="Train one model at several batch sizes, each on equally many tokens (lm) or samples "
        "(grpo). With --objective grpo, --config FILE.yaml holds settings of train_lean.py.",
    )  # fmt: skip


def grpo_defaults(train: Config) -> SweepSettings:
    """A GRPO sweep around one run's settings."""
    return SweepSettings(
        objective="grpo",
        batch_sizes=tuple(train.group_size * 2**power for power in range(1, 7)),
        model=ModelSpec(model=None if train.model == "auto" else train.model),
        device=train.device, precision=train.precision, seed=train.seed, memory_limit=train.memory_limit,
        heldout=max(1, train.eval_prompts),
        base_batch_size=64 if train.batch_size == "auto" else train.batch_size,
        warmup_share=min(1.0, train.optimizer.warmup_steps / train.steps),
        optimizer=replace(train.optimizer, warmup_steps=0), train_rows=None,
        gradient_checkpointing=train.gradient_checkpointing, group_size=train.group_size,
        max_new_tokens=train.sampling.max_new_tokens, kl_coef=train.loss.kl_coef, train=train,
    )  # fmt: skip


def shrunk(settings: SweepSettings) -> tuple[SweepSettings, list[str]]:
    """A sweep that exceeds LOW_RESOURCE in nothing that matters to it, and what changed, in words."""
    sizes = tuple(size for size in settings.batch_sizes if size <= LOW_RESOURCE["batch_sizes"])
    changes: dict[str, Any] = {"batch_sizes": sizes or (min(settings.batch_sizes),)}
    said = [f"batch_sizes up to {max(changes['batch_sizes'])}"] if sizes != settings.batch_sizes else []
    own = {item.name for item in fields(settings)}
    of_model: dict[str, Any] = {}
    for name in _that_matter(settings):
        part, kept = (settings, changes) if name in own else (settings.model, of_model)
        if getattr(part, name) > LOW_RESOURCE[name]:
            kept[name] = LOW_RESOURCE[name]
            said.append(f"{name} {getattr(part, name)} to {LOW_RESOURCE[name]}")
    return replace(settings, **changes, model=replace(settings.model, **of_model)), said


def _that_matter(settings: SweepSettings) -> list[str]:
    if settings.objective == "grpo":
        return ["total_samples", "heldout", "evaluations", "max_new_tokens"]
    shape = [] if settings.model.arch is None else ["layers", "width"]
    return ["total_tokens", "heldout", "evaluations", "context", *shape]
