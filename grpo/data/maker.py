"""A row of data becomes prompts, or a reason why not, which is counted.

A row of a user's own columns asks a text, or a conversation in the model's chat template. A prompt that the
model's context has no room for makes its row as unusable as one that cannot be read.
Left out on purpose: cutting prompts to the room there is, which would change what they ask.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from loguru import logger

from grpo.config.groups import PromptSettings
from grpo.config.limits import SettingsError
from grpo.data.tokens import Tokenizer, tokenize
from grpo.errors import UserError
from grpo.prompt import Messages, Prompt, checked_messages

RESERVED_COLUMNS = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
)
"""Arguments every reward function gets besides the columns (TRL's names)."""

NO_CHAT_TEMPLATE = (
    "prompts are conversations, but the model's tokenizer has no chat template: give --chat-template FILE, a "
    "model that has been tuned to chat, or prompts that are text, with --chat off."
)
_TEMPLATES = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
_TEMPLATES.tests["none"] = lambda value: value == ""  # as which a missing value is given to a template
_NO_DATE = "{% macro strftime_now(form='') %}{{ form }}{% endmacro %}"
"""Has a template say the format of a date instead of today's."""
_REFUSALS = (jinja2.TemplateError, TypeError, ArithmeticError, AttributeError, LookupError)
"""Errors of templates for values that they do not take, and of the sandbox for what they may not do."""

Columns = Mapping[str, Any]
PLAIN = PromptSettings()
"""Rows are asked by their columns `prompt`, `text` or `fen`, as they are."""


class TooLong(UserError):
    """A prompt of more tokens than there is room for."""


@dataclass(frozen=True)
class PromptBudget:
    """The tokens that a model's context leaves for a prompt beside `max_new_tokens`."""

    tokenizer: Tokenizer
    context: int
    max_new_tokens: int
    without_row: tuple[str, ...] = ()
    """Texts of tokens that have been added to the tokenizer, and that the model has no row for."""

    def check(self, prompt: Prompt) -> None:
        """TooLong for a prompt of more tokens; ValueError for text that is not Unicode or has unknown tokens.

        A token is at least a byte, so short texts are not tokenized, which takes a microsecond a byte.
        """
        if unknown := [token for token in self.without_row if token in prompt.text]:
            raise UserError(f"the token {unknown[0]!r}, which the tokenizer knows and the model does not")
        longest = self.context - self.max_new_tokens
        texts = [prompt.text]
        if not prompt.text.isascii():  # which a tokenizer may write in another form first
            texts += [normalize(form, prompt.text) for form in ("NFC", "NFKC")]
        if max(len(text.encode()) for text in texts) + 1 < longest:  # some put a token in front, and a space
            return
        num_tokens = len(tokenize([prompt], self.tokenizer)[0])
        if num_tokens > longest:
            raise TooLong(
                f"a prompt of {num_tokens:,} tokens, but the model's context of {self.context:,} leaves "
                f"{longest:,} beside --max-new-tokens {self.max_new_tokens}"
            )


class RowParser:
    """Makes prompts of the rows of one source, by the settings, and counts rows that cannot be used.

    room: of the model; None: any length, and no tokenizer, without which there are no conversations.
    SettingsError for files and templates that are not there.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bad_share: float,
        settings: PromptSettings = PLAIN,
        room: PromptBudget | None = None,
    ) -> None:
        self.settings = settings
        self.total_rows = math.inf  # where it is known, too many bad rows are an error before all are read
        self.num_rows = self.num_bad = self.num_labelled = self.num_upside_down = 0
        self._name, self._max_bad_share, self._room = name, max_bad_share, room
        self._examples: dict[str, str] = {}  # the first bad row, by what can be done about it
        self._template = None
        if (file := settings.prompt_template) is not None:
            try:
                self._template = _TEMPLATES.from_string(template_text(file, "prompt_template"))
            except jinja2.TemplateSyntaxError as error:
                where = f"line {error.lineno}: {error.message}"
                raise SettingsError(
                    f"prompt_template is {str(file)!r}, which is no Jinja template: {where}."
                ) from error
        self._chat_template = getattr(room.tokenizer, "chat_template", None) if room else None
        if settings.chat_template is not None:
            self._chat_template = template_text(settings.chat_template, "chat_template")
        self.can_chat = settings.chat != "off" and self._chat_template is not None
        """Whether messages can be asked."""
        from_template = self._template is not None and settings.chat == "auto"
        self._text_is_message = settings.chats or (from_template and self.can_chat)
        self.has_own_columns = settings.prompt_column is not None or self._template is not None
        """Whether the settings say what is asked, so that rows are the user's own whatever else they have."""

    def make(self, row_id: str, content: Any, convert: "Convert") -> list[Prompt]:
        """The prompts of a row. ValueError for one that cannot be used."""
        if isinstance(content, ValueError):  # why there is none
            raise content
        prompts = convert(content, row_id, self)
        if self._room is not None:
            for prompt in prompts:
                self._room.check(prompt)
        return prompts

    def make_or_count(self, row_id: str, content: Any, convert: "Convert") -> list[Prompt]:
        """The same, and none of a row that cannot be used, which is counted. ValueError for too many."""
        self.num_rows += 1
        try:
            return self.make(row_id, content, convert)
        except SettingsError:  # which no other row would mend
            raise
        except ValueError as error:
            self.num_bad += 1
            is_long = isinstance(error, TooLong)
            remedy = "lower --max-new-tokens, choose another --model" if is_long else "repair them"
            self._examples.setdefault(remedy, f"{row_id}: {error}")
        if self.num_bad > self._max_bad_share * self.total_rows:
            self.check_bad_share()
        return []

    def check_bad_share(self) -> None:
        """ValueError if too large a share of the rows was bad; else a warning of what was skipped, or odd."""
        share = self.num_bad / max(1, self.num_rows)
        bad = (
            f"{self.num_bad:,} of {self.num_rows:,} rows ({share:.1%}) of {self._name} cannot be used, for "
            f"example {' and '.join(self._examples.values())}"
        )
        if share > self._max_bad_share:
            remedies = ", ".join(self._examples)
            if self.num_bad == self.num_rows:
                raise UserError(f"{bad}: {remedies}, or give other --prompts")
            raise UserError(
                f"{bad}; at most {self._max_bad_share:.1%} may be: {remedies}, or allow more with "
                f"--max-bad-share {math.ceil(share * 1000) / 1000}"
            )
        if self.num_bad:
            logger.warning("{}: skipped", bad)
        if self.num_upside_down:
            logger.info(
                "{:,} of {:,} labelled policy lines in {} name a B: move other than their highest eval; "
                "the best move is taken from the evals",
                self.num_upside_down,
                self.num_labelled,
                self._name,
            )

    def render_prompt(self, row_id: str, record: Columns) -> Prompt:
        """Makes the prompt of a user's row. ValueError where it asks nothing, SettingsError where none
        could."""
        if (task := record.get("task")) in ("policy", "environment"):
            raise UserError(f"rename column `task`: {task!r} in it means a chess prompt, which this is not")
        asked = self._asked(record, self.settings.prompt_column or "prompt")
        columns = {"task": "custom", **other_columns(record, "prompt")}
        if isinstance(asked, str):
            return Prompt(row_id, asked, columns)
        undated = None
        if "strftime_now" in (self._chat_template or ""):
            undated = self._conversation(asked, record, before=_NO_DATE)
        return Prompt(row_id, self._conversation(asked, record), columns, asked, undated)

    def _asked(self, record: Columns, column: str) -> str | Messages:
        """Returns a row's prompt, as text or messages."""
        asked: Any = record.get(column)
        if self._template is not None:
            try:
                asked = self._template.render(_with_empty_texts(record))
            except jinja2.UndefinedError as error:
                raise UserError(f"prompt_template: {error.message}; there are {', '.join(record)}") from None
            except _REFUSALS as error:
                raise UserError(f"prompt_template: {error}") from error
        elif asked is None:
            raise UserError(f"there is no `{column}`; there are {', '.join(record)}")
        if isinstance(asked, str):
            if not asked.strip():
                raise UserError(f"`{column}` is empty")
            if not self._text_is_message:
                return asked
            asked = [{"role": "user", "content": asked}]
        messages = checked_messages(asked, column)
        if self.settings.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.settings.system_prompt}, *messages]
        return messages

    def _conversation(self, messages: Messages, record: Columns, *, before: str = "") -> str:
        """The messages in the chat template, with the beginning of an answer.

        Where the last message is the assistant's, that is the beginning, and the model goes on with it.
        before: what stands in front of the template.
        """
        if self._room is None or self._chat_template is None:
            raise SettingsError(NO_CHAT_TEMPLATE)
        tools, options = record.get("tools"), record.get("chat_template_kwargs")
        if isinstance(tools, str):  # as some datasets store them
            tools = json.loads(tools)
        messages, tools, options = _without_nulls([messages, tools or None, options or {}])
        render: Any = getattr(self._room.tokenizer, "apply_chat_template", None)
        goes_on = messages[-1]["role"] == "assistant"
        if goes_on and not messages[-1].get("content"):
            raise UserError("the last message is the assistant's, and has no text to go on from")
        try:
            text: str = render(
                messages,
                tools=tools,
                chat_template=before + self._chat_template,
                tokenize=False,
                **{"add_generation_prompt": not goes_on, "continue_final_message": goes_on, **options},
            )
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise SettingsError(
                f"the chat template is no Jinja template: {where}; give another --chat-template."
            ) from error
        except _REFUSALS as error:
            raise UserError(f"the chat template does not take it: {error}") from error
        if goes_on and not text.endswith(_last_words(messages[-1]["content"])):
            raise UserError("the chat template does not end in the assistant's message that is to go on")
        return text


