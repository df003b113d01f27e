"""Faults made in the source are noticed by the tests, one after the other: `-k NAME` tries one."""

import os
import shutil
from pathlib import Path

import pytest
from commands import ROOT
from mutant_trials import ALL_TIMEOUT_S, TIMEOUT_S, Mutant, judged, read_mutants, run_tests

MADE = ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "runs", "build"
"""Files that are no part of the repository."""


@pytest.fixture(scope="session")
def copy(tmp_path_factory, request) -> Path:
    """The repository, in which the tests pass: of several workers each tries its share of them."""
    folder = shutil.copytree(
        ROOT, tmp_path_factory.mktemp("mutants") / "copy", ignore=shutil.ignore_patterns(*MADE)
    )
    chosen = [item.callspec.params["mutant"] for item in request.session.items if hasattr(item, "callspec")]
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = tests[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    status, printed = run_tests(folder, share, timeout_s=ALL_TIMEOUT_S) if share else (0, "")
    assert status == 0, f"tests fail without a mutant (exit status {status}):\n{printed[-3000:]}"
    return folder


@pytest.mark.parametrize("mutant", read_mutants(), ids=str)
def test_a_fault_is_noticed(mutant: Mutant, copy: Path):
    file = copy / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        noticed, what = judged(*run_tests(copy, mutant.tests, timeout_s=TIMEOUT_S))
    finally:
        file.write_text(text)
    print(f"{mutant}: {what}")
    assert noticed, f"{mutant.guarantee} {what}"
