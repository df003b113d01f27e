"""Rows of a source become prompts, or are counted as bad and skipped.

A prompt that the model's context has no room for makes its row as unusable as one that cannot be read.
Left out on purpose: cutting prompts to the room there is, which would change what they ask.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

from loguru import logger

from grpo.config.groups import PromptSettings
from grpo.config.limits import SettingsError
from grpo.data.render import Renderer
from grpo.data.tokens import Tokenizer, tokenize
from grpo.prompt import Prompt

_NOT_UTF8 = {chr(0xDC00 + byte) for byte in range(0x80, 0x100)}
"""What Python reads such bytes as, with errors="surrogateescape"."""


class TooLong(ValueError):
    """A prompt of more tokens than there is room for."""


@dataclass(frozen=True)
class Room:
    """What a model's context leaves for a prompt beside `max_new_tokens`."""

    tokenizer: Tokenizer
    context: int
    max_new_tokens: int
    without_row: tuple[str, ...] = ()
    """Texts of tokens that have been added to the tokenizer, and that the model has no row for."""

    def check(self, prompt: Prompt) -> None:
        """TooLong for one of more tokens than that; ValueError for a text that is none in Unicode, or has a
        token that the model does not know.

        A token is a byte or more: a text of few is not tokenized, which takes a microsecond a byte.
        """
        if unknown := [token for token in self.without_row if token in prompt.text]:
            raise ValueError(f"the token {unknown[0]!r}, which the tokenizer knows and the model does not")
        longest = self.context - self.max_new_tokens
        if _num_bytes(prompt.text) + 1 < longest:  # some tokenizers put a token in front, and a space
            return
        num_tokens = len(tokenize([prompt], self.tokenizer)[0])
        if num_tokens > longest:
            raise TooLong(
                f"a prompt of {num_tokens:,} tokens, but the model's context of {self.context:,} leaves "
                f"{longest:,} beside --max-new-tokens {self.max_new_tokens}"
            )


def _num_bytes(text: str) -> int:
    """In UTF-8, of the text or of what a tokenizer may make of it first, whichever is longest."""
    forms = [text] if text.isascii() else [text, *(normalize(form, text) for form in ("NFC", "NFKC"))]
    return max(len(form.encode()) for form in forms)


class PromptMaker:
    """Makes prompts of the rows of one source, by the settings and in the room there is (None: any)."""

    def __init__(
        self,
        name: str,
        *,
        max_bad_share: float,
        settings: PromptSettings | None = None,
        room: Room | None = None,
    ) -> None:
        self.name = name
        self.max_bad_share = max_bad_share
        self.settings = settings or PromptSettings()
        self.renderer = Renderer(self.settings, room.tokenizer if room else None)
        self.num_rows = 0
        self.num_bad = 0
        self.num_labelled = 0
        self.num_upside_down = 0
        self._room = room
        self._examples: dict[bool, str] = {}  # the first row that is too long (True), or unreadable

    def make(self, row_id: str, content: Any, convert: "Convert") -> list[Prompt]:
        """The prompts of a row. ValueError for one that cannot be used."""
        if isinstance(content, str) and not _NOT_UTF8.isdisjoint(content):
            raise ValueError("bytes that are no UTF-8: save the file in that encoding")
        prompts = convert(content, row_id, self)
        if self._room is not None:
            for prompt in prompts:
                self._room.check(prompt)
        return prompts

    def make_or_count(self, row_id: str, content: Any, convert: "Convert") -> list[Prompt]:
        """The same, and none of a row that cannot be used, which is counted."""
        self.num_rows += 1
        try:
            return self.make(row_id, content, convert)
        except SettingsError:  # which no other row would mend
            raise
        except ValueError as error:
            self.num_bad += 1
            self._examples.setdefault(isinstance(error, TooLong), f"{row_id}: {error}")
            return []

    def check_bad_share(self) -> None:
        """ValueError if too large a share of the rows was bad; else it is said what was skipped, or odd."""
        share = self.num_bad / max(1, self.num_rows)
        examples = [self._examples[too_long] for too_long in sorted(self._examples)]
        bad = (
            f"{self.num_bad:,} of {self.num_rows:,} rows ({share:.1%}) of {self.name} cannot be used, for "
            f"example {' and '.join(examples)}"
        )
        if share > self.max_bad_share:
            remedies = {False: "repair them", True: "lower --max-new-tokens, choose another --model"}
            advice = ", ".join(remedies[too_long] for too_long in sorted(self._examples))
            if self.num_bad == self.num_rows:
                raise ValueError(f"{bad}: {advice}, or give other --prompts")
            raise ValueError(
                f"{bad}; at most {self.max_bad_share:.1%} may be: {advice}, or allow more with "
                f"--max-bad-share {math.ceil(share * 1000) / 1000}"
            )
        if self.num_bad:
            logger.warning("{}: skipped", bad)
        if self.num_upside_down:
            logger.info(
                "{:,} of {:,} labelled policy lines in {} name a B: move other than their highest eval; "
                "the best move is taken from the evals",
                self.num_upside_down, self.num_labelled, self.name,
            )  # fmt: skip


Convert = Callable[[Any, str, PromptMaker], list[Prompt]]
"""From what a row holds, and its id. ValueError, with the reason, for one that cannot be used."""
