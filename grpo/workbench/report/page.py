"""What a page consists of, before it is HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo.workbench.report.wording import setting


class Fact(NamedTuple):
    """A figure that answers a question, how sure it is, and what to mind."""

    what: str
    value: str
    interval: str = ""
    note: str = ""


class Table(NamedTuple):
    """Cells as people read them; the first column names the row. One without rows is not shown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
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
    scores: Sequence[tuple[str, float]] = ()
    remark: str = ""


@dataclass(frozen=True)
class Section:
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
    def is_empty(self) -> bool:
        shown = (*self.sentences, *self.facts, self.notes, *self.pictures, *self.cards)
        return not any((*shown, *(table.rows for table in self.tables)))


class Page(NamedTuple):
    title: str
    lede: str
    sections: Sequence[Section]


def page(title: str, lede: str, *sections: Section) -> Page:
    return Page(title, lede, [section for section in sections if not section.is_empty])


def settings_section(title: str, settings: Mapping[str, object]) -> Section:
    """Folded; settings within settings go by both names."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        inner = {f"{name}: {key}": each for key, each in value.items()} if isinstance(value, dict) else {}
        flat |= inner or {name: value}
    rows = [(name, setting(name, value)) for name, value in flat.items()]
    return Section(title, tables=[Table(("setting", "value"), rows)], folded=True)
