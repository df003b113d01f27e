"""What NVIDIA's driver says of the processes on a card.

By NVML, where its Python binding is installed (the package nvidia-ml-py), or by the driver's own tool, which
takes a good part of a second.
"""

import os
import subprocess
from functools import cache
from importlib import import_module
from typing import Any
from xml.etree import ElementTree

import torch


def held_bytes(device: torch.device) -> int | None:
    """What this process holds on a card, context and libraries included; None where nobody tells.

    No binding, a driver that does not say (WSL), or a container in which processes have other numbers.
    """
    nvml, handle = _handle(device)
    if nvml is None:
        return None
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    return next((each.usedGpuMemory for each in processes if each.pid == os.getpid()), None)


@cache
def _handle(device: torch.device) -> tuple[Any, Any]:
    """The binding and what it calls the card; (None, None) without."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None, None
    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(_uuid(device))
    except nvml.NVMLError:
        return None, None


def neighbours(device: torch.device) -> str:
    """Who else holds memory on a card, for an error message; empty if nobody is known to."""
    try:
        return ", ".join(_others(_uuid(device)))
    except (OSError, subprocess.SubprocessError, ElementTree.ParseError):  # it is only a courtesy
        return ""


def _others(uuid: str) -> list[str]:
    """The other processes, displays among them, with what they hold."""
    command = ["nvidia-smi", "-q", "-x", "-i", uuid]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    fields = ("pid", "process_name", "used_memory")
    processes = ElementTree.fromstring(told).iter("process_info")
    known = (map(process.findtext, fields) for process in processes)
    return [f"{name} (process {pid}): {used}" for pid, name, used in known if pid != str(os.getpid())]


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
