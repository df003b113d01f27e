"""The memory of a device, phase by phase. Usable without the rest of the package."""

from grpo.memory.budget import Budget
from grpo.memory.device import AbsentCard, Device
from grpo.memory.fit import Fit, Pass
from grpo.memory.live import peak_live_bytes
from grpo.memory.recovery import is_out_of_memory, survive
from grpo.memory.rows import DoesNotFit, PassSize, largest_multiple, largest_rows

__all__ = [
    "AbsentCard",
    "Budget",
    "Device",
    "DoesNotFit",
    "Fit",
    "Pass",
    "PassSize",
    "is_out_of_memory",
    "largest_multiple",
    "largest_rows",
    "peak_live_bytes",
    "survive",
]
