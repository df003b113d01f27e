"""What a report consists of, before it is HTML."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells as people read them; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture as SVG; `name` is unique within a page."""

    name: str
    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Board:
    """A position drawn as SVG, and the same in words, for who does not see it."""

    svg: str
    caption: str
    text: str


@dataclass(frozen=True)
class Card:
    """A completion: where it comes from, its boards (if it is about chess), and what it was worth."""

    title: str
    boards: Sequence[Board]
    prompt: str
    completion: str
    scores: Sequence[tuple[str, float]]
    remark: str = ""


@dataclass(frozen=True)
class Section:
    """A titled part of a page.

    notes: Markdown of a person's own. row: so many cards belong side by side. folded: closed until asked for.
    """

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    cards: Sequence[Card] = ()
    row: int | None = None
    notes: str = ""
    folded: bool = False

    @property
    def empty(self) -> bool:
        return not (self.sentences or self.tables or self.figures or self.cards or self.notes)


@dataclass(frozen=True)
class Page:
    title: str
    lede: str
    sections: Sequence[Section]
