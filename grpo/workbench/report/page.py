"""A page as one HTML file that needs nothing else, and as Markdown with its pictures beside it.

What comes from files (completions, notes, messages) may hold anything: HTML escapes it, and its
Content-Security-Policy lets nothing be fetched or run; in Markdown it stands between fences or is escaped.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from grpo.workbench.report.sections import Card, Page, Section, Table
from grpo.workbench.report.wording import NOTHING

_TEMPLATE = "page.html.j2"
_NUMERIC = re.compile(rf"[+-]?\d.*|{NOTHING}")


def to_html(page: Page) -> str:
    """One file: styles and pictures are in it, and it asks for nothing."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        breakable=_breakable, drawing=Markup, notes=notes_html, anchor=anchor, numeric=_numeric_columns
    )
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    return template.render(page=page)


def anchor(title: str) -> str:
    """The id of a section."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def notes_html(text: str) -> Markup:
    """A person's Markdown: HTML in it is shown as text, pictures are left out, headings are of third rank."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = reader.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
    return Markup(reader.renderer.render(tokens, reader.options, {}))


def _breakable(name: str) -> Markup:
    """A name that may go on in a new line after its / and _, and nowhere else."""
    return Markup(re.sub(r"([/_])", r"\1<wbr>", str(escape(name))))


def _numeric_columns(table: Table) -> list[bool]:
    """Which columns hold figures, and so stand to the right."""
    return [
        place > 0 and all(_NUMERIC.fullmatch(row[place]) for row in table.rows)
        for place in range(len(table.columns))
    ]


# -------------------------------------------------------------------------------------------- Markdown


def to_markdown(page: Page, pictures: str) -> str:
    """pictures: the folder, relative to the Markdown file, that holds `NAME.svg` of every figure."""
    lines = [f"# {_plain(page.title)}", "", _plain(page.lede), ""]
    for section in page.sections:
        lines += [f"## {section.title}", "", *_section_lines(section, pictures)]
    return "\n".join(lines)


def save_pictures(page: Page, folder: Path) -> None:
    """Every figure as an SVG file of its own."""
    folder.mkdir(exist_ok=True)
    for section in page.sections:
        for figure in section.figures:
            (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")


def _section_lines(section: Section, pictures: str) -> Iterator[str]:
    bullet = "- " if len(section.sentences) > 1 else ""
    for sentence in section.sentences:
        yield f"{bullet}{_plain(sentence)}"
    if section.sentences:
        yield ""
    if section.notes:
        yield from (f"> {line}".rstrip() for line in section.notes.replace("<", "&lt;").splitlines())
        yield ""
    for table in section.tables:
        yield from _table_lines(table)
    for figure in section.figures:
        caption = f" {_plain(figure.caption)}" if figure.caption else ""
        yield from (
            f"**{_plain(figure.title)}.**{caption}",
            "",
            f"![{_plain(figure.title)}]({pictures}/{figure.name}.svg)",
            "",
        )
    for card in section.cards:
        yield from _card_lines(card)


def _table_lines(table: Table) -> Iterator[str]:
    numeric = _numeric_columns(table)
    yield f"| {' | '.join(_plain(column) for column in table.columns)} |"
    yield f"|{'|'.join('---:' if right else '---' for right in numeric)}|"
    yield from (f"| {' | '.join(_plain(cell) for cell in row)} |" for row in table.rows)
    yield from ("", *([_plain(table.caption), ""] if table.caption else []))


def _card_lines(card: Card) -> Iterator[str]:
    yield from (f"### {_plain(card.title)}", "")
    for board in card.boards:
        yield from (f"- {board.caption}: {board.text}",)
    if card.boards:
        yield ""
    yield from _fenced(f"{card.prompt}\n{card.completion}")
    if card.remark:
        yield from (_plain(card.remark), "")
    if card.scores:
        yield from (", ".join(f"{_plain(name)} {value:.3f}" for name, value in card.scores), "")


def _fenced(text: str) -> list[str]:
    """Between more backticks than the text has in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *text.splitlines(), fence, ""]


def _plain(text: str) -> str:
    """On one line, with what Markdown or HTML would take for its own escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))
