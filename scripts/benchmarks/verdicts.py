"""What a benchmark says of its own figures, and the exit status that follows."""

from collections.abc import Mapping

from rich.console import Console


def conclude(verdicts: Mapping[str, bool], console: Console) -> int:
    """Print each sentence, and whether it holds; the exit status: 1 if one does not."""
    for sentence, holds in verdicts.items():
        console.print(f"{'met   ' if holds else 'MISSED'} {sentence}", highlight=False, markup=False)
    return int(not all(verdicts.values()))
