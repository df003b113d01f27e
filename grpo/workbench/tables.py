"""Rows as a person sees them: by a column's name what stands there, as JSON has them, too."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]


def table(title: str, rows: Sequence[Row]) -> Table:
    """A line a row, under the names of the first one. None is left empty, a column of nothing else out.

    A column whose every word begins with a digit stands on the right.
    """
    shown = Table(title=title, title_justify="left")
    columns = {}
    for name in rows[0]:
        cells = ["" if row[name] is None else str(row[name]) for row in rows]
        if any(cells):
            columns[name] = cells
            is_number = all(cell[0].isdigit() or cell[0] == "-" for cell in cells if cell)
            shown.add_column(name, justify="right" if is_number else "left")
    for line in zip(*columns.values(), strict=True):
        shown.add_row(*line)
    return shown