def _last_words(content: Any) -> str:
    """The text that a message ends in: templates may drop what is empty around it."""
    if isinstance(content, list):  # of parts
        content = next((part["text"] for part in reversed(content) if part.get("text")), "")
    return str(content).strip()


Convert = Callable[[Any, str, RowParser], list[Prompt]]
"""From what a row holds, and its id. ValueError, with the reason, for one that cannot be used."""


def other_columns(record: Columns, used: str) -> dict[str, Any]:
    """Those besides the `used` one, which the rewards get. ValueError for a name that is taken."""
    if taken := RESERVED_COLUMNS & record.keys():
        raise UserError(f"rename column `{min(taken)}`: every reward function already gets that argument")
    return {name: value for name, value in record.items() if name != used}


def _with_empty_texts(value: Any) -> Any:
    """None as an empty text, at any depth: a template would write "None"."""
    if isinstance(value, Mapping):
        return {name: _with_empty_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_empty_texts(inner) for inner in value]
    return "" if value is None else value


def _without_nulls(value: Any) -> Any:
    """Without the names whose value is None, which tables give to all rows if one row has them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def template_text(file: Path, setting: str) -> str:
    """SettingsError for a file that cannot be read, or has nothing in it."""
    try:
        text = file.expanduser().read_text(encoding="utf-8-sig")  # without the mark that Notepad begins with
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"{setting} is {str(file)!r}, which cannot be read ({reason}): give a file."
        ) from None
    if not text.strip():
        raise SettingsError(f"{setting} is {str(file)!r}, which is empty: write a Jinja template into it.")
    return text
