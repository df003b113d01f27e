"""What commands print with: nothing that comes from outside is taken for markup."""

from typing import Any

from rich.console import Console
from rich.text import Text


def screen(**options: Any) -> Console:
    """A console that shows paths, names and values as they are; options as of `Console`."""
    return Console(markup=False, **options)


def print_error(console: Console, error: object) -> None:
    """What is wrong, and the remedy."""
    console.print(Text.assemble(("error", "red"), f" {error}"), highlight=False)
