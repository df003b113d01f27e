"""A model and how it is run: everything that the memory of its phases depends on."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from grpo.config import Config
from grpo.config.groups import Checkpointing, LossSettings
from grpo.data import PromptSource, Tokenizer
from grpo.data.tokens import tokenize
from grpo.distributed import largest_share
from grpo.learning.objectives import LearningOptions
from grpo.memory import PassSize
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.target import Target
from grpo.rollout.decoder import has_static_cache
from grpo.rollout.lengths import CachePlan
from grpo.scoring.logprobs import ScoringOptions

LONGEST_TEXTS = 64
"""Texts of most characters that are tokenized to find the one of most tokens."""


@dataclass(frozen=True)
class Workload:
    """The model, where and how it is run, and the longest prompt in tokens."""

    config: Config
    target: Target
    longest_prompt: int
    reference_here: bool = True
    """Whether the reference lives on the policy's device."""
    processes: int = 1

    @property
    def shards(self) -> int:
        """How many parts the model is in, of which this process holds one."""
        return self.processes if self.config.shard else 1

    @property
    def splits_masters(self) -> bool:
        """Whether the model holds weights in bf16 whose fp32 masters are there in the optimizer alone."""
        return self.target.dtype == torch.bfloat16 and not (self.config.uses_lora or self.config.shard)

    @property
    def rows_here(self) -> int:
        """Completions of a step that one process does, at most; as yet unknown, the most there may be."""
        config = self.config
        size = config.max_batch_size if config.batch_size == "auto" else config.batch_size
        return largest_share(size // config.group_size, self.processes) * config.group_size

    @property
    def fixed_rows(self) -> dict[str, int]:
        """The rows at once of the phases for which the settings name them."""
        config = self.config
        rows = {"sample": config.rollout_rows, "score": config.score_rows, "learn": config.train_rows}
        return {phase: count for phase, count in rows.items() if count is not None}

    @property
    def scores(self) -> Literal["nothing", "reference", "policy"]:
        """Which model is scored without learning; with the policy autocast keeps its cast weights."""
        config = self.config
        follows = config.uses_lora and config.reference_sync > 0  # with adapters of its own
        if config.scores_policy or follows:
            return "policy"
        return "reference" if config.uses_reference else "nothing"

    @property
    def phases(self) -> tuple[str, ...]:
        """A step's phases, in their order."""
        return ("sample", "learn") if self.scores == "nothing" else ("sample", "score", "learn")

    @property
    def checkpointing(self) -> Checkpointing:
        """Whether layers are computed again; as yet unknown, they are not."""
        return choose_checkpointing(self.config.gradient_checkpointing)

    def scoring(self) -> ScoringOptions:
        """Returns how log-probs are computed, in a step and in the passes that it is planned by."""
        config = self.config
        options: ScoringOptions = {"temperature": config.temperature, "dtype": self.target.dtype}
        return options | {"fp32_logits": True} if config.fp32_logits else options

    def learning(self, kl_coef: float) -> LearningOptions:
        """Returns how gradients are computed. kl_coef: in this step."""
        return {
            "settings": LossSettings.of(self.config, kl_coef=kl_coef),
            "importance_cap": self.config.importance_cap,
            "checkpointing": self.checkpointing,
            **self.scoring(),
        }

    def with_settings(self, **changes: Any) -> "Workload":
        """Returns the same workload with other settings."""
        return replace(self, config=replace(self.config, **changes))

    def cache_plan(self) -> CachePlan:
        """Returns what a row is planned to hold of its own while it is sampled, before any was."""
        by_pages = has_static_cache(self.target.model_config) and not self.config.shard
        return CachePlan(self.config.max_new_tokens, self.config.typical_tokens if by_pages else None)

    def size(self, rows: int, phase: str = "") -> PassSize:
        """A pass of the longest texts, or for "sample" of rows that hold so much while others wait."""
        size = PassSize(rows, self.config.max_new_tokens, self.longest_prompt)
        if phase != "sample":
            return size
        return size._replace(completion_tokens=int(self.cache_plan().tokens), batch_rows=self.rows_here)


def longest_prompt(source: PromptSource, tokenizer: Tokenizer) -> int:
    """Tokens of the longest prompt: among the longest texts."""
    return max(1, *map(len, tokenize(source.longest(LONGEST_TEXTS), tokenizer)))
