"""A sweep before it starts: everything that can be wrong is checked here, and the folder made or found."""

import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from loguru import logger

from grpo.config import SettingsError
from grpo.data.reward_files import PROMPTS_LOOKED_AT
from grpo.data.reward_functions import RewardFunctions
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.target import compute_dtype
from grpo.run.loading import load_source
from grpo.workbench.corpus import open_corpus, text_file, trained_tokenizer
from grpo.workbench.machine import Machine, look
from grpo.workbench.models import num_parameters
from grpo.workbench.predict import StepMemory, StepSettings
from grpo.workbench.sweep.command_line import shrunk
from grpo.workbench.sweep.rows import SweepFolder
from grpo.workbench.sweep.run import Sweep
from grpo.workbench.sweep.settings import SweepSettings, run_config


def open_sweep(settings: SweepSettings) -> Sweep:
    """Check what can be checked beforehand, and make the sweep's folder or go on in it.

    ValueError for what a user can mend.
    """
    if settings.low_resource:
        settings, changes = shrunk(settings)
        logger.info("low resource: {}", "; ".join(changes) or "nothing to shrink")
        if settings.device == "auto" and torch.backends.mps.is_available():
            settings = replace(settings, device="mps")
    config = settings.model.config()
    if settings.objective == "lm":
        corpus = open_corpus(settings.data, settings.model)
        logger.info("text: {:,} tokens to learn from", corpus.num_train)
    else:
        _check_grpo(settings)
    machine = _look(settings)
    settings = replace(settings, device=machine.device, precision=machine.precision)
    memory = None
    if settings.objective == "lm":
        memory = StepMemory(StepSettings(
            "lm", config, compute_dtype(settings.precision, torch.device(machine.device)),
            new_tokens=settings.model.context,
            checkpointing=choose_checkpointing(settings.gradient_checkpointing),
            device_type=torch.device(machine.device).type,
        ))  # fmt: skip
    folder = SweepFolder(settings.output or Path("runs") / f"sweep-{datetime.now():%Y%m%d-%H%M%S}")
    folder.open(_header(settings, machine, num_parameters(config)))
    if settings.objective == "lm" and (file := trained_tokenizer(text_file(settings.data), settings.model)):
        shutil.copyfile(file, folder.path / "tokenizer.json")
    tf32, compiled = ("on" if on else "off" for on in (settings.tf32, settings.compile))
    logger.info("{}, {}; TF32 {}, compile {}", machine.device_name, machine.precision, tf32, compiled)
    return Sweep(settings, folder, memory)


def _look(settings: SweepSettings) -> Machine:
    """The device. ValueError if it, or a switch that was set, cannot be used."""
    machine = look(settings.device, settings.precision, settings.memory_limit_bytes)
    if settings.compile and machine.no_compiler:
        raise SettingsError(f"compile is on, but {machine.no_compiler}; or leave it out.")
    if settings.tf32 and not machine.device.startswith("cuda"):
        raise SettingsError(f"tf32 is on, but {machine.device} has no such mode: leave it out.")
    return machine


def _check_grpo(settings: SweepSettings) -> None:
    """Model, lengths, prompts and rewards, as a run would find them."""
    config = run_config(settings, settings.batch_sizes[0])
    source = load_source(config)
    rewards = RewardFunctions(config.reward, config.reward_weights)
    rewards.check(source.tasks, source.longest(PROMPTS_LOOKED_AT))


def _header(settings: SweepSettings, machine: Machine, parameters: int) -> dict[str, Any]:
    """sweep.json: what all sizes have in common, and all that repeats the sweep."""
    optimizer, is_lm = settings.optimizer, settings.objective == "lm"
    return {
        "version": 1, "objective": settings.objective, "unit": settings.unit, "total": settings.total,
        "batch_sizes": sorted(set(settings.batch_sizes)), "model": settings.model.name,
        "num_parameters": parameters, "device": machine.device, "device_name": machine.device_name,
        "precision": machine.precision, "learning_rate": optimizer.learning_rate,
        "base_batch_size": settings.base_batch_size, "scale_lr": settings.scale_lr,
        "lr_schedule": optimizer.lr_schedule, "min_lr_ratio": optimizer.min_lr_ratio,
        "warmup_share": settings.warmup_share, "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2, "weight_decay": optimizer.weight_decay,
        "context": settings.model.context if is_lm else None,
        "group_size": None if is_lm else settings.group_size,
        "memory_limit_bytes": settings.memory_limit_bytes, "usable_bytes": machine.usable_bytes,
        "compile": settings.compile, "tf32": settings.tf32,
        "quality": {"name": "held-out loss", "better": "lower", "unit": "nats a token"} if is_lm
        else {"name": "held-out reward", "better": "higher", "unit": ""},
        "seed": settings.seed,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "started": datetime.now().isoformat(timespec="seconds"), "settings": settings.as_json(),
    }  # fmt: skip
