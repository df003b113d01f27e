"""Measures this machine's training speed, in tokens a second, as it is and with a switch the other way.

Each switch is looked up, not guessed from the machine's name; nothing is switched: a remedy says what to
type.
Rates are of real steps on random tokens, so that no text is needed. Left out: several devices, and GRPO's
rollout, whose rate every run logs.
"""

import os
import time
from statistics import median
from typing import Any

import torch
from loguru import logger
from torch.utils.benchmark import Timer
from transformers import PretrainedConfig

from grpo.config.groups import OptimizerSettings
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import GuardedOptimizer
from grpo.logs.tables import Row
from grpo.model.load import context_length
from grpo.model.target import compute_dtype, make_target, multiplies_in_bf16
from grpo.workbench.lm import accumulate_lm
from grpo.workbench.machine import PRECISIONS, no_compiler
from grpo.workbench.models import model_shape, random_model
from grpo.workbench.settings import Check

ON, OFF, NOT_HERE = "on", "off", "not here"


def switches(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """bf16, TF32, the compiler and threads, for training on `device` with matrix products in `dtype`.

    Of each: whether it is on, off or not here, what was found, and what to type if it is off.
    """
    kind, cores, threads = device.type, available_cores(), torch.get_num_threads()
    bf16 = (ON, "native", "")
    if not multiplies_in_bf16(device):
        bf16 = (NOT_HERE, f"{kind} does not multiply in it natively", "")
    elif dtype != torch.bfloat16:
        bf16 = (OFF, f"native, but precision is {PRECISIONS[dtype]}", "--precision bf16")
    tf32 = (OFF, "fp32 products are exact", "grpo-lean sweep --tf32, for fp32 alone")
    if kind != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        tf32 = (NOT_HERE, "of NVIDIA cards since Ampere", "")
    elif torch.backends.cuda.matmul.allow_tf32:
        tf32 = (ON, "fp32 products are rounded to it", "")
    compiler = (OFF, "possible", "grpo-lean sweep --compile; --compile here times it")
    if reason := no_compiler(device):
        why, _, remedy = reason.partition(": ")
        compiler = (OFF if kind in ("cpu", "cuda") else NOT_HERE, why, remedy)
    thread = (ON, f"{threads} of {cores} cores", "")
    if threads < cores:
        thread = (OFF, thread[1], f"export OMP_NUM_THREADS={cores}")
        if kind != "cpu":
            thread = (NOT_HERE, f"{thread[1]}, which matters little on {kind}", "")
    states = {"bf16": bf16, "TF32": tf32, "compile": compiler, "threads": thread}
    columns = ("state", "found", "to switch it on")
    return [{"switch": name, **dict(zip(columns, state, strict=True))} for name, state in states.items()]


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of two square matrices, by the median."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    return float(2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median)


def training_rates(settings: Check, device: torch.device) -> list[Row]:
    """Tokens a second as it is configured, then with one switch the other way, where that is cheap to try.

    By the median, with how far apart the times of steps were, as a share.
    """
    dtype, cores, threads = (
        compute_dtype(settings.precision, device),
        available_cores(),
        torch.get_num_threads(),
    )
    ways: dict[str, dict[str, Any]] = {f"as it is, in {PRECISIONS[dtype]}": {}}
    if multiplies_in_bf16(device):
        other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        ways[f"in {PRECISIONS[other]}"] = {"dtype": other}
    if device.type == "cuda" and dtype == torch.float32:
        ways["with TF32"] = {"tf32": True}
    if device.type == "cpu" and cores > 1:
        count = cores if threads < cores else 1
        ways[f"with {count} threads"] = {"threads": count}
    if settings.compile and no_compiler(device) is None:
        ways["compiled"] = {"compiled": True}
    rows, shape, first = list[Row](), model_shape(settings), 0.0
    context = min(settings.context, context_length(shape))
    for name, changes in ways.items():
        times = _step_times(settings, shape, context, device, **{"dtype": dtype, **changes})
        rate = settings.batch_size * context / median(times)
        first = first or rate
        logger.info("{}: {:,.0f} tokens/s", name, rate)
        rows.append(
            {
                "step": name,
                "tokens/s": f"{rate:,.0f}",
                "of the first": f"{rate / first:.2f}",
                "spread": f"{(max(times) - min(times)) / median(times):.0%}",
            }
        )
    return rows


def _step_times(
    settings: Check,
    shape: PretrainedConfig,
    context: int,
    device: torch.device,
    *,
    dtype: torch.dtype,
    threads: int | None = None,
    tf32: bool = False,
    compiled: bool = False,
) -> list[float]:
    """Seconds of real steps: forward, backward, clipping, AdamW."""
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(threads or before[0])
    torch.backends.cuda.matmul.allow_tf32 = tf32 or before[1]
    model = random_model(make_target(shape, device, dtype))
    if compiled:
        model.base_model.compile()
    guarded = GuardedOptimizer(model, make_optimizer(model, OptimizerSettings()), 1.0)
    vocabulary = shape.get_text_config(decoder=True).vocab_size
    windows = torch.randint(vocabulary, (settings.batch_size, context + 1))
    times = []
    try:
        for _ in range(1 + settings.steps):
            start = time.perf_counter()
            guarded.step(lambda: accumulate_lm(model, windows, dtype=dtype, rows=settings.batch_size))
            times.append(time.perf_counter() - start)  # it reads the loss, and so waits for the device
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]
    return times[1:]  # in the first one kernels are compiled and loaded
