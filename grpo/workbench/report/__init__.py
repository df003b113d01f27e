"""Reports on sweeps and training runs: one HTML page that needs nothing else.

Folders are read into plain data (`read`), whose figures become facts, tables, pictures and cards (`run`,
`sweep`), which a template writes down. Left out: anything live. A page is made anew in seconds.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from loguru import logger
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from grpo.workbench.report.charts import anchor
from grpo.workbench.report.page import Page, Table
from grpo.workbench.report.read import Run, Sweep, read_folder
from grpo.workbench.report.run import run_page, runs_page
from grpo.workbench.report.sweep import sweep_page, sweeps_page
from grpo.workbench.report.wording import NOTHING

__all__ = ["make_page", "to_html", "write_report"]
HTML, _TEMPLATE = "report.html", "page.html.j2"
_NUMERIC = re.compile(rf"[+-]?\d.*|{NOTHING}")


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report and say where.

    output: the folder to write to; without it the run's or sweep's own, or `report/` for several.
    ValueError where nothing can be reported on, or nothing can be written there.
    """
    target = output or (folders[0] if len(folders) == 1 else Path("report"))
    page = make_page(folders)
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / HTML).write_text(to_html(page), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the report cannot be written to {target} ({error.strerror}): give another --output."
        ) from error
    return target / HTML


def make_page(folders: Sequence[Path]) -> Page:
    """The report on one folder, or on several of a kind side by side.

    A run among others that has no step yet is left out, with a word; where two have the same name, their
    parents are named as well. ValueError where a folder holds nothing to report on, is given twice, or is not
    of the others' kind.
    """
    if not folders:
        raise ValueError("no folder is given: give that of a run or of a sweep, or several of a kind.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a folder is given twice: give each once.")
    results = {folder.resolve(): read_folder(folder) for folder in folders}
    waiting = [path for path, result in results.items() if isinstance(result, Run) and result.is_empty]
    if len(waiting) == len(results):
        raise ValueError(f"{waiting[0]} is a run that has logged no step yet: wait for its first one.")
    for path in waiting:
        logger.warning("left out: {}, which has logged no step yet", path)
        del results[path]
    alike = Counter(path.name for path in results)
    named = [
        replace(result, name=f"{path.parent.name}/{path.name}") if alike[path.name] > 1 else result
        for path, result in results.items()
    ]
    runs = [result for result in named if isinstance(result, Run)]
    sweeps = [result for result in named if isinstance(result, Sweep)]
    if runs and sweeps:
        raise ValueError(
            "both runs and sweeps are given: give folders of one kind, and the others in a second call."
        )
    if sweeps:
        return sweep_page(sweeps[0]) if len(sweeps) == 1 else sweeps_page(sweeps)
    return run_page(runs[0]) if len(runs) == 1 else runs_page(runs)


def to_html(page: Page) -> str:
    """One file: styles and pictures are in it, and it asks for nothing.

    What comes from files (completions, notes, messages) may hold anything: it is escaped, HTML and pictures
    in notes are left out, and the page's Content-Security-Policy lets nothing be fetched or run.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    reader = MarkdownIt("js-default").disable("image")
    environment.filters.update(
        anchor=anchor, breakable=_breakable, drawing=Markup, is_numeric=_is_numeric,
        notes=lambda text: Markup(reader.render(text)),
    )  # fmt: skip
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    return template.render(page=page)


def _breakable(name: str) -> Markup:
    """A name that may go on in a new line after its / and _, and nowhere else."""
    return Markup(re.sub(r"([/_])", r"\1<wbr>", str(escape(name))))


def _is_numeric(table: Table, heading: str) -> bool:
    """Whether a column holds figures alone, and so stands to the right."""
    return all(_NUMERIC.fullmatch(row[heading]) for row in table.rows)
