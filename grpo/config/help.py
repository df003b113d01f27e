"""The meaning of settings, for people: the help of the command line, and docs/settings.md."""

import textwrap
from dataclasses import fields
from typing import Any

from docstring_parser import parse_from_object

from grpo.config.limits import values_of
from grpo.config.settings import Config

FIRST = (
    "model",
    "prompts",
    "reward",
    "steps",
    "batch_size",
    "group_size",
    "learning_rate",
    "kl_coef",
    "max_new_tokens",
    "stop",
    "memory_limit",
    "minutes",
    "name",
    "resume",
    "dry_run",
)
"""Settings that people need first."""


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """By title (flag, default, text) of settings, each once: what people need first, the others by class."""
    first: dict[str, tuple[str, str, str]] = {}
    others: dict[str, list[tuple[str, str, str]]] = {}
    for group in reversed(Config.__bases__):
        written = parse_from_object(group)  # with the strings below its fields
        texts = {field.arg_name: " ".join((field.description or "").split()) for field in written.params}
        members = others[(written.short_description or "").rstrip(".")] = []
        for item in fields(group):
            allowed = values_of(group)[item.name]
            is_word = not allowed.kinds and not allowed.is_tuple
            text = texts[item.name] + (f" One of {allowed.choices}." if is_word else "")
            setting = f"--{item.name.replace('_', '-')}", _shown(item.default), text
            if item.name in FIRST:
                first[item.name] = setting
            else:
                members.append(setting)
    return {"What people need first": [first[name] for name in FIRST], **others}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def help_text(program: str, width: int = 100) -> str:
    """Returns the text that `--help` prints."""
    lines = [
        f"usage: {program} [--config FILE.yaml [--profile NAME]] [FLAGS]",
        "",
        "Train a language model with GRPO: groups of completions, compared with their siblings.",
        "",
        *textwrap.wrap(
            "--config FILE.yaml sets defaults that flags override; --profile NAME takes one of its profiles. "
            "A flag that is on or off is given as --flag or --no-flag. Defaults are in brackets.",
            width,
        ),
    ]
    for title, members in sections().items():
        lines += ["", title]
        for flag, default, text in members:
            first, *rest = textwrap.wrap(f"{text} [{default}]", width - 28)
            lines.append(f"  {flag:<25} {first}")
            lines += [" " * 28 + line for line in rest]
    return "\n".join(lines)


def settings_page() -> str:
    """Returns the text of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Flags of `grpo-lean train` (`python train_lean.py`), and names in `--config FILE.yaml`,",
        "where a dash is an underscore. This page is made by `python scripts/settings_page.py`.",
    ]
    for title, members in sections().items():
        lines += ["", f"## {title}", "", "| flag | default | |", "|---|---|---|"]
        for flag, default, text in members:
            escaped = text.replace("|", "\\|").replace("*", "\\*")
            lines.append(f"| `{flag}` | {default} | {escaped} |")
    return "\n".join(lines) + "\n"
