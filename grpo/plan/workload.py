"""What a run is to hold: its settings, and the bytes they come to in closed form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from grpo.config import Config
from grpo.distributed import largest_share
from grpo.environment import KEPT_KERNELS
from grpo.learning.optimizer import moment_bytes
from grpo.memory import MemoryMonitor, Shape
from grpo.memory.budget import CONTEXT_BYTES
from grpo.memory.phase import Slack
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.target import Target
from grpo.plan.trace import CHUNK_TOKENS, PhaseSettings
from grpo.rollout.decoder import cache_tokens, prompt_places
from grpo.scoring.fused import was_fused

SCRATCH_BYTES = 2 * 2**20
"""Workspace of CUDA's libraries, and of oneDNN in bf16, for models so small that it counts."""

SLACK_ON_CUDA = Slack(0.05, 0.05)
_SLACK_OF_FIXED_SEGMENTS = Slack(0.10, 0.10)
"""On CUDA estimates."""
_UNSURE_BYTES = 27 * 2**19
_SLACK_WITHOUT_GRADIENTS = Slack(0.15, 0.05, _UNSURE_BYTES)
_SLACK_EXACT = Slack(0.15, 0.046, _UNSURE_BYTES, share_of_others=0.08)
_SLACK_LOWER = Slack(0.21, 0.09, _UNSURE_BYTES, share_of_others=0.02)
_SLACK_OF_ADAPTERS = Slack(0.5, 0.28, _UNSURE_BYTES, share_of_others=0.1)
_SLACK_OF_EXACT_ADAPTERS = Slack(0.2, 0.2, _UNSURE_BYTES, share_of_others=0.08)
_SLACK_RECOMPUTED = Slack(0.61, 0.2, _UNSURE_BYTES)
"""On CPUs as measured by `scripts/benchmark_memory.py runs`. In bf16 small tensors (cast weights, a prompt's
activations) come between large ones, and tear the heap into more pieces; among fewer large ones, as where
layers are recomputed or most weights have no gradient, more of it. Two runs alike differ by up to 7 % of what
is added, with adapters in fp32 by 30 %."""
LATER_BYTES, LATER_PRIVATE_BYTES = 10 * 2**20, 40 * 2**20
"""What a process on a CPU grows by after its rehearsal: code, trackers, texts; touched, and all of it."""
STARTED_BYTES = 64 * 2**20
"""What a process on a CPU grows by from its imports to its plan: code, traces, threads."""


def bytes_at_start(device_type: str, monitor: MemoryMonitor) -> int:
    """What a process that has loaded nothing yet will hold besides tensors when it plans."""
    return monitor.in_use_bytes() + STARTED_BYTES if device_type == "cpu" else CONTEXT_BYTES


