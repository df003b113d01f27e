"""Decoding one token at a time over a prompt that is computed and stored once a group.

A decoder is made for a model and used for one batch of groups:

    logits = decoder.prefill(prompt_ids, rows_per_prompt)   # (R, V)
    logits = decoder.step(tokens)                           # (R, V), tokens (R,)
    decoder.keep(groups)                                    # finished groups leave
    logits = decoder.replace(groups, prompt_ids)            # (…, V): others take finished groups' places
    decoder.cache_bytes                                     # what keys and values take up

Rows stand group by group: row r belongs to prompt r // rows_per_prompt.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor
from transformers import GPT2LMHeadModel, PretrainedConfig, PreTrainedModel

from grpo.distributed.shard import is_sharded
from grpo.rollout.cache import CacheBytes
from grpo.rollout.cuda_graphs import Recorder, recorder_of
from grpo.rollout.generic import GenericDecoder
from grpo.rollout.gpt2 import GPT2Decoder, static_cache_length

__all__ = [
    "CacheBytes",
    "Decoder",
    "cache_tokens",
    "has_static_cache",
    "joining_groups",
    "leave_at_once",
    "make_decoder",
    "replaced_at_once",
]


class Decoder(Protocol):
    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        """longest_prompt: tokens of the longest that may take another's place later."""

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, groups: Sequence[int]) -> None: ...

    def replace(self, groups: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        """NotImplementedError unless `has_static_cache`."""

    def skip(self, num_tokens: int) -> None:
        """Stand where that many more tokens lead, whatever they are: for tracing memory."""

    @property
    def cache_bytes(self) -> CacheBytes: ...


def make_decoder(model: PreTrainedModel, max_new_tokens: int, *, recorder: Recorder | None = None) -> Decoder:
    """The native path for GPT-2, Hugging Face's own cache for every other causal model.

    recorder: of steps over a static cache; None: on CUDA they are recorded as CUDA graphs, else not at all.
    """
    if not has_static_cache(model):
        return GenericDecoder(model)
    if recorder is None and records_steps(model):
        recorder = recorder_of(model.device)
    return GPT2Decoder(cast(GPT2LMHeadModel, model), max_new_tokens, recorder=recorder)


def has_static_cache(model: PreTrainedModel) -> bool:
    """Whether a decoder of this model holds `max_new_tokens` from the start, or grows."""
    return type(model) is GPT2LMHeadModel and not is_sharded(model) and _is_native(model.config)


def _is_native(model: PretrainedConfig) -> bool:
    return model.model_type == "gpt2" and not model.reorder_and_upcast_attn


def records_steps(model: PreTrainedModel) -> bool:
    """Whether decoding runs recorded steps, each for a fixed number of rows."""
    return model.device.type == "cuda" and has_static_cache(model)


def leave_at_once(model: PreTrainedModel, groups: int) -> int:
    """How many of so many groups have to end before they leave: half, where a step is then recorded anew."""
    return -(-groups // 2) if records_steps(model) else 1


def replaced_at_once(groups: int) -> int:
    """How many of so many groups have to end before others take their places: one prefill serves them."""
    return max(1, groups // 8)


def joining_groups(model: PretrainedConfig, groups: int) -> int:
    """How many groups' prompts are computed at once while so many groups decode and others wait."""
    return replaced_at_once(groups) if _is_native(model) and groups > 1 else 0


def cache_tokens(model: PretrainedConfig, new_tokens: int) -> int:
    """Places a row's cache has for its own tokens: a static one has whole blocks."""
    return static_cache_length(new_tokens) if _is_native(model) else new_tokens
