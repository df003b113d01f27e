"""What a CUDA card shows of memory and speed, in one call: scripts/gpu_check.sh.

Nearly every part is a real run of the trainer on GPT-2 124 M with random weights, which seldom end a text,
so that completions are as long as they may be. On a CPU the same parts run small, to be tested.
"""

import gc
import json
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from loguru import logger
from rich.console import Console

from benchmarks.out_of_memory import replaced
from benchmarks.speed import Case, race
from benchmarks.speed_worker import Contender
from grpo.config import Config
from grpo.memory.budget import GB
from grpo.memory.recovery import release_cache
from grpo.model.load import RolloutModel, load_policy
from grpo.model.target import choose_device
from grpo.rollout import slots
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.trainer import Trainer
from grpo.types import Prompt

WARM_UP_STEPS = 2
"""First steps, in which kernels are loaded: no part of the speed."""


@dataclass(frozen=True)
class Trial:
    """One short run: where its memory stood, and how fast it was. Bytes."""

    batch_size: int
    steps: int
    retries: int
    rows: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int
    samples_per_minute: float
    errors: dict[str, float]
    """By phase: predicted over measured peak of the process, less 1, at the last step."""

    @property
    def status(self) -> str:
        return "split after running out" if self.retries else "fits"


def train(
    config: Config, *, prediction_bias: float = 1.0, after_step: Callable[[], None] = lambda: None
) -> Trial:
    """Run the trainer, and read what it wrote."""
    with open_run(config, prediction_bias=prediction_bias) as run:
        trainer = Trainer(run, Console(quiet=True), after_step=lambda step: after_step())
        trainer.train(StopRequest())
        rows = {phase: plan.rows for phase, plan in run.memory.plan.items()}
        folder, size = run.folder, run.config.num_rows
    memory, metrics = read_lines(folder / MEMORY_FILE), read_lines(folder / METRICS_FILE)
    shutil.rmtree(folder)
    times = [line["step_time"] for line in metrics if "step_time" in line]
    timed = times[WARM_UP_STEPS:] or times
    last = [line for line in memory if line["step"] == memory[-1]["step"]]
    return Trial(
        batch_size=size,
        steps=len(times),
        retries=sum(line["retries"] for line in memory),
        rows=rows,
        allocated_bytes=max(line["peak_bytes"] for line in memory),
        reserved_bytes=max(line["reserved_bytes"] for line in memory),
        device_used_bytes=max(line["device_used_bytes"] for line in memory),
        samples_per_minute=60 * size * len(timed) / sum(timed),
        errors={line["phase"]: line["predicted_bytes"] / line["device_used_bytes"] - 1 for line in last},
    )


