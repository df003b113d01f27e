"""Prompts to train on and prompts to test on, from the bundle, a file or the hub.

Which side a prompt is on is a property of its position, so that no position is on both sides,
whichever task and whichever file it comes from.
"""

from grpo.data.load import check_spec, load_prompts
from grpo.data.maker import PromptBudget
from grpo.data.source import PromptSource, collate
from grpo.data.tokens import Tokenizer
from grpo.prompt import Prompt

__all__ = [
    "Prompt",
    "PromptBudget",
    "PromptSource",
    "Tokenizer",
    "check_spec",
    "collate",
    "load_prompts",
]
