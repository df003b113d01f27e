"""Rows of figures as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.box import HEAVY_HEAD, Box
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
"""By a column's name what stands there: a text, a number or None."""


def table(
    rows: Sequence[Row] | Sequence[Row | None],
    title: str = "",
    *,
    caption: str = "",
    box: Box = HEAVY_HEAD,
    show_header: bool = True,
) -> Table:
    """A table with a line for each row, under the names of all of them; a line is drawn for a row None.

    The first column names the rows and stands on the left, and so does one with words in it; figures stand
    on the right. A cell that is None is left empty, and a column of nothing but None is left out.
    """
    shown = Table(
        title=title or None,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box,
        show_header=show_header,
    )
    filled = [row for row in rows if row is not None]
    cells: dict[str, list[str | Text]] = {}
    for name in dict.fromkeys(name for row in filled for name in row):
        if any(row.get(name) is not None for row in filled):
            column = [_as_text(row.get(name)) for row in filled]
            is_figures = bool(cells) and all(map(_is_figure, column))
            shown.add_column(name, justify="right" if is_figures else "left", no_wrap=not cells)
            cells[name] = column
    number = 0
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*(column[number] for column in cells.values()))
            number += 1
    return shown


def _as_text(cell: Any) -> str | Text:
    return cell if isinstance(cell, Text) else "" if cell is None else str(cell)


def _is_figure(cell: str | Text) -> bool:
    return not cell or str(cell)[0].isdigit() or str(cell)[0] in "+-"
