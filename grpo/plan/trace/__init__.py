"""What a phase of training will hold, from running its code on fake tensors; traces are remembered."""

from grpo.plan.trace.fake import PHASES, PhaseSettings, split_name
from grpo.plan.trace.tracer import CHUNK_TOKENS, PhaseTracer

__all__ = ["CHUNK_TOKENS", "PHASES", "PhaseSettings", "PhaseTracer", "split_name"]
