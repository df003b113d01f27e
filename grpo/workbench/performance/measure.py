"""What this machine reaches in training, in tokens a second, as it is and with a switch the other way.

Rates are of real steps on random tokens, so that no text is needed. Left out: several devices, and GRPO's
rollout, whose rate every run logs.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table

from grpo.config.groups import OptimizerSettings
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import Stepper
from grpo.model.target import compute_dtype, multiplies_in_bf16
from grpo.workbench.language import accumulate_lm
from grpo.workbench.machine import PRECISIONS, no_compiler
from grpo.workbench.models import random_model
from grpo.workbench.performance.settings import PerformanceSettings
from grpo.workbench.performance.switches import Switch, available_cores

WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Rate:
    """Tokens a second of a training step; of the first one, seconds beyond that (compiling, loading)."""

    name: str
    tokens_per_s: float
    first_s: float


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of two square matrices, at best."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.randn(size, size, device=device).to(dtype)
    times: list[float] = []
    while len(times) < 10 and sum(times) < 1.0:  # one is enough of what is slow
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def training_rate(
    name: str,
    settings: PerformanceSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
) -> Rate:
    """Of real steps: forward, backward, clipping, AdamW."""
    config, context = settings.model.config(), settings.context
    model = random_model(config, device, dtype)
    if compiled:
        model.base_model.compile()
    stepper = Stepper(model, make_optimizer(model, OptimizerSettings()), 1.0)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    windows = torch.randint(vocabulary, (settings.batch_size, context + 1))
    times = []
    for _ in range(WARM_UP_STEPS + settings.steps):
        start = time.perf_counter()
        stepper.step(lambda: accumulate_lm(model, windows, dtype=dtype, rows=settings.batch_size))
        times.append(time.perf_counter() - start)
    steady = median(times[WARM_UP_STEPS:])
    return Rate(name, settings.batch_size * context / steady, max(0.0, times[0] - steady))


def training_rates(settings: PerformanceSettings, device: torch.device) -> Iterator[Rate]:
    """As it is configured, then with one switch the other way, where that is cheap to try."""
    dtype = compute_dtype(settings.precision, device)
    yield training_rate(f"as it is, in {PRECISIONS[dtype]}", settings, device, dtype)
    if multiplies_in_bf16(device):
        other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        yield training_rate(f"in {PRECISIONS[other]}", settings, device, other)
    if device.type == "cuda" and dtype == torch.float32:
        with _tf32_on():
            yield training_rate("with TF32", settings, device, dtype)
    if device.type == "cpu" and (threads := _other_threads()):
        with _threads_are(threads):
            yield training_rate(f"with {threads} threads", settings, device, dtype)
    if settings.compile and no_compiler(device) is None:
        yield training_rate("compiled", settings, device, dtype, compiled=True)


def _other_threads() -> int | None:
    """All cores where fewer are used, else one; None on a single core."""
    cores = available_cores()
    if cores == 1:
        return None
    return cores if torch.get_num_threads() < cores else 1


@contextmanager
def _threads_are(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _tf32_on() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# -------------------------------------------------------------------------------------------- tables


def switches_table(found: Sequence[Switch], device_name: str) -> Table:
    """A row a switch, and what to type where it is off."""
    table = Table("switch", "state", "found", "to switch it on", title=device_name, title_justify="left")
    colours = {"on": "green", "off": "yellow", "not here": "dim"}
    for switch in found:
        state = f"[{colours[switch.state]}]{switch.state}[/]"
        table.add_row(switch.name, state, switch.found, switch.remedy)
    return table


def rates_table(rates: Sequence[Rate], what: str) -> Table:
    """A row a way of training; the first one is what the others are compared with."""
    table = Table(title=f"Training {what}", title_justify="left")
    for column in ("step", "tokens/s", "of the first", "first step took longer by"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for rate in rates:
        share = f"{rate.tokens_per_s / rates[0].tokens_per_s:.2f}"
        table.add_row(rate.name, f"{rate.tokens_per_s:,.0f}", share, f"{rate.first_s:.1f} s")
    return table
