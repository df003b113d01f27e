"""One model at several batch sizes, each learning from equally many tokens (lm) or samples (grpo).

A sweep is a folder of runs (`sizes.py` says which files), each in a process of its own; what has ended is
kept when a sweep goes on. Left out: several sizes at once, which would disturb each other's times, and going
on within a size.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from loguru import logger

from grpo.config import SettingsError, to_plain
from grpo.config.sizes import GB, parse_size
from grpo.data.reward_files import PROMPTS_LOOKED_AT
from grpo.data.reward_functions import RewardFunctions
from grpo.files import write_whole
from grpo.logs.tables import Row
from grpo.run.loading import load_source
from grpo.workbench import trial
from grpo.workbench.corpus import open_corpus, text_file, trained_tokenizer
from grpo.workbench.machine import Machine, resolve_auto
from grpo.workbench.models import model_shape, num_parameters
from grpo.workbench.settings import new_folder
from grpo.workbench.sizes import ENDED_FILE, OK, SWEEP_FILE, SizeResult, read_json, read_size, size_folder
from grpo.workbench.sweep_settings import Sweep, apply_low_resource
from grpo.workbench.trial import TrialStatus

TUNE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
KEPT = ("ok", "out of memory", "diverged")
"""Statuses of sizes that are not tried again."""
MAY_CHANGE = ("batch_sizes", "again")
"""Settings that may differ when a sweep goes on."""


def open_sweep(settings: Sweep) -> tuple[Sweep, Path]:
    """Check what can be checked beforehand, and make the sweep's folder or go on in it.

    The settings as they are on this machine, and the folder. ValueError for what a user can mend.
    """
    if settings.low_resource:
        settings, changes = apply_low_resource(settings)
        logger.info("low resource: {}", "; ".join(changes) or "nothing to shrink")
        if settings.device == "auto" and torch.backends.mps.is_available():
            settings = replace(settings, device="mps")
    settings, machine = resolve_auto(settings)
    tokenizer = None
    if settings.objective == "lm":
        logger.info("text: {:,} tokens to learn from", open_corpus(settings).num_train)
        tokenizer = trained_tokenizer(text_file(settings.data), settings)
    else:
        source = load_source(settings)  # prompts and rewards, as a run would find them
        rewards = RewardFunctions(settings.reward, settings.reward_weights)
        rewards.check(source.tasks, source.longest(PROMPTS_LOOKED_AT))
    folder = settings.output or new_folder("sweep")
    _open_folder(folder, settings, machine)
    if tokenizer:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    tf32, compiled = ("on" if on else "off" for on in (settings.tf32, settings.compile))
    logger.info("{}, {}; TF32 {}, compile {}", machine.device_name, machine.precision, tf32, compiled)
    return settings, folder


def _open_folder(folder: Path, settings: Sweep, machine: Machine) -> None:
    """Make the folder, or go on in it. SettingsError if it holds a sweep with other settings."""
    known = to_plain(settings)
    managed = (*Sweep.MANAGED_FLAGS, "output")
    common = {name: value for name, value in known.items() if name not in managed} | {
        "model": settings.model_name,
        "batch_sizes": settings.sizes,
        "base_batch_size": settings.base,
        "warmup_share": settings.warm_up,
    }
    file, started = folder / SWEEP_FILE, datetime.now().isoformat(timespec="seconds")
    if file.exists():
        before = read_json(file)
        if not before:
            raise SettingsError(f"output is {str(folder)!r}, whose {SWEEP_FILE} is broken: choose another.")
        differing = [
            f"{name} is {before.get(name)} there and {value} here"
            for name, value in common.items()
            if before.get(name) != value and name not in MAY_CHANGE
        ]
        if differing:
            raise SettingsError(
                f"output is {str(folder)!r}, which holds a sweep with other settings: "
                f"{'; '.join(differing)}. Give the same ones, or another --output."
            )
        common["batch_sizes"] = sorted({*before["batch_sizes"], *settings.sizes})
        started = before["started"]
    quality = {"name": "held-out reward", "better": "higher", "unit": ""}
    if settings.objective == "lm":
        quality = {"name": "held-out loss", "better": "lower", "unit": "nats a token"}
    facts = {
        "unit": settings.unit,
        "total": settings.total,
        "quality": quality,
        "started": started,
        "memory_limit_bytes": parse_size(settings.memory_limit) if settings.memory_limit else None,
        "num_parameters": num_parameters(model_shape(settings)),
        "device_name": machine.device_name,
        "usable_bytes": machine.usable_bytes,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({**common, **facts}, indent=1) + "\n")


def run_sweep(settings: Sweep, folder: Path) -> list[SizeResult]:
    """All sizes asked for, as they ended; those that had ended already are kept."""
    for number, size in enumerate(settings.sizes, start=1):
        run = size_folder(folder, size)
        status = read_json(run / ENDED_FILE).get("status")
        if status in KEPT and not settings.again:
            logger.info("size {}: kept from before ({})", size, status)
            continue
        logger.info("size {} ({} of {})", size, number, len(settings.sizes))
        rate, tuned, ended = settings.rate(size), list[dict[str, float | None]](), TrialStatus("ok")
        if settings.scale_lr == "tuned":
            rate, tuned, ended = _tune(settings, size, folder)
        task = settings.size_task(size, rate)
        if ended.status == OK:
            ended = trial.run_task(task, run, partial(_tell, settings, size), tuned)
        else:
            trial.write_task(task, run, tuned)
            trial.write_ended(run, ended)
        logger.info("size {}: {}", size, ended)
    header = read_json(folder / SWEEP_FILE)
    return [read_size(folder, size, header) for size in settings.sizes]


def _tell(settings: Sweep, size: int, line: Mapping[str, Any]) -> None:
    """Log the evaluation of a size, if a line of its metrics holds one."""
    heldout = line.get("eval_loss", line.get("eval_reward"))
    if heldout is not None:
        done = line["step"] * size * settings.row_units
        logger.info(
            "size {}: {:,} of {:,} {}: held-out {:.4f}", size, done, settings.total, settings.unit, heldout
        )


def _tune(
    settings: Sweep, size: int, folder: Path
) -> tuple[float, list[dict[str, float | None]], TrialStatus]:
    """Try learning rates in short runs: the one with the best held-out quality, all tries, and how it ended.

    It ends early where memory runs out, and badly only where no try ended well.
    """
    tried: dict[float, float] = {}
    rows, total, ended = list[dict[str, float | None]](), settings.tune_total(size), TrialStatus("ok")
    for factor in TUNE_FACTORS:
        rate = factor * settings.rate(size)
        runs = folder / f"tune-{size:05d}-{rate:.2g}"
        task = settings.size_task(size, rate, total=total, evaluations=1)
        ended = trial.run_task(task, size_folder(runs, size))
        heldout = read_size(runs, size, {"objective": settings.objective}).final_heldout
        if ended.status == OK and heldout is not None:
            tried[rate] = heldout
        rows.append({"learning_rate": rate, "heldout": tried.get(rate)})
        shown = f"held-out {heldout:.4f}" if rate in tried else ended.status
        logger.info("size {}: learning rate {:.2g}: {}", size, rate, shown)
        if ended.status in ("out of memory", "failed"):
            break
    else:
        ended = TrialStatus("ok") if tried else ended
    if not tried:
        return settings.rate(size), rows, ended
    best = (max if settings.objective == "grpo" else min)(tried, key=lambda rate: tried[rate])
    if len(rows) > 1 and best in (rows[0]["learning_rate"], rows[-1]["learning_rate"]):
        logger.warning("the best learning rate, {:.2g}, is at the edge of those tried", best)
    return best, rows, ended


def size_row(size: SizeResult, unit: str) -> Row:
    """A row of the printed table."""

    def shown(value: float | None, form: str, divided_by: float = 1.0) -> str | None:
        return None if value is None else format(value / divided_by, form)

    return {
        "size": size.batch_size,
        "status": size.status,
        "rate": shown(size.learning_rate, ".2g"),
        "updates": size.updates,
        "time, s": shown(size.seconds, ".1f"),
        "start, s": shown(size.start_s, ".1f"),
        f"{unit}/s": shown(size.rate, ",.0f"),
        "peak, GB": shown(size.peak_bytes, ".2f", GB),
        "tensors": shown(size.added_bytes, ".3f", GB),
        "predicted": shown(size.predicted_bytes, ".3f", GB),
        "train": shown(size.final_train, ".4f"),
        "held-out": shown(size.final_heldout, ".4f"),
        "best": shown(size.best_heldout, ".4f"),
    }
