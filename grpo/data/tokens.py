"""Turns prompts into token ids, in one place: all who count tokens count the same."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from grpo.prompt import Prompt

Tokenizer = Callable[..., Mapping[str, Any]]
"""A Hugging Face tokenizer, or what gives `input_ids` of a text, or of several, as one does."""


def tokenize(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token ids of each prompt, with what the tokenizer adds to a text, such as a token in front.

    A text that begins with that token already has it once, and what it puts behind a text is left out, since
    the text is to go on. A chat template has written all there is to be.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    ids: list[list[int]] = [[] for _ in prompts]
    for is_text in (True, False):
        places = [place for place, prompt in enumerate(prompts) if (prompt.messages is None) is is_text]
        if not places:
            continue
        num_behind = len(suffix_tokens(tokenizer)) if is_text else 0
        texts = [prompts[place].text for place in places]
        # No warning for each that is longer than the model's context: those are counted elsewhere.
        rows = tokenizer(texts, add_special_tokens=is_text, verbose=False)["input_ids"]
        for place, row in zip(places, rows, strict=True):
            has_two = is_text and bos is not None and row[:2] == [bos, bos]
            ids[place] = row[has_two : len(row) - num_behind]
    return ids


@lru_cache(maxsize=8)
def suffix_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that it puts behind a text, such as the end that some are saved with (`add_eos_token`)."""
    bare, full = (
        tokenizer(["a"], add_special_tokens=added, verbose=False)["input_ids"][0] for added in (False, True)
    )
    places = [place for place in range(len(full)) if full[place : place + len(bare)] == bare]
    return full[places[0] + len(bare) :] if bare and places else []
