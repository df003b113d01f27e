"""A page as one HTML file that needs nothing else.

What comes from files (completions, notes, messages) may hold anything: it is escaped, and the page's
Content-Security-Policy lets nothing be fetched or run.
"""

import re
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from grpo.workbench.report.sections import Page, Table
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