def check_card(
    config: Config,
    case: Case,
    *,
    contenders: Sequence[Contender],
    batch_sizes: Sequence[int],
    limit: str,
    long_steps: int,
    short_steps: int = 6,
) -> dict[str, Any]:
    """All parts, each reported even when another fails. case: what the contenders race at."""

    def guarded(name: str, part: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            result = part()
        except Exception as error:  # the other parts are still worth having
            logger.exception("{} failed", name)
            result = {"failed": f"{type(error).__name__}: {error}"}
        _release_card()
        logger.warning("{}: {:.0f} s", name, time.monotonic() - start)
        return result

    short = replace(config, steps=short_steps)
    return {
        "device": _device_name(),
        "torch": torch.__version__,
        "model": config.model,
        "max_new_tokens": config.sampling.max_new_tokens,
        "rows": guarded("row table", lambda: [_row(replace(short, batch_size=n)) for n in batch_sizes]),
        "race": guarded("race", lambda: _raced(case, contenders)),
        "recorded steps": guarded("recorded steps", lambda: _recorded(config)),
        "whole rollout": guarded("whole rollout", lambda: _whole(short, limit, max(batch_sizes))),
        "limit": guarded("limit", lambda: _limited(config, limit, long_steps, short_steps)),
        "recovery": guarded("recovery", lambda: _recovery(short, limit)),
        "emptied cache": guarded("emptied cache", lambda: _emptied(short)),
    }


def _release_card() -> None:
    """Nothing of one part is left on the card for the next, nor its limit."""
    gc.collect()
    release_cache()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def _row(config: Config) -> dict[str, Any]:
    """A batch all at once, as the well-known recipes do it."""
    rows = config.num_rows
    trial = train(replace(config, rollout_rows=rows, score_rows=rows, train_rows=rows))
    return {**asdict(trial), "status": trial.status}


def _raced(case: Case, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Samples a minute, and how many times those of TRL with Hugging Face's generate, rewards on."""
    with TemporaryDirectory() as folder:
        outcome = race(case, Path(folder), contenders=contenders, device=choose_device().type)
    seconds = median(step.seconds for step in outcome.steps["ours"])
    ratios = {f"times {other}": outcome.ratio(other) for other in contenders[1:]}
    memory = {f"memory of {other}": outcome.memory_ratio(other) for other in contenders[1:]}
    return {"samples_per_minute": 60 * case.batch_size / seconds, **ratios, **memory}


def _recorded(config: Config, rounds: int = 5) -> dict[str, float]:
    """Seconds of a rollout with recorded steps and with plain ones, in turns (medians); equal completions."""
    policy = load_policy(config.model, choose_device(config.device), config.precision)
    sampler = RolloutModel(policy.model, policy.target.dtype).model
    groups = config.num_rows // config.group_size
    prompts = [Prompt(str(n), "P: 8/8/8/8/8/8/8/8 w - - 0 1", {}) for n in range(groups)]
    uniforms = step_uniforms(config.num_rows, config.sampling.max_new_tokens, seed=0, step=0)

    def timed(name: str) -> list[str]:
        start = time.perf_counter()
        made = rollout(sampler, policy.tokenizer, prompts, uniforms, config.sampling, rows=config.num_rows)
        times[name].append(time.perf_counter() - start)
        return made.completions

    times: dict[str, list[float]] = {"recorded": [], "plain": []}
    for _ in range(1 + rounds):
        recorded = timed("recorded")
        with replaced(slots, step_recorder=lambda model: None):
            plain = timed("plain")
    equal = sum(map(str.__eq__, recorded, plain)) / len(plain)
    return {"equal": equal, **{name: median(taken[1:]) for name, taken in times.items()}}


def _whole(config: Config, limit: str, rows: int) -> dict[str, Any]:
    """Whether so many rows are sampled at once under a limit."""
    trial = train(replace(config, batch_size=rows, memory_limit=limit))
    return {"limit": limit, "whole": trial.rows["sample"] == rows, **asdict(trial)}


def _limited(config: Config, limit: str, long_steps: int, short_steps: int) -> dict[str, Any]:
    """The largest batch that needs no splitting under a limit, for many steps; none may run out."""
    auto = train(replace(config, batch_size="auto", memory_limit=limit, steps=short_steps))
    long = train(replace(config, memory_limit=limit, steps=long_steps))
    return {
        "limit": limit,
        "auto": asdict(auto),
        "long": asdict(long),
        "zero out of memory": not long.retries,
    }


def _recovery(config: Config, limit: str) -> dict[str, Any]:
    """Predictions 40 % and more too low: the plan is too large, memory does run out, the run goes on."""
    wrong = replace(config, batch_size=config.max_batch_size, memory_limit=limit)
    return asdict(train(wrong, prediction_bias=0.3))


def _emptied(config: Config) -> dict[str, Any]:
    """The folk advice of emptying the cache after each step, against leaving it: speed and reserved bytes."""

    def empty() -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    config = replace(config, steps=4 * config.steps)
    kept, emptied = train(config), train(config, after_step=empty)
    return {
        "speed": emptied.samples_per_minute / kept.samples_per_minute,
        "reserved": emptied.reserved_bytes / kept.reserved_bytes,
    }


def summary(results: dict[str, Any]) -> list[str]:
    """Lines for people."""
    lines = [f"{results['device']}, torch {results['torch']}"]
    if isinstance(results["rows"], list):
        lines.append("batch  allocated  reserved  used       samples/min  status")
        for row in results["rows"]:
            sizes = (row[f"{name}_bytes"] / GB for name in ("allocated", "reserved", "device_used"))
            shown = "  ".join(f"{size:6.2f} GB" for size in sizes)
            lines.append(
                f"{row['batch_size']:5}  {shown}  {row['samples_per_minute']:11,.0f}  {row['status']}"
            )
    parts = (name for name, part in results.items() if isinstance(part, dict))
    return lines + [f"{name}: {json.dumps(results[name])}" for name in parts]


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
