"""What this machine is to a training process: device, precision, memory, and whether it can compile."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from grpo.config import SettingsError
from grpo.config.groups import Precision
from grpo.config.sizes import parse_size
from grpo.memory import Device
from grpo.memory.budget import readable
from grpo.model.target import choose_device, compute_dtype

PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64",
}  # fmt: skip


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


def look(device: str, precision: Precision, memory_limit: str | None = None) -> Machine:
    """The device, from a process of its own where to look at it opens a context that would stay.

    ValueError for a device that is not there.
    """
    limit_bytes = parse_size(memory_limit) if memory_limit else None
    if device == "cpu" or not torch.accelerator.is_available():
        return _look(device, precision, limit_bytes)
    task = json.dumps([device, precision, limit_bytes])
    ended = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True)
    if ended.returncode:
        raise SettingsError(ended.stderr.strip().rpartition("\n")[2] or "the device cannot be used.")
    return Machine(**json.loads(ended.stdout))


def _look(device: str, precision: Precision, limit_bytes: int | None) -> Machine:
    found = choose_device(device)
    there = Device(found, utilization=1.0, limit_bytes=limit_bytes)
    memory, budget = there.memory(), there.budget()
    return Machine(
        str(found), device_name(found), PRECISIONS[compute_dtype(precision, found)], budget.usable_bytes,
        memory.total_bytes, there.neighbours() or readable(memory.others_bytes), no_compiler(found),
    )  # fmt: skip


def device_name(device: torch.device) -> str:
    """The card, or the processor with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} ({platform.machine()})"
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return f"{processor}, {torch.get_num_threads()} threads"


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, with the remedy; None where it can."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    compiler = os.environ.get("CXX")
    found = [compiler] if compiler else ["g++", "clang++", "c++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in found):
        return "there is no C++ compiler: install g++, or name one in CXX"
    if device.type not in ("cpu", "cuda"):
        return f"not tried on {device.type}: train there without it"
    return None


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(asdict(_look(*json.loads(sys.argv[1])))))
    except ValueError as error:
        sys.exit(str(error))
