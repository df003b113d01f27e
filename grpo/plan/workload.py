"""What a run is to hold: its settings, and the bytes that follow from them in closed form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from grpo.config import Config
from grpo.data import PromptSource, Tokenizer
from grpo.data.tokens import tokenize
from grpo.distributed import largest_share
from grpo.learning.optimizer import moment_bytes
from grpo.memory import Size
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.target import Target
from grpo.plan.phases_at import PhaseSettings
from grpo.rollout.decoder import cache_tokens, prompt_places
from grpo.scoring.head import logit_bytes, tokens_at_once

LONGEST_TEXTS = 64
"""Texts of most characters that are tokenized to find the one of most tokens."""


@dataclass(frozen=True)
class Workload:
    """The model, how it is run, and the longest prompt in tokens."""

    config: Config
    target: Target
    longest_prompt: int
    reference_here: bool = True
    """Whether the reference lives on the policy's device."""
    processes: int = 1

    @property
    def shards(self) -> int:
        """Parts of the model, of which this process holds one."""
        return self.processes if self.config.shard else 1

    @property
    def rows_here(self) -> int:
        """Completions of a step that one process does, at most; as yet unknown, the most there may be."""
        config = self.config
        size = config.max_batch_size if config.batch_size == "auto" else config.batch_size
        return largest_share(size // config.group_size, self.processes) * config.group_size

    @property
    def fixed_rows(self) -> dict[str, int]:
        """By phase, where the settings say how many there are at once."""
        config = self.config
        rows = {"sample": config.rollout_rows, "score": config.score_rows, "learn": config.train_rows}
        return {phase: each for phase, each in rows.items() if each is not None}

    def with_settings(self, **changes: Any) -> "Workload":
        """The same with other settings."""
        return replace(self, config=replace(self.config, **changes))

    def size(self, rows: int) -> Size:
        """A pass of the longest texts."""
        return Size(rows, self.config.max_new_tokens, self.longest_prompt)

    def phase_settings(self) -> PhaseSettings:
        config = self.config
        beforehand = config.num_iterations > 1 or config.kl_in_reward
        follows = config.uses_lora and config.reference_sync > 0  # with adapters of its own
        return PhaseSettings(
            self.target, config.group_size, sampling=config, loss=config,
            checkpointing=choose_checkpointing(config.gradient_checkpointing),
            scores="policy" if beforehand or follows else "reference" if config.uses_reference else "nothing",
            lora=config, batch_rows=self.rows_here,
        )  # fmt: skip

    def resident(
        self, num_parameters: int, trained_sizes: Sequence[int] | None = None, frozen_bytes: int = 0
    ) -> dict[str, int]:
        """Bytes that exist between phases: fp32 masters, AdamW's two moments, and copies beside them.

        num_parameters: of the model without adapters. trained_sizes: of each trained tensor; None: all
        weights. frozen_bytes: of the base that adapters have, which serves sampler and reference, too.
        """
        config, target, model = self.config, self.target, self.target.model_config
        sizes = [-(-size // self.shards) for size in trained_sizes or [num_parameters]]
        num_parameters, exact = -(-num_parameters // self.shards), target.exact_dtype.itemsize
        moments = moment_bytes(sizes, config, exact)
        text = model.get_text_config(decoder=True)
        head = int(text.vocab_size * text.hidden_size)
        if config.uses_lora:
            parts = {"weights": frozen_bytes + exact * sum(sizes), "optimizer": moments}
            if config.reference_sync > 0:
                parts["reference"] = exact * sum(sizes)
            if target.is_lower:  # all but the head is the base's
                parts["sampler's copy"] = target.dtype.itemsize * head
            return parts
        parts = {"weights": exact * num_parameters, "optimizer": moments}
        if config.uses_reference and self.reference_here:
            parts["reference"] = exact * num_parameters
        if target.is_lower and self.shards == 1:  # shards sample with what they gather
            # A head that is the embedding, too, is one of its own there.
            numbers = num_parameters + head * text.tie_word_embeddings
            parts["sampler's copy"] = target.dtype.itemsize * numbers
        return parts

    def added_parts(self, phase: str, size: Size, trained: int) -> Mapping[str, int]:
        """Of what a phase adds, what has a closed form; the rest is called activations. trained: numbers."""
        target, model = self.target, self.target.model_config
        if phase == "sample":
            prompts = -(-size.rows // self.config.group_size)
            places = prompt_places(model, size.shared, target.device.type)
            tokens = prompts * places + size.rows * cache_tokens(model, size.tokens)
            return {
                "KV cache": tokens * kv_bytes_per_token(model, target.dtype),
                "logits": size.rows * target.vocab_size * (4 + target.dtype.itemsize),
            }
        at_once = tokens_at_once(target.vocab_size, target.dtype, target.device.type)
        numbers = min(size.rows * size.tokens, at_once) * target.vocab_size
        logits = {"logits": numbers * logit_bytes(target.dtype, target.device.type, entropy=phase == "learn")}
        if phase == "learn":
            return {**logits, "gradients": target.exact_dtype.itemsize * -(-trained // self.shards)}
        return logits


def kv_bytes_per_token(model: PretrainedConfig, dtype: torch.dtype) -> int:
    """2 · layers · kv_heads · head_dim · bytes: keys and values of one token of one row."""
    text = model.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * width * dtype.itemsize)


def longest_prompt(source: PromptSource, tokenizer: Tokenizer) -> int:
    """Tokens of the longest prompt: among the longest texts."""
    return max(1, *map(len, tokenize(source.longest(LONGEST_TEXTS), tokenizer)))
