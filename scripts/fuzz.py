"""A thousand bad settings, prompts, rewards, run folders and checkpoints: what does the command say?"""

import sys

import tyro
from benchmarks.fuzz import fuzz
from rich import box
from rich.table import Table

from grpo.commands.screen import screen


def main(cases: int = 100, seed: int = 0) -> int:
    """Print a table of cases by kind, and those that broke the rule; 1 if there are any.

    Args:
        cases: How many, over all kinds; about two a second.
        seed: Of what is made up.
    """
    console = screen(width=100)
    found = fuzz(cases, seed, lambda text: print(text, file=sys.stderr))
    columns = ("cases", "ended well", "message", "broken")
    table = Table(f"what was bad (seed {seed})", *columns, box=box.MARKDOWN)
    for kind, counts in found.items():
        table.add_row(kind, *(str(counts[column]) for column in columns))
    console.print(table)
    return int(any(counts["broken"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
