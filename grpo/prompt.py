"""One question to the model. Nothing large is loaded here, so that data can be checked first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo.errors import UserError

TASKS = ("policy", "environment", "custom")

Messages = list[dict[str, Any]]
"""TRL's conversational form: `[{"role": "user", "content": "…"}]`."""


@dataclass(frozen=True)
class Prompt:
    """One question to the model. `columns` is what rewards read about it, one value each.

    `id` names the row it came from ("train.txt:17") and stays the same from run to run.
    """

    id: str
    text: str
    """The text that goes into the model; a conversation as the chat template renders it."""
    columns: dict[str, Any]
    messages: Messages | None = None
    """The conversation that `text` was, if it was one."""
    undated: str | None = None
    """`text` as the chat template renders it on any day, if it says what day it is."""

    @property
    def lasting_text(self) -> str:
        """The prompt's name from one day to another."""
        return self.text if self.undated is None else self.undated

    @property
    def task(self) -> str:
        """ "policy", "environment", or "custom" for a prompt of the user's own."""
        task = self.columns.get("task")
        return task if task in TASKS else "custom"

    @property
    def for_rewards(self) -> str | Messages:
        """The prompt as rewards get it: text, or messages."""
        return self.text if self.messages is None else self.messages

    def as_completion(self, completion: str) -> str | Messages:
        """Returns a completion of the prompt in the same form."""
        return completion if self.messages is None else [{"role": "assistant", "content": completion}]


def checked_messages(value: Any, name: str) -> Messages:
    """A conversation as it is given in a row. ValueError for one that no chat template takes."""
    if not isinstance(value, list) or not value:
        raise UserError(f"`{name}` is {_kind(value)}, and neither text nor a list of messages")
    messages: Messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise UserError(f"message {number} of `{name}` is {_kind(message)}: give role and content")
        fields = {key: field for key, field in message.items() if field is not None}
        if not isinstance(fields.get("role"), str):
            raise UserError(f"message {number} of `{name}` has no role: give system, user or assistant")
        content = _joined(fields.get("content"))
        if not isinstance(content, str) and "tool_calls" not in fields:
            raise UserError(f"message {number} of `{name}` has {_kind(content)} as its content: give text")
        messages.append(fields if content is None else {**fields, "content": content})
    return messages


def _joined(content: Any) -> Any:
    """Joins the parts of a content that are all text, as some datasets have them."""
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return content


def _kind(value: Any) -> str:
    return "nothing" if value is None else "empty" if value == [] else type(value).__name__
