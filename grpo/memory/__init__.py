"""What a device holds, phase by phase. Usable without the rest of the package."""

from grpo.memory.adaptive import AdaptiveMemory
from grpo.memory.budget import Budget, make_budget
from grpo.memory.live import peak_live_bytes
from grpo.memory.loop import Fit
from grpo.memory.monitor import MemoryMonitor
from grpo.memory.phase import PhaseSpec
from grpo.memory.planner import DoesNotFit, largest_rows
from grpo.memory.predictor import Predictor
from grpo.memory.process import ProcessMemory
from grpo.memory.recovery import is_out_of_memory, survive
from grpo.memory.shape import Shape

__all__ = [
    "AdaptiveMemory",
    "Budget",
    "DoesNotFit",
    "Fit",
    "MemoryMonitor",
    "PhaseSpec",
    "Predictor",
    "ProcessMemory",
    "Shape",
    "is_out_of_memory",
    "largest_rows",
    "make_budget",
    "peak_live_bytes",
    "survive",
]
