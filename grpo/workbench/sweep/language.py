"""Plain language modelling at one batch size: the same windows in the same order, cut into batches.

Updates come in stretches from one evaluation to the next; time and memory are those of the stretches.
Left out: checkpoints, and the last batch where it would not be full.
"""

import math
import time
from contextlib import ExitStack
from dataclasses import replace
from math import fsum
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.learning.optimizer import learning_rate, make_optimizer, set_learning_rate
from grpo.learning.step import Stepper
from grpo.memory import Device
from grpo.memory.fit import Peak
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.target import compute_dtype
from grpo.workbench.corpus import open_corpus
from grpo.workbench.language import accumulate_lm, heldout_loss
from grpo.workbench.models import load_or_make, random_model
from grpo.workbench.sweep.settings import SweepSettings
from grpo.workbench.sweep.worker import Say, SizeTask, point, time_facts

EVAL_ROWS = 8
"""Held-out windows at once: their memory must not be what decides whether a small batch fits."""
CURVE_POINTS = 200
"""Points of a training curve, about; each is a mean over the updates since the one before."""


def train_language(task: SizeTask, say: Say) -> None:
    """All updates of one size. FloatingPointError where the loss ends up not finite."""
    with ExitStack() as limited:
        _train(task, say, limited)


def _train(task: SizeTask, say: Say, limited: ExitStack) -> None:
    settings, device = task.settings, torch.device(task.settings.device)
    dtype = compute_dtype(settings.precision, device)
    corpus = open_corpus(settings.data, settings.model)
    heldout = corpus.heldout_windows(settings.heldout, settings.model.context)
    model = _model(settings, device, dtype)
    schedule = replace(settings.optimizer, learning_rate=task.learning_rate, warmup_steps=task.warmup_updates)
    optimizer = make_optimizer(model, schedule)
    stepper = Stepper(model, optimizer, schedule.max_grad_norm)
    there = Device(device, utilization=1.0, limit_bytes=settings.memory_limit_bytes)
    held = _first_pass(task, model, heldout, there, dtype, limited)
    say({"row": {"held_bytes": held}})

    generator = torch.Generator().manual_seed(settings.seed)
    units = task.batch_size * settings.row_units
    seconds: list[float] = []
    losses: list[float] = []
    rate = learning_rate(0, task.updates, schedule)

    def update(number: int) -> None:
        nonlocal rate
        start = time.perf_counter()
        windows = corpus.train_windows(task.batch_size, settings.model.context, generator)
        rate = learning_rate(number - 1, task.updates, schedule)
        set_learning_rate(optimizer, rate)
        rows = settings.train_rows or task.batch_size
        checkpointing = choose_checkpointing(settings.gradient_checkpointing)
        metrics = stepper.step(
            lambda: accumulate_lm(model, windows, dtype=dtype, rows=rows, checkpointing=checkpointing)
        )
        seconds.append(time.perf_counter() - start)
        losses.append(metrics["loss"])

    def evaluate(number: int) -> None:
        mean, error = heldout_loss(model, heldout, dtype=dtype, rows=EVAL_ROWS)
        if not math.isfinite(mean) or (number and stepper.num_skipped == number):
            raise FloatingPointError(f"after {number} updates the held-out loss is {mean}")
        say({"row": {"heldout_stderr": error}})
        say(point(number, number * units, fsum(seconds), rate, heldout=mean))

    evaluate(0)
    every, last = max(1, task.updates // CURVE_POINTS), 0
    for end in evaluation_points(task.updates, task.evaluations):
        with there.measure() as peak:
            for number in range(last + 1, end + 1):
                update(number)
                if number % every == 0 or number == end:
                    finite = [loss for loss in losses if math.isfinite(loss)]
                    say(
                        point(
                            number,
                            number * units,
                            fsum(seconds),
                            rate,
                            train=fmean(finite) if finite else None,
                        )
                    )
                    losses.clear()
        say({"row": {**time_facts(seconds, units), **_memory_facts(peak, held)}})
        evaluate(end)
        last = end


def evaluation_points(updates: int, evaluations: int) -> list[int]:
    """Updates after which to evaluate: as many, at equal shares of the way; fewer where updates are."""
    return sorted({max(1, round(updates * k / evaluations)) for k in range(1, evaluations + 1)})


def _model(settings: SweepSettings, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    if settings.model.arch is not None:
        return random_model(settings.model.config(), device, dtype, seed=settings.seed)
    return load_or_make(settings.model, device, dtype)


def _first_pass(
    task: SizeTask,
    model: PreTrainedModel,
    windows: Tensor,
    there: Device,
    dtype: torch.dtype,
    limited: ExitStack,
) -> int:
    """Take a gradient and drop it, so that threads and kernels are there; then limit, then compile.

    Returns the bytes that the process holds before the first update.
    """
    accumulate_lm(model, windows[:1], dtype=dtype, rows=1)
    model.zero_grad(set_to_none=True)
    with there.measure() as peak:
        pass
    if task.settings.memory_limit_bytes is not None:
        limited.enter_context(there.capped())
    if task.settings.compile:
        model.base_model.compile()
    return peak.process_bytes


def _memory_facts(peak: Peak, held: int) -> dict[str, int]:
    added = peak.process_bytes - held if peak.added_bytes is None else peak.added_bytes
    return {"peak_bytes": peak.process_bytes, "added_bytes": added}
