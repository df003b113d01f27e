"""What a device holds, phase by phase. Usable without the rest of the package."""

from grpo.memory.adaptive import AdaptiveMemory
from grpo.memory.budget import Budget, DeviceMemory, card_memory, limit_memory, make_budget
from grpo.memory.fit import PhaseFit, align
from grpo.memory.leaks.leak import LeakVerdict, LeakWatch, MemorySample, detect_leak
from grpo.memory.live import LiveBytes, peak_live_bytes
from grpo.memory.monitor import MemoryMonitor, MemoryReading, PhaseReading
from grpo.memory.phase import PhaseRecord, PhaseSpec
from grpo.memory.planner import (
    DoesNotFit,
    Footprint,
    PhasePlan,
    largest_multiple,
    largest_rows,
    plan_phase,
    smaller_rows,
)
from grpo.memory.predictor import Prediction, Predictor
from grpo.memory.recovery import Retry, is_out_of_memory, release_cache, survive
from grpo.memory.shape import Shape, decoding_features, decoding_shapes, pass_features, pass_shapes

__all__ = [
    "AdaptiveMemory",
    "Budget",
    "DeviceMemory",
    "DoesNotFit",
    "Footprint",
    "LeakVerdict",
    "LeakWatch",
    "LiveBytes",
    "MemoryMonitor",
    "MemoryReading",
    "MemorySample",
    "PhaseFit",
    "PhasePlan",
    "PhaseReading",
    "PhaseRecord",
    "PhaseSpec",
    "Prediction",
    "Predictor",
    "Retry",
    "Shape",
    "align",
    "card_memory",
    "decoding_features",
    "decoding_shapes",
    "detect_leak",
    "is_out_of_memory",
    "largest_multiple",
    "largest_rows",
    "limit_memory",
    "make_budget",
    "pass_features",
    "pass_shapes",
    "peak_live_bytes",
    "plan_phase",
    "release_cache",
    "smaller_rows",
    "survive",
]
