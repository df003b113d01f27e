"""Prompts and completions of chosen lengths: the worst case, for trials that need no real text."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.types import Prompt


@dataclass(frozen=True)
class FullLengthTokenizer:
    """As much of a tokenizer as sampling needs: every text has `prompt_tokens` tokens."""

    prompt_tokens: int

    def __call__(self, texts: Sequence[str], **options: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * self.prompt_tokens for _ in texts]}

    def batch_decode(self, rows: Sequence[object], skip_special_tokens: bool) -> list[str]:
        return [""] * len(rows)


def nameless_prompts(count: int) -> list[Prompt]:
    """Prompts without text, as the tokenizer above does not read it."""
    return [Prompt(str(i), "", {}) for i in range(count)]
