"""Reports on sweeps and training runs: one HTML page that needs nothing else.

Folders are read into plain data (`read`), whose figures become sentences, tables and pictures (`sweep`,
`run`, `compare`), which are then written down (`page`). Left out: anything live. A page is made anew in
seconds.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from loguru import logger

from grpo.workbench.report.compare import runs_page, sweeps_page
from grpo.workbench.report.page import to_html
from grpo.workbench.report.read import NoSteps, Run, Sweep, read_folder
from grpo.workbench.report.run import run_page
from grpo.workbench.report.sections import Page
from grpo.workbench.report.sweep import sweep_page

__all__ = ["make_page", "write_report"]
HTML = "report.html"


def make_page(folders: Sequence[Path]) -> Page:
    """The report on one folder, or on several of a kind side by side.

    ValueError where a folder holds nothing to report on, is given twice, or is not of the others' kind.
    """
    if not folders:
        raise ValueError("no folder is given: give that of a run or of a sweep, or several of a kind.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a folder is given twice: give each once.")
    folders, read = _read(folders)
    kinds = {type(each) for each in read}
    if len(kinds) > 1:
        raise ValueError(
            "both runs and sweeps are given: give folders of one kind, and the others in a second call."
        )
    read = _told_apart(folders, read)
    if kinds == {Sweep}:
        sweeps = cast(list[Sweep], read)
        return sweep_page(sweeps[0]) if len(sweeps) == 1 else sweeps_page(sweeps)
    runs = cast(list[Run], read)
    return run_page(runs[0]) if len(runs) == 1 else runs_page(runs)


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


def _read(folders: Sequence[Path]) -> tuple[list[Path], list[Sweep | Run]]:
    """What the folders hold; a run among others that has no step yet is left out, with a word."""
    found: dict[Path, Sweep | Run] = {}
    empty: list[NoSteps] = []
    for folder in folders:
        try:
            found[folder] = read_folder(folder)
        except NoSteps as error:
            empty.append(error)
    if not found:
        raise empty[0]
    for reason in empty:
        logger.warning("left out: {}", reason)
    return [*found], [*found.values()]


def _told_apart(folders: Sequence[Path], read: Sequence[Sweep | Run]) -> list[Sweep | Run]:
    """With names that are all different: where two are the same, their parents are named as well."""
    names = [each.name for each in read]
    return [
        each
        if names.count(each.name) == 1
        else replace(each, name=f"{folder.resolve().parent.name}/{each.name}")
        for folder, each in zip(folders, read, strict=True)
    ]
