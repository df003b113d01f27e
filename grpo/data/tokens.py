"""From prompts to token ids, in one place: all who count tokens count the same."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from grpo.prompt import Prompt

Tokenizer = Callable[..., Mapping[str, Any]]
"""A Hugging Face tokenizer, or what gives `input_ids` of a text, or of several, as one does."""


def tokenize(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each prompt: of text with what the tokenizer adds to it, such as a token in front.

    A text that begins with that token already has it once, and what it puts behind a text is left out, since
    the text is to go on. A chat template has written all there is to be.
    """
    first = getattr(tokenizer, "bos_token_id", None)
    ids: list[list[int]] = [[] for _ in prompts]
    for is_text in (True, False):
        where = [place for place, prompt in enumerate(prompts) if (prompt.messages is None) is is_text]
        if not where:
            continue
        texts = [prompts[place].text for place in where]
        # Not a warning for each that is longer than the model: those are said otherwise.
        made = tokenizer(texts, add_special_tokens=is_text, verbose=False)["input_ids"]
        for place, each in zip(where, made, strict=True):
            twice = is_text and first is not None and each[:2] == [first, first]
            ids[place] = each[twice : len(each) - (len(put_behind(tokenizer)) if is_text else 0)]
    return ids


@lru_cache(maxsize=8)
def put_behind(tokenizer: Tokenizer) -> list[int]:
    """Tokens that it puts behind a text, such as the end that some are saved with (`add_eos_token`)."""
    bare, whole = (
        tokenizer(["a"], add_special_tokens=added, verbose=False)["input_ids"][0] for added in (False, True)
    )
    places = [place for place in range(len(whole)) if whole[place : place + len(bare)] == bare]
    return whole[places[0] + len(bare) :] if bare and places else []
