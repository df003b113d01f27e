"""This machine as a training process sees it: device, precision, memory, and whether it can compile."""

import importlib.util
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TypeVar

import torch

from grpo.config import SettingsError
from grpo.config.groups import Precision
from grpo.config.sizes import parse_size
from grpo.logs.starts import device_name
from grpo.memory import Device
from grpo.memory.budget import readable
from grpo.model.target import choose_device, choose_model, compute_dtype
from grpo.workbench.settings import Task

T = TypeVar("T", bound=Task)
PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Machine:
    """A device that is there. Bytes; `usable_bytes` is what a process could hold by itself."""

    device: str
    device_name: str
    precision: Precision
    usable_bytes: int
    total_bytes: int
    others: str
    """Who else holds memory on it, or how much."""
    no_compiler: str | None
    """Why torch.compile cannot work, or None."""


def resolve_auto(settings: T) -> tuple[T, Machine]:
    """The settings with the model, device and precision that auto means here, and the machine.

    ValueError for a device that is not there, or that cannot do what is asked of it.
    """
    machine = probe_device(settings.device, settings.precision, settings.memory_limit)
    if settings.compile and machine.no_compiler:
        raise SettingsError(f"compile is on, but {machine.no_compiler}; or leave it out.")
    if settings.tf32 and not machine.device.startswith("cuda"):
        raise SettingsError(f"tf32 is on, but {machine.device} has no such mode: leave it out.")
    model = settings.model
    if settings.arch is None:
        model = choose_model(model, torch.device(machine.device))
    return replace(settings, model=model, device=machine.device, precision=machine.precision), machine


def probe_device(device: str, precision: Precision, memory_limit: str | None = None) -> Machine:
    """Look at the device; at an accelerator from a process of its own, as its context would stay here.

    ValueError for a device that is not there.
    """
    if device == "cpu" or not torch.accelerator.is_available():
        return _look(device, precision, memory_limit)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_look, device, precision, memory_limit).result()


def _look(name: str, precision: Precision, memory_limit: str | None) -> Machine:
    device = choose_device(name)
    limit_bytes = parse_size(memory_limit) if memory_limit else None
    there = Device(device, utilization=1.0, limit_bytes=limit_bytes)
    memory = there.memory()
    return Machine(
        device=str(device),
        device_name=device_name(device),
        precision=PRECISIONS[compute_dtype(precision, device)],
        usable_bytes=there.budget().usable_bytes,
        total_bytes=memory.total_bytes,
        others=there.neighbours() or readable(memory.others_bytes),
        no_compiler=no_compiler(device),
    )


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, with the remedy; None where it can."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    compiler = os.environ.get("CXX")
    compilers = [compiler] if compiler else ["g++", "clang++", "c++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers):
        return "there is no C++ compiler: install g++, or name one in CXX"
    if device.type not in ("cpu", "cuda"):
        return f"not tried on {device.type}: train there without it"
    return None
