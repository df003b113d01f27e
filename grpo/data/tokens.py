"""From prompts to token ids, in one place: all who count tokens count the same."""

from collections.abc import Sequence

from grpo.data.intake import Tokenizer


def tokenize(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each text, with what the tokenizer adds to plain text, such as a token in front.

    A text that begins with that token already, as a chat template's do, has it once.
    """
    first = getattr(tokenizer, "bos_token_id", None)
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=True)["input_ids"]
    return [each[1:] if first is not None and each[:2] == [first, first] else each for each in ids]
