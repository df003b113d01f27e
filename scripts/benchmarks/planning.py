"""The planner at work: the rows it chooses against trying them out, and the time it takes of a step."""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import FrameType, ModuleType
from typing import Any

import torch
from loguru import logger
from transformers import PretrainedConfig, Qwen2Config

from benchmarks.results import finish, until_stopped
from grpo import memory
from grpo.config import Config
from grpo.config.groups import LoraSettings
from grpo.memory import largest_rows
from grpo.memory.budget import CONTEXT_BYTES, GB, card_memory
from grpo.memory.rows import even_rows
from grpo.model.load import default_shape
from grpo.model.target import make_target
from grpo.plan.absent import plan_without_weights
from grpo.plan.trace import Card, TracedPhases
from grpo.plan.workload import Workload
from grpo.trainer import Trainer

LEAST_SHARE = 0.9
"""Of the rows that fit."""
LONGEST_PROMPT = 120
QWEN_HALF_B = Qwen2Config(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip
MOST_OVERHEAD = 0.01
"""Of a step."""


def rows(quick: bool = False, output: Path | None = None) -> int:
    """The rows that a plan for a card that is not there chooses, against trying them out.

    Args:
        quick: Two settings, not ten.
        output: A JSON file for every phase.
    """
    cases = ((64, 8), (512, 8), (512, 16), (512, 24), (512, 80))
    models = {
        "GPT-2 124 M": (default_shape(), LoraSettings()),
        "Qwen's 0.5 B, LoRA": (QWEN_HALF_B, LoraSettings(lora_rank=16)),
    }
    trials = until_stopped(
        {"model": name, **trial}
        for name, (shape, lora) in models.items()
        for trial in _planned_rows(name, shape, lora, cases[:1] if quick else cases)
    )
    least = min((trial["planned"] / max(1, trial["of even size"]) for trial in trials), default=0.0)
    within = all(trial["planned"] <= trial["fit"] for trial in trials)
    verdicts = {
        f"{len(trials)} plans, and none is of more rows than fit": within,
        f"at least {least:.0%} of what fits is planned (bar {LEAST_SHARE:.0%})": least >= LEAST_SHARE,
    }
    return finish("Rows at once", trials, verdicts, trials, output)


def _planned_rows(
    name: str, shape: PretrainedConfig, lora: LoraSettings, cases: tuple[tuple[int, int], ...]
) -> Iterator[dict[str, Any]]:
    """Each phase on cards that are not there. fit: the most rows; even: in as many passes, of like size."""
    traced: dict[str, TracedPhases] = {}  # by the kind of checkpointing, for the next card
    for batch_size, card_gb in cases:
        config = Config(device="cuda", batch_size=batch_size, lora=lora)
        work = Workload(config, make_target(shape, torch.device("cuda"), "bf16"), LONGEST_PROMPT)
        card = Card(card_memory(card_gb * GB), utilization=config.memory_utilization)
        card.held_bytes, start = CONTEXT_BYTES, time.perf_counter()
        work, plan = plan_without_weights(work, card)
        seconds = time.perf_counter() - start
        logger.info("{}, {} rows, {} GB: planned in {:.0f} s", name, batch_size, card_gb, seconds)
        truth = traced.setdefault(work.config.gradient_checkpointing, TracedPhases(work.phase_settings()))
        resident = work.resident(truth.num_parameters, truth.trained_sizes, truth.frozen_bytes)
        room = card.budget().usable_bytes - card.used_bytes() - sum(resident.values())
        limits = {"batch_size": batch_size, "group_size": config.group_size}
        for phase, size in plan.sizes.items():
            added = partial(truth.added_bytes, phase)
            most = largest_rows(lambda rows: added(work.size(rows)) <= room, **limits) or 0  # noqa: B023
            row = {"rows": batch_size, "card, GB": card_gb, "phase": phase, "planned": size.rows}
            row |= {"fit": most, "of even size": even_rows(most, **limits)}
            yield {**row, "seconds": round(seconds)}


def overhead(steps: int = 20, skip: int = 2, batch_size: int = 64, output: Path | None = None) -> int:
    """What measuring and planning memory cost of a training step on the bundled model.

    Args:
        steps: Steps that are timed.
        skip: Steps before, in which tensors are counted one by one.
        batch_size: Completions a step.
        output: A JSON file for every function that took time.
    """
    if steps < 1:
        raise SystemExit(f"--steps is {steps}: give at least 1.")
    with TemporaryDirectory() as folder:
        trainer = Trainer(Config(
            steps=skip + steps, batch_size=batch_size, model="rook-tiny", engine="off", eval_interval=0,
            checkpoint_interval=0, runs_dir=Path(folder),
        ))  # fmt: skip
        took = []
        with seconds_by_function(memory) as seconds:
            for step in trainer:
                took.append(step.metrics["step_time"])
                if step.number <= skip:
                    seconds.clear()
                    took.clear()
    whole = fmean(took)
    parts = [
        {"function": name, "ms a step": f"{1e3 * spent / steps:.2f}", "share": f"{spent / steps / whole:.3%}"}
        for name, spent in seconds.most_common(10)
    ]
    share = sum(seconds.values()) / steps / whole
    parts.append({"function": "a step", "ms a step": f"{1e3 * whole:.2f}", "share": "100%"})
    sentence = f"measuring and planning take {share:.3%} of {steps} steps (bar {MOST_OVERHEAD:.0%})"
    return finish("", parts, {sentence: share <= MOST_OVERHEAD}, parts, output)


@contextmanager
def seconds_by_function(package: ModuleType) -> Iterator[Counter[str]]:
    """Filled while inside: how long this thread is in each function of the package, seen every millisecond.

    What its functions call of ours, such as a pass of the model, is not theirs; what they call of others is.
    """
    seconds: Counter[str] = Counter()
    own = Path(package.__file__).parent
    ours, own = str(own.parent), str(own)
    seen = time.perf_counter()

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal seen
        since, seen = seen, time.perf_counter()
        while frame is not None and not frame.f_code.co_filename.startswith(ours):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(own):
            seconds[frame.f_code.co_qualname] += seen - since

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        yield seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
