"""What makes training faster here if it is on: bf16, TF32, a compiler, all cores, fused kernels.

Each is looked up, not guessed from the machine's name. Nothing is switched: a remedy says what to type.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from grpo.model.target import choose_attention, multiplies_in_bf16
from grpo.workbench.machine import PRECISIONS, no_compiler

State = Literal["on", "off", "not here"]


@dataclass(frozen=True)
class Switch:
    """One thing that makes training faster: how it stands, and what to type where it is off."""

    name: str
    state: State
    found: str
    remedy: str = ""


def switches(device: torch.device, dtype: torch.dtype) -> list[Switch]:
    """All that are known, on or off, for training on `device` with matrix products in `dtype`."""
    return [
        _bf16(device, dtype),
        _tf32(device),
        _compiler(device),
        _threads(device),
        _fused_adamw(device),
        _attention(device, dtype),
        _library("oneDNN", torch.backends.mkldnn.is_available(), device, _onednn_cache()),
        _library("MKL", torch.backends.mkl.is_available(), device, ""),
    ]


def _bf16(device: torch.device, dtype: torch.dtype) -> Switch:
    if not multiplies_in_bf16(device):
        return Switch("bf16", "not here", f"{device.type} does not multiply in it natively")
    if dtype != torch.bfloat16:
        return Switch("bf16", "off", f"native, but precision is {PRECISIONS[dtype]}", "--precision bf16")
    return Switch("bf16", "on", "native")


def _tf32(device: torch.device) -> Switch:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return Switch("TF32", "not here", "of NVIDIA cards since Ampere")
    if torch.backends.cuda.matmul.allow_tf32:
        return Switch("TF32", "on", "fp32 products are rounded to it")
    return Switch("TF32", "off", "fp32 products are exact", "sweep_batch_sizes.py --tf32, for fp32 alone")


def _compiler(device: torch.device) -> Switch:
    reason = no_compiler(device)
    if reason is None:
        return Switch("compile", "off", "possible", "sweep_batch_sizes.py --compile; --compile here times it")
    found, _, remedy = reason.partition(": ")
    return Switch("compile", "off" if device.type in ("cpu", "cuda") else "not here", found, remedy)


def _threads(device: torch.device) -> Switch:
    cores, threads = available_cores(), torch.get_num_threads()
    found = f"{threads} of {cores} cores"
    if threads >= cores:
        return Switch("threads", "on", found)
    if device.type != "cpu":
        return Switch("threads", "not here", f"{found}, which matters little on {device.type}")
    return Switch("threads", "off", found, f"export OMP_NUM_THREADS={cores}")


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fused_adamw(device: torch.device) -> Switch:
    parameter = torch.nn.Parameter(torch.zeros(2, device=device))
    try:
        optimizer = torch.optim.AdamW([parameter], fused=True)
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    except RuntimeError as error:
        return Switch("fused AdamW", "off", str(error).splitlines()[0], "a newer torch")
    return Switch("fused AdamW", "on", "one kernel for all of an update")


def _attention(device: torch.device, dtype: torch.dtype) -> Switch:
    return Switch("fused attention", "on", choose_attention(device, dtype))


def _library(name: str, there: bool, device: torch.device, note: str) -> Switch:
    if device.type != "cpu":
        return Switch(name, "not here", "of the CPU")
    if there:
        return Switch(name, "on", note or "there")
    return Switch(name, "off", "this torch was built without it", "torch from pytorch.org")


def _onednn_cache() -> str:
    return f"keeps {os.environ.get('ONEDNN_PRIMITIVE_CACHE_CAPACITY', '1024')} kernels"
