"""Decoding one token at a time over a prompt that is computed and stored once a group.

A decoder is made for a model and used for one batch of groups:

    logits = decoder.prefill(prompt_ids, rows_per_prompt)   # (R, V)
    key, step = decoder.next_step()
    logits = step(tokens)                                   # (R, V), tokens (R,)
    decoder.keep(groups)                                    # finished groups leave
    logits = decoder.replace(groups, prompt_ids)            # (…, V): others take finished groups' places
    decoder.cache_bytes                                     # what keys and values take up

Rows stand group by group: row r belongs to prompt r // rows_per_prompt.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

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
    "make_decoder",
    "prompt_places",
    "records_steps",
    "remaining_places",
    "replaced_at_once",
    "step_recorder",
]


class Decoder(Protocol):
    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        """longest_prompt: tokens of the longest that may take another's place later."""

    def next_step(self) -> tuple[Hashable, Callable[[Tensor], Tensor]]:
        """The next token's step, from tokens (R,) to logits (R, V), and what makes it alike to others."""

    @property
    def counters(self) -> Sequence[Tensor]:
        """What steps change beside the cache."""

    def keep(self, groups: Sequence[int]) -> None: ...

    def replace(self, groups: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        """NotImplementedError unless `has_static_cache`, and so are other decoders' groups."""

    def take_over(self, other: Any, groups: Sequence[int], places: int) -> None:
        """Go on with some groups of another of the same kind, in the first of so many places."""

    def skip(self, num_tokens: int) -> None:
        """Stand where that many more tokens lead, whatever they are: for tracing memory."""

    @property
    def cache_bytes(self) -> CacheBytes: ...


def make_decoder(model: PreTrainedModel, max_new_tokens: int, *, recorded: bool = False) -> Decoder:
    """The native path for GPT-2, Hugging Face's own cache for every other causal model.

    recorded: steps of one key are the same work on the same tensors.
    """
    if not has_static_cache(model):
        return GenericDecoder(model)
    return GPT2Decoder(cast(GPT2LMHeadModel, model), max_new_tokens, recorded=recorded)


def step_recorder(model: PreTrainedModel) -> Recorder | None:
    """By which a model's steps are recorded: where it has a static cache, and on CUDA."""
    if has_static_cache(model) and records_steps(model.config, model.device.type):
        return recorder_of(model.device)
    return None


def records_steps(model: PretrainedConfig, device_type: str) -> bool:
    """Whether decoding runs recorded steps, each for a fixed number of rows, unless the model is sharded."""
    return device_type == "cuda" and _is_native(model)


def has_static_cache(model: PreTrainedModel) -> bool:
    """Whether a decoder of this model holds `max_new_tokens` from the start, or grows."""
    return type(model) is GPT2LMHeadModel and not is_sharded(model) and _is_native(model.config)


def _is_native(model: PretrainedConfig) -> bool:
    return model.model_type == "gpt2" and not model.reorder_and_upcast_attn


FEW_ROWS = 64
"""On CUDA so many rows of a small model take as long as one."""


def remaining_places(places: int, going_on: int, width: int) -> int:
    """Places for groups of `width` rows that go on where steps are recorded: of all, a half, a quarter and so
    on, as recordings are for a number of rows; fewer than FEW_ROWS rows save nothing.
    """
    while places > 1 and -(-places // 2) >= going_on and -(-places // 2) * width >= FEW_ROWS:
        places = -(-places // 2)
    return places


def prompt_places(model: PretrainedConfig, tokens: int, device_type: str) -> int:
    """Tokens that prompts are padded to while they decode: on CUDA, where steps are recorded, few sizes."""
    if not records_steps(model, device_type):
        return tokens
    return max(tokens, min(-(-tokens // 64) * 64, int(model.n_positions)))


def replaced_at_once(groups: int) -> int:
    """How many of so many groups have to end before others take their places: one prefill serves them."""
    return max(1, groups // 8)


def joining_groups(model: PretrainedConfig, groups: int) -> int:
    """How many groups' prompts are computed at once while so many groups decode and others wait."""
    return replaced_at_once(groups) if _is_native(model) and groups > 1 else 0


def cache_tokens(model: PretrainedConfig, new_tokens: int) -> int:
    """Places a row's cache has for its own tokens: a static one has whole blocks."""
    return static_cache_length(new_tokens) if _is_native(model) else new_tokens
