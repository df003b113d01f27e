"""What this machine reaches in training, in tokens a second, as it is and with a switch the other way.

Each switch is looked up, not guessed from the machine's name; nothing is switched: a remedy says what to
type.
Rates are of real steps on random tokens, so that no text is needed. Left out: several devices, and GRPO's
rollout, whose rate every run logs.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from grpo.config.groups import OptimizerSettings, Precision
from grpo.config.limits import COUNT, check_limits
from grpo.config.settings import Config
from grpo.workbench.spec import MadeModel
from grpo.workbench.task import model_name, model_shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckSettings:
    """Measure training on this machine, and say which switches are off."""

    model: str = "auto"
    """Hub id or folder of the model whose shape is trained, from random weights; auto: rook-tiny."""
    made: MadeModel = field(default_factory=MadeModel)
    batch_size: Annotated[int, COUNT] = 8
    """Windows of --context tokens in a step."""
    steps: Annotated[int, COUNT] = 3
    """Steps that are timed, at least, after a first one that is not."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native."""
    compile: bool = False
    """Time a compiled step as well: on a CPU compiling takes about a minute."""

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def train(self) -> Config:
        return Config(model=self.model)


def parse_check() -> CheckSettings:
    """From the command line."""
    return tyro.cli(CheckSettings, config=(tyro.conf.OmitArgPrefixes,))


@dataclass(frozen=True)
class Switch:
    """What makes training faster if it is on: how it stands (on, off, not here), and what to type if off."""

    name: str
    state: str
    found: str
    remedy: str = ""


def switches(device: "torch.device", dtype: "torch.dtype") -> list[Switch]:
    """bf16, TF32, the compiler and threads, for training on `device` with matrix products in `dtype`."""
    import torch

    from grpo.model.target import multiplies_in_bf16
    from grpo.workbench.machine import PRECISIONS, no_compiler

    bf16 = Switch("bf16", "on", "native")
    if not multiplies_in_bf16(device):
        bf16 = Switch("bf16", "not here", f"{device.type} does not multiply in it natively")
    elif dtype != torch.bfloat16:
        bf16 = Switch("bf16", "off", f"native, but precision is {PRECISIONS[dtype]}", "--precision bf16")
    tf32 = Switch("TF32", "off", "fp32 products are exact", "sweep_batch_sizes.py --tf32, for fp32 alone")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        tf32 = Switch("TF32", "not here", "of NVIDIA cards since Ampere")
    elif torch.backends.cuda.matmul.allow_tf32:
        tf32 = Switch("TF32", "on", "fp32 products are rounded to it")
    compiler = Switch("compile", "off", "possible", "sweep_batch_sizes.py --compile; --compile here times it")
    if reason := no_compiler(device):
        why, _, remedy = reason.partition(": ")
        compiler = Switch("compile", "off" if device.type in ("cpu", "cuda") else "not here", why, remedy)
    cores, threads = available_cores(), torch.get_num_threads()
    found = f"{threads} of {cores} cores"
    thread = Switch("threads", "on", found)
    if threads < cores:
        thread = Switch("threads", "off", found, f"export OMP_NUM_THREADS={cores}")
        if device.type != "cpu":
            thread = Switch("threads", "not here", f"{found}, which matters little on {device.type}")
    return [bf16, tf32, compiler, thread]


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matmul_rate(device: "torch.device", dtype: "torch.dtype") -> float:
    """Floating-point operations a second of a product of two square matrices, by the median."""
    import torch
    from torch.utils.benchmark import Timer

    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.randn(size, size, device=device).to(dtype)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    return float(2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median)


@dataclass(frozen=True)
class Rate:
    """Tokens a second of a training step, by the median, and how far apart its times were, as a share."""

    name: str
    tokens_per_s: float
    spread: float


def training_rates(settings: CheckSettings, device: "torch.device") -> Iterator[Rate]:
    """As it is configured, then with one switch the other way, where that is cheap to try."""
    import torch

    from grpo.model.target import compute_dtype, multiplies_in_bf16
    from grpo.workbench.machine import PRECISIONS, no_compiler

    dtype = compute_dtype(settings.precision, device)
    yield training_rate(f"as it is, in {PRECISIONS[dtype]}", settings, device, PRECISIONS[dtype])
    if multiplies_in_bf16(device):
        other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        yield training_rate(f"in {PRECISIONS[other]}", settings, device, PRECISIONS[other])
    if device.type == "cuda" and dtype == torch.float32:
        with _tf32_on():
            yield training_rate("with TF32", settings, device, "fp32")
    cores, threads = available_cores(), torch.get_num_threads()
    if device.type == "cpu" and cores > 1:
        other_threads = cores if threads < cores else 1
        with _threads_are(other_threads):
            yield training_rate(f"with {other_threads} threads", settings, device, PRECISIONS[dtype])
    if settings.compile and no_compiler(device) is None:
        yield training_rate("compiled", settings, device, PRECISIONS[dtype], compiled=True)


def training_rate(
    name: str,
    settings: CheckSettings,
    device: "torch.device",
    precision: Precision,
    *,
    compiled: bool = False,
) -> Rate:
    """Of real steps: forward, backward, clipping, AdamW."""
    import torch

    from grpo.learning.optimizer import make_optimizer
    from grpo.learning.step import Stepper
    from grpo.model.load import context_length
    from grpo.model.target import make_target
    from grpo.workbench.lm import accumulate_lm, random_model

    shape = model_shape(settings.train, settings.made)
    target, context = make_target(shape, device, precision), min(settings.made.context, context_length(shape))
    model = random_model(shape, target)
    if compiled:
        model.base_model.compile()
    stepper = Stepper(model, make_optimizer(model, OptimizerSettings()), 1.0)
    vocabulary = shape.get_text_config(decoder=True).vocab_size
    windows = torch.randint(vocabulary, (settings.batch_size, context + 1))

    def step() -> None:
        stepper.step(lambda: accumulate_lm(model, windows, dtype=target.dtype, rows=settings.batch_size))

    step()  # in which kernels are compiled and loaded
    times = []
    for _ in range(settings.steps):
        start = time.perf_counter()
        step()  # it reads the loss, and so waits for the device
        times.append(time.perf_counter() - start)
    spread = (max(times) - min(times)) / median(times)
    return Rate(name, settings.batch_size * context / median(times), spread)


@contextmanager
def _threads_are(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _tf32_on() -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def switches_table(found: Sequence[Switch], device_name: str) -> Table:
    """A row a switch, and what to type where it is off."""
    table = Table("switch", "state", "found", "to switch it on", title=device_name, title_justify="left")
    for switch in found:
        table.add_row(switch.name, switch.state, switch.found, switch.remedy)
    return table


def rates_table(rates: Sequence[Rate], what: str) -> Table:
    """A row a way of training; the first one is what the others are compared with."""
    table = Table(title=f"Training {what}", title_justify="left")
    for column in ("step", "tokens/s", "of the first", "spread"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for rate in rates:
        share = f"{rate.tokens_per_s / rates[0].tokens_per_s:.2f}"
        table.add_row(rate.name, f"{rate.tokens_per_s:,.0f}", share, f"{rate.spread:.0%}")
    return table


def what_is_trained(settings: CheckSettings) -> str:
    """For a title."""
    return f"{model_name(settings.train, settings.made)}, {settings.batch_size} windows a step"
