"""What a sweep or a training run found, as one HTML page; several of a kind side by side.

grpo-lean report RUN_OR_SWEEP [ANOTHER ...]
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console


@dataclass(frozen=True)
class ReportConfig:
    """Write report.html, which needs nothing else and opens from disk."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """A sweep's or a run's folder, or several of a kind to compare."""
    output: Path | None = None
    """Where to write; by default into the folder itself, and into report/ for several."""

    def __post_init__(self) -> None:
        if not self.folders:
            raise ValueError("no folder is given: give that of a run or of a sweep, or several of a kind")
        for folder in self.folders:
            if not folder.is_dir():
                raise ValueError(f"{folder} is no folder: give that of a run or of a sweep")


def main(config: ReportConfig, console: Console) -> None:
    """Write the page, and say where it is."""
    from grpo.workbench.report import write_report  # slow: --help need not wait for it

    console.print(str(write_report(config.folders, config.output)), highlight=False, soft_wrap=True)