@dataclass(frozen=True)
class Workload:
    """What is to be planned for: the model, its settings, and the longest prompt in tokens."""

    config: Config
    target: Target
    longest_prompt: int
    reference_here: bool
    """Whether the reference lives on the policy's device."""
    processes: int = 1
    stays_gathered: bool = False
    """Whether a sharded model's weights are all gathered while it samples."""

    @property
    def shards(self) -> int:
        """Parts of the model, of which this process holds one."""
        return self.processes if self.config.shard else 1

    def sizes_here(self, sizes: Sequence[int]) -> list[int]:
        """What this process holds of tensors of these sizes."""
        return [-(-size // self.shards) for size in sizes]

    @property
    def rows_here(self) -> int:
        """Completions of a step that one process does, at most; as yet unknown, the most there may be."""
        config = self.config
        size = config.max_batch_size if config.batch_size == "auto" else config.batch_size
        return largest_share(size // config.group_size, self.processes) * config.group_size

    @property
    def gradients_first(self) -> bool:
        """Whether gradients exist before the first micro-batch is learned from."""
        return self.target.gradients_first and not self.config.shard

    @property
    def new_tokens(self) -> int:
        return self.config.sampling.max_new_tokens

    def phase_settings(self) -> PhaseSettings:
        config = self.config
        return PhaseSettings(
            self.target, config.group_size, config.sampling, config.loss,
            choose_checkpointing(config.gradient_checkpointing),
            scores_policy=config.num_iterations > 1 or config.kl_in_reward or self.reference_has_adapters,
            lora=config.lora, processes=self.shards,
        )  # fmt: skip

    @property
    def reference_has_adapters(self) -> bool:
        """Whether the reference is the policy with adapters of its own, not the policy without any."""
        return self.config.lora.on and self.config.reference_sync > 0

    @property
    def exact_bytes(self) -> int:
        """Of a number that is trained."""
        return self.target.exact_dtype.itemsize


def usual_slack(work: Workload, phase: str) -> Slack:
    """What the allocator holds besides tensors where there is room."""
    target, config = work.target, work.config
    if not target.on_cpu:
        return SLACK_ON_CUDA if target.grows_segments else _SLACK_OF_FIXED_SEGMENTS
    if phase != "learn":
        return _SLACK_WITHOUT_GRADIENTS
    if choose_checkpointing(config.gradient_checkpointing) == "full":
        return _SLACK_RECOMPUTED
    if config.lora.on:
        return _SLACK_OF_ADAPTERS if target.is_lower else _SLACK_OF_EXACT_ADAPTERS
    return _SLACK_LOWER if target.is_lower else _SLACK_EXACT


def resident_parts(
    work: Workload, num_parameters: int, trained_sizes: Sequence[int] | None = None, frozen_bytes: int = 0
) -> dict[str, int]:
    """Bytes that exist between phases: fp32 masters, AdamW's two moments, and copies beside them.

    num_parameters: of the model without adapters. trained_sizes: of each trained tensor; None: all weights.
    frozen_bytes: of the base that adapters have, which serves sampler and reference, too.
    """
    num_parameters, model = -(-num_parameters // work.shards), work.target.model_config
    exact, sizes = work.exact_bytes, trained_sizes or [num_parameters]
    moments = moment_bytes(sizes, work.config.optimizer, exact)
    if work.config.lora.on:
        adapters = exact * sum(sizes)
        parts = {"weights": frozen_bytes + adapters, "optimizer": moments}
        if work.reference_has_adapters:
            parts["reference"] = adapters
        if work.target.is_lower:  # all but the head is the base's
            parts["sampler's copy"] = work.target.dtype.itemsize * _head_size(model)
        return parts
    parts = {"weights": exact * num_parameters, "optimizer": moments}
    if work.config.uses_reference and work.reference_here:
        parts["reference"] = exact * num_parameters
    if work.target.is_lower and work.shards == 1:  # shards sample with what they gather
        parts["sampler's copy"] = work.target.dtype.itemsize * (
            # A head that is the embedding, too, is one of its own there.
            num_parameters + _head_size(model) * model.get_text_config(decoder=True).tie_word_embeddings
        )
    return parts


def _head_size(model: PretrainedConfig) -> int:
    """Parameters of the vocabulary head."""
    text = model.get_text_config(decoder=True)
    return int(text.vocab_size * text.hidden_size)


def kv_bytes_per_token(model: PretrainedConfig, dtype: torch.dtype) -> int:
    """2 · layers · kv_heads · head_dim · bytes: keys and values of one token of one row."""
    text = model.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * width * dtype.itemsize)


def kernel_parts(target: Target, compiled_bytes: int, *, private: bool) -> dict[str, int]:
    """What kernels that oneDNN compiles for products in bf16, and keeps, take beyond those that are there.

    A kernel holds about half a megabyte, and mappings that it hardly touches, which a limit counts (private).
    """
    if not (target.on_cpu and target.is_lower):
        return {}
    each = (2.3 if private else 0.5) * 2**20
    return {"compiled kernels": max(0, int(KEPT_KERNELS * each) - compiled_bytes)}


def scratch_bytes(phase: str, target: Target) -> int:
    """Room for what kernels hold unseen in a phase: none in fp32 on a CPU, where traces are exact.

    In bf16 without tiles oneDNN held 0.1 to 0.3 MB in forward passes of models 96 to 256 wide, and 0.75, 1.3,
    1.5 and 3.1 MB in backward passes of models 96, 256, 384 and 768 wide (where 1 % of the phase is more).
    """
    if not target.on_cpu:
        return SCRATCH_BYTES
    if not target.is_lower:
        return 0
    if torch.cpu._is_amx_tile_supported():  # which want weights in an order of their own
        return SCRATCH_BYTES
    width = target.model_config.get_text_config(decoder=True).hidden_size
    kilobytes = 128 + width if phase.startswith(("sample", "score")) else 512 + 4 * width
    return min(SCRATCH_BYTES, kilobytes * 2**10)


def sample_parts(work: Workload, shape: Shape) -> Mapping[str, int]:
    prompts = -(-shape.rows // work.config.group_size)
    model, device_type = work.target.model_config, work.target.device.type
    places = prompt_places(model, shape.prompt_tokens, device_type)
    tokens = prompts * places + shape.rows * cache_tokens(model, shape.new_tokens)
    return {
        "KV cache": tokens * kv_bytes_per_token(model, work.target.dtype),
        "logits": shape.rows * work.target.vocab_size * (4 + work.target.dtype.itemsize),
    }


def slots_bytes(work: Workload, shape: Shape) -> int:
    """What decoding keeps for the next rollout: caches of all rows, of half of them, a quarter and so on."""
    return 2 * sample_parts(work, shape)["KV cache"]


def logits_parts(work: Workload, shape: Shape) -> Mapping[str, int]:
    target = work.target
    numbers = min(shape.scored_tokens or shape.rows * shape.new_tokens, CHUNK_TOKENS) * target.vocab_size
    in_slices = min(numbers, target.slice_numbers) * work.exact_bytes
    if was_fused(target.device.type, target.dtype):
        in_slices = 0
    return {"logits": numbers * target.dtype.itemsize + in_slices * (2 if target.is_lower else 1)}


def attention_workspace(work: Workload, shape: Shape) -> Mapping[str, int]:
    """What CUDA's memory-efficient attention, which takes a mask, holds unseen in its backward pass.

    Where products are in 16 bits it adds up the queries' gradients in fp32: blocks of 64 queries, as wide as
    a head, for each row and head (torch's mem_eff_attention/kernel_backward.h, GradQTempStorage).
    """
    target, text = work.target, work.target.model_config.get_text_config(decoder=True)
    if target.device.type != "cuda" or not target.is_lower:
        return {}
    width = max(64, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    blocks = -(-max(0, shape.new_tokens - 1) // 64)
    return {"attention's workspace": shape.rows * text.num_attention_heads * blocks * 4 * 64 * width}
