"""What a phase of training will hold, from running its code on fake tensors; traces are remembered."""

from grpo.phases.fake import LANGUAGE, PHASES, PhaseSettings, split_name
from grpo.phases.tracer import CHUNK_TOKENS, PhaseTracer

__all__ = ["CHUNK_TOKENS", "LANGUAGE", "PHASES", "PhaseSettings", "PhaseTracer", "split_name"]
