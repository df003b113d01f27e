"""Consoles for commands, on which nothing that comes from outside is taken for markup."""

from typing import Any

from rich.console import Console
from rich.text import Text

MOST_LETTERS = 700
"""The longest error message that is shown whole; one with reasons and remedies has some 500 letters."""


def screen(**options: Any) -> Console:
    """A console that shows paths, names and values as they are; options as of `Console`."""
    return Console(markup=False, **options)


def print_error(console: Console, error: object) -> None:
    """Print what is wrong, with the remedy."""
    console.print(Text.assemble(("error", "red"), f" {shortened(error)}"), highlight=False)


def shortened(error: object) -> str:
    """An error's text; of one that quotes what somebody wrote at length, the beginning and the end."""
    text, half = str(error), MOST_LETTERS // 2
    return text if len(text) <= MOST_LETTERS else f"{text[:half]} … {text[-half:]}"
