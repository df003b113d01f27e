"""What a page consists of, before it is HTML."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpo.workbench.report.wording import setting


class Fact(NamedTuple):
    """A figure that answers a question, how sure it is, and what to mind."""

    what: str
    value: str
    interval: str = ""
    note: str = ""


class Table(NamedTuple):
    """Rows of cells by heading, the same headings in each, the first of which names the row."""

    rows: Sequence[Mapping[str, str]]
    caption: str = ""


class Picture(NamedTuple):
    """Curves or a board as SVG, with ids that no other picture of the page has."""

    svg: str
    caption: str
    title: str = ""


class Card(NamedTuple):
    """A completion, with boards if it is about chess, and what it was worth."""

    title: str
    boards: Sequence[Picture]
    prompt: str
    completion: str
    scores: Mapping[str, float] = {}
    remark: str = ""


class Section(NamedTuple):
    """A titled part of a page, left out where it holds nothing.

    notes: Markdown of a person's own. row: so many cards belong side by side. folded: closed until asked for.
    """

    title: str
    sentences: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    notes: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture | None] = ()
    cards: Sequence[Card] = ()
    row: int | None = None
    folded: bool = False

    @property
    def holds_something(self) -> bool:
        return any((self.sentences, self.facts, self.notes, self.tables, self.pictures, self.cards))


class Page(NamedTuple):
    title: str
    lede: str
    sections: Sequence[Section]


def page(title: str, lede: str, *sections: Section) -> Page:
    """Without the tables that have no row, the pictures that have no curve, and the sections left empty."""
    filled = [
        part._replace(
            tables=[table for table in part.tables if table.rows],
            pictures=[picture for picture in part.pictures if picture],
        )
        for part in sections
    ]
    return Page(title, lede, [part for part in filled if part.holds_something])


def settings_section(title: str, settings: Mapping[str, object]) -> Section:
    """Folded; settings within settings go by both names."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        inner = {f"{name}: {key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        flat |= inner or {name: value}
    rows = [{"setting": name, "value": setting(name, value)} for name, value in flat.items()]
    return Section(title, tables=[Table(rows)], folded=True)
