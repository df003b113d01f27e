"""Pictures as PNG files, all in one style."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure


@contextmanager
def picture(
    file: Path,
    size: tuple[float, float],
    *,
    layout: Literal["constrained"] | None = "constrained",
    **panels: Any,
) -> Iterator[Any]:
    """Axes to draw on, which are then written to `file`.

    size: in inches. panels: as of `Figure.subplots`; with several panels their axes come as an array.
    """
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(**panels)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(file, dpi=150)
