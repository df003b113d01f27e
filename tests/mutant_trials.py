"""Breaks one guarantee after the other, in a copy of the repository: do the tests notice?

Each table of tests/mutants/*.toml is a fault: the guarantee that it breaks, the file, a text that stands
there once, what takes its place, and the tests of which one must fail. One that survives is a gap.
"""

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import ROOT
from proof import run_to_end

LEAST = 40
"""Mutants that there have to be."""
TIMEOUT_S, ALL_TIMEOUT_S = 180.0, 1200.0
"""For the tests of one mutant, which may hang by it, and for all of them without any."""


@dataclass(frozen=True)
class Mutant:
    name: str
    guarantee: str
    file: str
    old: str
    new: str
    tests: list[str]
    """By pytest's ids: functions, or cases of them where all would take long."""

    def __str__(self) -> str:
        return self.name


def read_mutants() -> list[Mutant]:
    """AssertionError for too few, two of one name, or tests that are not there."""
    files = sorted((ROOT / "tests" / "mutants").glob("*.toml"))
    mutants = [Mutant(**table) for file in files for table in tomllib.loads(file.read_text())["mutant"]]
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= LEAST
    for mutant in mutants:
        for test in mutant.tests:
            file, _, function = test.partition("::")
            there = (ROOT / file).is_file() and (ROOT / file).read_text()
            assert there and f"def {function.partition('[')[0]}" in there, (mutant.name, test)
    return mutants


def run_tests(folder: Path, tests: Sequence[str], *, timeout_s: float) -> tuple[int | None, str]:
    """Up to the first that fails: pytest's exit status, None if it was ended, and what it printed."""
    # Bytecode goes by a file's second: between two changes of one there is a run, which takes longer.
    path = os.pathsep.join(map(str, (folder, folder / "scripts")))  # for commands that tests start, too
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-rfE", *tests]
    printed = folder.with_suffix(".txt")
    status = run_to_end(command, printed, timeout_s, cwd=folder, env=environment)
    return status, printed.read_text(errors="replace")


def judged(status: int | None, printed: str) -> tuple[bool, str]:
    """Whether tests that ended so have noticed, and which. What cannot be imported proves nothing."""
    broken = re.search(r": ((?:Import|ModuleNotFound|Syntax|Indentation|Name)Error)\b", printed)
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\w+)", printed, re.MULTILINE)
    if status is None:
        return True, f"no end in {TIMEOUT_S:.0f} s"
    if status == 1 and failed and not broken:
        return True, failed[1]
    if status == 0:
        return False, "SURVIVED" if " passed" in printed else "SKIPPED: none of its tests ran here"
    return False, f"BROKEN: {broken[1] if broken else f'exit status {status}'}"
