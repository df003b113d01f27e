"""The device, dtype and kernels that a model runs with: settled once from the settings."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import PretrainedConfig

from grpo.config.groups import BUNDLED, Precision
from grpo.environment import grows_segments
from grpo.errors import UserError
from grpo.model import attention
from grpo.model.ways import kind_of

AUTO = "auto"
MIB = 2**20
HUB_DEFAULT = "jrahn/RookWorld-LM-124M"

_CPU_FLAGS_OF_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class Target:
    """Which model, on which device, in which precision, by which attention. No weights."""

    model_config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    """The dtype of matrix products."""
    attention: str
    """The name transformers knows it by."""
    grows_segments: bool = True
    """Whether the allocator has segments that grow, on CUDA."""
    came_with: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Settings of the model's stored configuration that are others while it is trained, such as dropout."""

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of weights that are trained, of their gradients and moments."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_mixed_precision(self) -> bool:
        """Whether products are less exact than the weights they are taken with."""
        return self.dtype != self.master_dtype

    @property
    def vocab_size(self) -> int:
        return int(self.model_config.get_text_config(decoder=True).vocab_size)

    def block_bytes(self, size: int) -> int:
        """Returns the bytes that the allocator takes for a tensor of so many.

        torch's on CUDA (c10/cuda/CUDACachingAllocator.cpp): multiples of 512. Segments that do not grow are
        multiples of 2 MiB for more than 10, and what remains of one is cut off from 1 MiB on.
        """
        if self.on_cpu:
            return size
        rounded = -(-size // 512) * 512
        if self.device.type != "cuda" or rounded < 10 * MIB or self.grows_segments:
            return rounded
        segment = -(-rounded // (2 * MIB)) * 2 * MIB
        return segment if segment - rounded <= MIB else rounded


def make_target(
    model_config: PretrainedConfig, device: torch.device, precision: Precision | torch.dtype = "auto"
) -> Target:
    """precision: a setting, which may be auto, or the dtype that it has come to."""
    dtype = precision if isinstance(precision, torch.dtype) else compute_dtype(precision, device)
    attends_by = choose_attention(device, dtype)
    kind = kind_of(model_config)
    if kind is not None and not kind._supports_sdpa:  # Gemma 2, whose scores have a soft cap
        attends_by = "eager"
    return Target(model_config, device, dtype, attends_by, grows_segments())


def choose_device(name: str = AUTO) -> torch.device:
    """`auto` is a CUDA or XPU device if there is one. ValueError for a device that is not there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == AUTO:
        known = accelerator is not None and accelerator.type in ("cuda", "xpu")
        return torch.device(accelerator.type, 0) if accelerator and known else torch.device("cpu")
    try:
        return torch.empty(0, device=name).device  # with its index: cuda is cuda:0
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = f"cpu and {accelerator.type}" if accelerator else "cpu"
        reason = str(error).splitlines()[0]
        message = f"device is {name!r}, which cannot be used here ({reason}): give {there}."
        raise UserError(message) from error


def is_same_device(name: str | None, device: torch.device) -> bool:
    """Whether a setting names this device, which need not be there: `cuda` is `cuda:0`, and None any.

    ValueError for what is the name of no device.
    """
    if name is None or (name == AUTO and device.type != "cpu"):
        return True
    if name == AUTO:
        return choose_device(AUTO) == device
    try:
        named = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is {name!r}: give cpu, cuda, cuda:1 or the like.") from error
    return (named.type, named.index or 0) == (device.type, device.index or 0)


def choose_model(name: str, device: torch.device, *, absent: str | None = None) -> str:
    """Resolve `auto`, and say in one line which model it is and how to choose another.

    absent: the memory of a card that is only planned for.
    """
    if name != AUTO:
        return name
    on_cuda = device.type == "cuda"
    chosen = HUB_DEFAULT if on_cuda else BUNDLED
    why = f"{'a' if on_cuda else 'no'} CUDA device is present"
    if absent is not None:
        why = f"a card of {absent} is planned for"
    logger.info("model: {} ({}); choose with --model {}, a hub id or a folder", chosen, why, BUNDLED)
    return chosen


_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Returns the dtype of matrix products.

    `auto` is bf16 where the device multiplies in it natively, and fp16 on CUDA cards that do not (before
    compute capability 8.0, such as T4 and V100).
    """
    if precision == "auto":
        if multiplies_in_bf16(device):
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    return _DTYPES[precision]


def multiplies_in_bf16(device: torch.device) -> bool:
    """Whether it does so natively; else each product is emulated, many times slower than in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(_CPU_FLAGS_OF_BF16 & _cpu_flags())


def _cpu_flags() -> set[str]:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.partition(":")[2].split())
    return set()


def choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    """The name transformers knows it by: torch's fused attention, see `model/attention.py`.

    On CUDA not cuDNN's, which plans anew for every shape: micro-batches seldom have the same.
    """
    attention.register()
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return attention.IN_FP32 if device.type == "cpu" and dtype.itemsize < 4 else "sdpa"
