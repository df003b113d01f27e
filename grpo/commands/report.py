"""What a sweep or a training run found, as one HTML page; several of a kind side by side.

python scripts/report.py RUN_OR_SWEEP [ANOTHER ...]
"""

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console


def main(console: Console) -> None:
    """Write the page, and say where it is."""
    tyro.cli(write)


def write(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], output: Path | None = None) -> None:
    """Write report.html, which needs nothing else and opens from disk.

    Args:
        folders: A sweep's or a run's folder, or several of a kind to compare.
        output: Where to write; by default into the folder itself, and into report/ for several.
    """
    from grpo.workbench.report import write_report  # slow: --help need not wait for it

    print(write_report(folders, output))
