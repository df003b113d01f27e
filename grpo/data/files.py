"""Local files of prompts: what each kind of file holds, and how its rows are counted.

A row's id is the file's name and the row's number from one ("train.txt:17"), so that moving a file
to another folder changes nothing. Left out on purpose: compressed files and folders of files.
"""

import csv
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TextIO, cast

import chess.pgn

from grpo.data.maker import Convert
from grpo.data.rows import finite, from_game, from_json, from_line, from_position, from_record
from grpo.errors import UserError

File = Path | Traversable
Rows = Iterator[tuple[int, Any]]
"""The number of each row, and what it holds; a ValueError where that cannot be read."""


def file_rows(file: File) -> Iterator[tuple[str, Any, Convert]]:
    """The rows of a file, each with its id and what makes prompts of it."""
    read, convert = FORMATS[Path(file.name).suffix.lower()]
    return ((f"{file.name}:{number}", content, convert) for number, content in read(file))


def check_file(path: Path) -> None:
    """ValueError unless `path` is a file of a kind that is read here."""
    accepted = ", ".join(FORMATS)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name one file in it ({accepted})")
    if not path.exists():
        raise UserError(
            f"no file {path}{_near(path)}; --prompts is bundled, a file, or OWNER/NAME on the hub"
        )
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: prompts are read from {accepted}, not from {path.suffix or 'other'} files")


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix.lower() in FORMATS)
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


# ------------------------------------------------------------------------------------------ readers


def _lines(file: File, comment: bytes | None = None) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip() and not (comment and line.startswith(comment)):
                try:
                    yield number, line.decode("utf-8-sig")
                except UnicodeDecodeError:
                    yield number, ValueError("bytes that are no UTF-8: save the file in that encoding")


def _records(file: File) -> Rows:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"{file} needs pyarrow: pip install pyarrow, or give a .jsonl file") from error
    try:
        with parquet.ParquetFile(str(file)) as table:
            records = (record for batch in table.iter_batches() for record in batch.to_pylist())
            yield from enumerate(records, start=1)
    except (ValueError, OSError) as error:
        raise UserError(f"{file} is not a parquet file, or a damaged one: {error}") from error


def _table(file: File, *, delimiter: str) -> Rows:
    """Rows by the names in the first line. A column of numbers alone is numbers, and nothing is None."""
    csv.field_size_limit(sys.maxsize)  # a prompt may be long
    rows, began = [], 1
    with file.open("r", encoding="utf-8-sig", errors="surrogateescape") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                rows.append(row)
                began = reader.line_num + 1
        except csv.Error as error:  # at the end of the file, of a quote that is not closed
            raise UserError(f"{file}, in the row that begins in line {began}: {error}") from error
    names, *content = [row for row in rows if row] or [[]]
    if others := _other_separator(names, delimiter):
        raise UserError(
            f"{file} has {others} between its fields, where {_SEPARATORS[delimiter]} belong: save it again "
            "with those, or as .jsonl"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{file} names a column twice in its first line: {', '.join(names)}")
    columns = list(zip(*(row for row in content if len(row) == len(names)), strict=True)) or [()] * len(names)
    are_numbers = [all(_NUMBER.fullmatch(field) for field in column if field) for column in columns]
    for number, row in enumerate(content, start=1):
        try:
            if len(row) != len(names):
                raise UserError(f"{len(row)} fields, and {len(names)} names in the first line")
            yield number, dict(zip(names, map(_value, row, are_numbers), strict=True))
        except ValueError as error:
            yield number, error


_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}


def _other_separator(names: Sequence[str], delimiter: str) -> str | None:
    """Returns the delimiter that the first line seems to have instead of `delimiter`."""
    if len(names) != 1 or delimiter in names[0]:
        return None
    first = names[0].removeprefix("sep=")  # in which Excel tells itself
    return next((name for other, name in _SEPARATORS.items() if other != delimiter and other in first), None)


_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
"""Not a code of digits such as 007."""


def _value(field: str, is_number: bool) -> str | int | float | None:
    if not field or not is_number:
        return field or None
    return int(field) if re.fullmatch(r"-?\d+", field) else finite(field)


def _games(file: File) -> Rows:
    with file.open("r", encoding="utf-8-sig", errors="replace") as text:
        games = iter(lambda: chess.pgn.read_game(cast(TextIO, text), Visitor=_MainLine), None)
        yield from enumerate(games, start=1)


class _MainLine(chess.pgn.GameBuilder[chess.pgn.Game]):
    """Keeps errors without printing them, and leaves variations out."""

    def __init__(self) -> None:
        super().__init__(Game=chess.pgn.Game)

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)

    def begin_variation(self) -> Any:
        return chess.pgn.SKIP

    def end_variation(self) -> None:
        """There is nothing to leave."""


FORMATS: dict[str, tuple[Callable[[File], Rows], Convert]] = {
    ".txt": (_lines, from_line),
    ".jsonl": (_lines, from_json),
    ".csv": (partial(_table, delimiter=","), from_record),
    ".tsv": (partial(_table, delimiter="\t"), from_record),
    ".parquet": (_records, from_record),
    ".fen": (partial(_lines, comment=b"#"), from_position),
    ".epd": (partial(_lines, comment=b"#"), from_position),
    ".pgn": (_games, from_game),
}
