"""From a row of a user's own columns to what the model is asked: text, or a conversation in its template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo.config.groups import PromptSettings
from grpo.config.limits import SettingsError
from grpo.data.tokens import Tokenizer
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
_TEMPLATES.tests["none"] = lambda value: isinstance(value, str) and value == ""  # as which nothing comes
_REFUSALS = (jinja2.TemplateError, TypeError, ArithmeticError, AttributeError, LookupError)
"""What templates raise for what they do not take, and the sandbox for what they may not do."""

Columns = Mapping[str, Any]


class Renderer:
    """Renders prompts by the settings and the model's tokenizer, without which there are no conversations.

    SettingsError for files and templates that are not there.
    """

    def __init__(self, settings: PromptSettings, tokenizer: Tokenizer | None = None) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._template, self._chat_template = None, getattr(tokenizer, "chat_template", None)
        if settings.prompt_template is not None:
            text = template_text(settings.prompt_template, "prompt_template")
            try:
                self._template = _TEMPLATES.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise SettingsError(
                    f"prompt_template is {str(settings.prompt_template)!r}, which is no Jinja template: line "
                    f"{error.lineno}: {error.message}."
                ) from error
        if settings.chat_template is not None:
            self._chat_template = template_text(settings.chat_template, "chat_template")
        from_template = self._template is not None and settings.chat == "auto"
        self._text_is_message = settings.chats or (from_template and self._chat_template is not None)

    @property
    def is_chosen(self) -> bool:
        """Whether the settings say what is asked, so that rows are the user's own whatever else they have."""
        return self._settings.prompt_column is not None or self._template is not None

    def render_prompt(self, row_id: str, record: Columns) -> Prompt:
        """ValueError for a row that cannot be asked, SettingsError for what is wrong with them all."""
        if (task := record.get("task")) in ("policy", "environment"):
            raise ValueError(f"rename column `task`: {task!r} in it means a chess prompt, which this is not")
        asked = self._asked(record, self._settings.prompt_column or "prompt")
        columns = {"task": "custom", **other_columns(record, "prompt")}
        if isinstance(asked, str):
            return Prompt(row_id, asked, columns)
        return Prompt(row_id, self._conversation(asked, record), columns, asked)

    def _asked(self, record: Columns, column: str) -> str | Messages:
        """What a row asks, as text or messages."""
        if self._template is not None:
            try:
                asked: Any = self._template.render(_with_empty_texts(record))
            except jinja2.UndefinedError as error:
                raise ValueError(f"prompt_template: {error.message}; there are {', '.join(record)}") from None
            except _REFUSALS as error:
                raise ValueError(f"prompt_template: {error}") from error
        elif (asked := record.get(column)) is None:
            raise ValueError(f"there is no `{column}`; there are {', '.join(record)}")
        if isinstance(asked, str):
            if not asked.strip():
                raise ValueError(f"`{column}` is empty")
            if not self._text_is_message:
                return asked
            asked = [{"role": "user", "content": asked}]
        messages = checked_messages(asked, column)
        if self._settings.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._settings.system_prompt}, *messages]
        return messages

    def _conversation(self, messages: Messages, record: Columns) -> str:
        """As the chat template has it, with the beginning of an answer."""
        if self._tokenizer is None or self._chat_template is None:
            raise SettingsError(NO_CHAT_TEMPLATE)
        tools, options = record.get("tools"), record.get("chat_template_kwargs")
        if isinstance(tools, str):  # as some datasets store them
            tools = json.loads(tools)
        messages, tools, options = _without_nulls([messages, tools or None, options or {}])
        render: Any = getattr(self._tokenizer, "apply_chat_template", None)
        try:
            text: str = render(
                messages, tools=tools, chat_template=self._chat_template,
                add_generation_prompt=True, tokenize=False, **options,
            )  # fmt: skip
        except jinja2.TemplateSyntaxError as error:
            raise SettingsError(
                f"the chat template is no Jinja template: line {error.lineno}: {error.message}; give another "
                "--chat-template."
            ) from error
        except _REFUSALS as error:
            raise ValueError(f"the chat template does not take it: {error}") from error
        return text


def other_columns(record: Columns, used: str) -> dict[str, Any]:
    """Those besides the `used` one, which the rewards get. ValueError for a name that is taken."""
    if taken := RESERVED_COLUMNS & record.keys():
        raise ValueError(f"rename column `{min(taken)}`: every reward function already gets that argument")
    return {name: value for name, value in record.items() if name != used}


def _with_empty_texts(value: Any) -> Any:
    """Nothing as a text without letters, at any depth: a template would write "None"."""
    if isinstance(value, Mapping):
        return {name: _with_empty_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_empty_texts(inner) for inner in value]
    return "" if value is None else value


def _without_nulls(value: Any) -> Any:
    """What conversations hold without names of nothing, which tables give all rows that one has."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def template_text(file: Path, setting: str) -> str:
    """SettingsError for a file that cannot be read, or has nothing in it."""
    try:
        text = file.expanduser().read_text(encoding="utf-8-sig")  # a mark of Notepad's is no part of it
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"{setting} is {str(file)!r}, which cannot be read ({reason}): give a file."
        ) from None
    if not text.strip():
        raise SettingsError(f"{setting} is {str(file)!r}, which is empty: write a Jinja template into it.")
    return text
