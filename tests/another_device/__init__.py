"""An accelerator for machines without one: device.cpp, and runs on it in a process of their own."""

import subprocess
import types
from ctypes import CDLL, c_int64
from pathlib import Path

import torch

NAME = "pretend"
SOURCE = Path(__file__).parent / "device.cpp"


def build(library: Path, compiler: str) -> None:
    """Compile the device against the torch that is installed; some seconds."""
    place = Path(torch.__file__).parent
    include = [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
    command = [
        compiler,
        "-O0",
        "-std=c++20",
        "-fPIC",
        "-shared",
        *include,
        str(SOURCE),
        "-o",
        str(library),
        f"-L{place / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)


class AnotherDevice:
    """torch with the device, from here on in this process. Bytes."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self._library = CDLL(str(library))
        torch.utils.rename_privateuse1_backend(NAME)
        module = types.ModuleType(f"torch.{NAME}")
        for name, answer in {"is_available": True, "device_count": 1, "current_device": 0}.items():
            setattr(module, name, lambda answer=answer: answer)
        module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
        module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
        module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
        torch._register_device_module(NAME, module)
        # Tied weights are tied there as well, which CUDA needs no telling.
        torch.__future__.set_swap_module_params_on_conversion(True)
        self.device = torch.device(NAME, 0)

    def set_memory(self, size: int) -> None:
        """The memory that the device has, and says it has."""
        self._library.set_memory(c_int64(size))

    def set_limit(self, size: int) -> None:
        """Less than it says."""
        self._library.set_limit(c_int64(size))

    def allocated(self) -> int:
        return torch.accelerator.memory_allocated(self.device)
