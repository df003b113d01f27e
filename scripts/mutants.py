"""Breaks one guarantee after the other, in a copy of the repository: do the tests notice?

Each table of tests/mutants/*.toml is a fault: the guarantee that it breaks, the file, a text that stands
there once, what takes its place, and the tests of which one must fail. One that survives is a gap.
"""

import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import tyro
from benchmarks.processes import run_to_end
from benchmarks.results import CONSOLE, table

ROOT = Path(__file__).resolve().parents[1]
LEAST = 40
"""Mutants that there have to be."""
TIMEOUT_S, ALL_TIMEOUT_S = 180.0, 1200.0
"""For the tests of one mutant, which may hang by it, and for all of them without any."""
MADE = ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "runs", "build"
"""What is no part of the repository."""


@dataclass(frozen=True)
class Mutant:
    name: str
    guarantee: str
    file: str
    old: str
    new: str
    tests: list[str]
    """By pytest's ids: functions, or cases of them where all would take long."""


def read_mutants(root: Path = ROOT) -> list[Mutant]:
    """ValueError for too few, two of one name, or tests that are not there."""
    files = sorted((root / "tests" / "mutants").glob("*.toml"))
    mutants = [Mutant(**table) for file in files for table in tomllib.loads(file.read_text())["mutant"]]
    if len({mutant.name for mutant in mutants}) < max(LEAST, len(mutants)):
        raise ValueError(f"{len(mutants)} mutants: there have to be {LEAST} or more, no two of one name.")
    for mutant in mutants:
        for test in mutant.tests:
            file, _, function = test.partition("::")
            found = (root / file).is_file() and (root / file).read_text()
            if not found or f"def {function.partition('[')[0]}" not in found:
                raise ValueError(f"mutant {mutant.name} names {test}, which is not there.")
    return mutants


def run_tests(folder: Path, tests: Sequence[str], *, timeout_s: float) -> tuple[int | None, str]:
    """Up to the first that fails: pytest's exit status, None if it was ended, and what it said."""
    # Bytecode goes by a file's second: between two changes of one there is a run, which takes longer.
    path = os.pathsep.join(map(str, (folder, folder / "scripts")))  # for commands that tests start, too
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-rfE", *tests]
    said = folder.with_suffix(".txt")
    status = run_to_end(command, said, timeout_s, cwd=folder, env=environment)
    return status, said.read_text(errors="replace")


def judged(status: int | None, said: str) -> tuple[bool, str]:
    """Whether tests that ended so have noticed, and which. What cannot be imported proves nothing."""
    broken = re.search(r": ((?:Import|ModuleNotFound|Syntax|Indentation|Name)Error)\b", said)
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\w+)", said, re.MULTILINE)
    if status is None:
        return True, f"no end in {TIMEOUT_S:.0f} s"
    if status == 1 and failed and not broken:
        return True, failed[1]
    if status == 0:
        return False, "SURVIVED" if " passed" in said else "SKIPPED: none of its tests ran here"
    return False, f"BROKEN: {broken[1] if broken else f'exit status {status}'}"


def try_out(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Put a mutant into a copy, run its tests there, and take it out again."""
    file = folder / mutant.file
    text = file.read_text() if file.is_file() else ""
    if (count := text.count(mutant.old)) != 1:
        return False, f"DOES NOT APPLY: its text is there {count} times"
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        return judged(*run_tests(folder, mutant.tests, timeout_s=TIMEOUT_S))
    finally:
        file.write_text(text)


def try_all(mutants: Sequence[Mutant], folder: Path, jobs: int) -> list[tuple[bool, str]]:
    """What becomes of each. RuntimeError where tests do not pass without any."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    free: SimpleQueue[Path] = SimpleQueue()

    def prepare(job: int) -> None:
        copy = shutil.copytree(ROOT, folder / f"copy-{job}", ignore=shutil.ignore_patterns(*MADE))
        status, printed = run_tests(copy, tests[job::jobs], timeout_s=ALL_TIMEOUT_S)
        if status != 0:
            raise RuntimeError(f"tests fail without a mutant (exit status {status}):\n{printed[-3000:]}")
        free.put(copy)

    def one(mutant: Mutant) -> tuple[bool, str]:
        copy = free.get()
        killed, what = try_out(mutant, copy)
        free.put(copy)
        print(f"{mutant.name}: {what}", file=sys.stderr, flush=True)
        return killed, what

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(prepare, range(jobs)))
        return list(pool.map(one, mutants))


def main(
    jobs: int = 2, only: tuple[str, ...] = (), names: Annotated[bool, tyro.conf.arg(name="list")] = False
) -> int:
    """Print a table of mutants and the tests that have noticed them; 1 unless all were noticed.

    Args:
        jobs: Mutants at a time, each in a copy of its own.
        only: Names of those to try; all if none is given.
        names: Say which there are, and try none.
    """
    mutants = [mutant for mutant in read_mutants() if not only or mutant.name in only]
    if names or len(mutants) < len(only):
        for mutant in mutants:
            CONSOLE.print(f"{mutant.name}: {mutant.guarantee}")
        return int(len(mutants) < len(only))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        outcomes = try_all(mutants, Path(folder).resolve(), min(jobs, len(mutants)))
    CONSOLE.print(table(
        {"mutant": mutant.name, "guarantee": mutant.guarantee, "file": mutant.file, "noticed by": what}
        for mutant, (_, what) in zip(mutants, outcomes, strict=True)
    ))  # fmt: skip
    num_killed = sum(killed for killed, _ in outcomes)
    CONSOLE.print(f"mutants: {num_killed} of {len(mutants)} killed", highlight=False)
    return int(num_killed < len(mutants))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
