"""What a phase of training will hold, from running its code on fake tensors; traces are remembered."""

from grpo.plan.trace.fake import LANGUAGE, PHASES, PhaseSettings, split_name
from grpo.plan.trace.tracer import CHUNK_TOKENS, PhaseTracer

__all__ = ["CHUNK_TOKENS", "LANGUAGE", "PHASES", "PhaseSettings", "PhaseTracer", "split_name"]
