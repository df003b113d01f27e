"""Reports on sweeps and training runs: one HTML page that needs nothing else.

Folders are read into plain data (`read`), from which `run` and `sweep` work out the facts and records that
run.html.j2 and sweep.html.j2 put into words, tables, curves (`charts`) and cards (`boards`); page.html.j2 is
the frame. A record is figures by name, and NAME/low and NAME/high are the ends of the 95 % interval of NAME.
Left out: anything live.
"""

import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from loguru import logger
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from grpo.errors import UserError
from grpo.memory.budget import GB
from grpo.workbench.report.charts import histogram, line, stack
from grpo.workbench.report.read import RunFolder, SweepFolder, curves, read_folder
from grpo.workbench.report.run import run_content, runs_content
from grpo.workbench.report.sweep import sweeps_content
from grpo.workbench.report.text import NOTHING, anchor, rows, setting_rows

__all__ = ["make_page", "write_report"]
HTML = "report.html"
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
        (target / HTML).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {target} ({error.strerror}): give another --output."
        ) from error
    return target / HTML


def make_page(folders: Sequence[Path]) -> str:
    """The page on one folder, or on several of a kind side by side, named by what differs in their paths.

    A run among others that has no step yet is left out, with a word. ValueError where a folder holds nothing
    to report on, is given twice, or is not of the others' kind.
    """
    if not folders:
        raise UserError("no folder is given: give that of a run or of a sweep, or several of a kind.")
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("a folder is given twice: give each once.")
    shared = os.path.commonpath([path.parent for path in paths])
    results = [read_folder(path, str(path.relative_to(shared))) for path in paths]
    sweeps = [result for result in results if isinstance(result, SweepFolder)]
    runs = [result for result in results if isinstance(result, RunFolder)]
    if runs and sweeps:
        raise UserError(
            "both runs and sweeps are given: give folders of one kind, and the others in a second call."
        )
    begun = [run for run in runs if run.steps or run.evaluations]
    if runs and not begun:
        raise UserError(f"{paths[0]} is a run that has logged no step yet: wait for its first one.")
    for run in runs:
        if run not in begun:
            logger.warning("left out: {}, which has logged no step yet", run.name)
    if sweeps:
        template, kind, content = "sweep.html.j2", "Batch sizes", sweeps_content(sweeps)
    elif len(begun) == 1:
        template, kind, content = "run.html.j2", "Training run", run_content(begun[0])
    else:
        template, kind, content = "runs.html.j2", "Runs compared", runs_content(begun)
    shown = sweeps or begun
    missing = [(result.name, text) for result in shown for text in result.missing]
    content["title"] = f"{kind}: {', '.join(result.name for result in shown)}"
    content["missing"] = [f"{name}: {text}" if len(shown) > 1 else text for name, text in missing]
    return _to_html(template, content)


def _to_html(template: str, content: Mapping[str, Any]) -> str:
    """One file: styles and pictures are in it, and it asks for nothing.

    What comes from files (completions, notes, messages) may hold anything: it is escaped, HTML and pictures
    in notes are left out, and the page's Content-Security-Policy lets nothing be fetched, and no script be
    run but the page's own, which is named by its hash.
    """
    script = files(__name__).joinpath("filter.js").read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader(__name__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    markdown = MarkdownIt("js-default").disable("image")
    pictures = {"line": line, "stack": stack, "histogram": histogram}
    environment.globals |= {**pictures, "curves": curves, "GB": GB}
    environment.globals |= {"script": Markup(script), "script_hash": f"sha256-{digest}"}
    environment.filters |= {
        "anchor": anchor,
        "rows": rows,
        "setting_rows": setting_rows,
        "side": _side,
        "breakable": lambda name: Markup(re.sub(r"([/_])", r"\1<wbr>", str(escape(name)))),
        "literally": re.escape,
        "markdown": lambda notes: Markup(markdown.render(notes)),
    }
    return environment.get_template("page.html.j2").render(content, content=template)


def _side(cells: Sequence[Mapping[str, str]], heading: str) -> Markup:
    """A column that holds figures alone, and does not name the rows, stands to the right."""
    is_numeric = heading != next(iter(cells[0])) and all(_NUMERIC.fullmatch(row[heading]) for row in cells)
    return Markup(' class="right"' if is_numeric else "")
