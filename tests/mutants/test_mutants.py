"""The faults in this folder, of `make proof PARTS=mutants`: they apply, and their tests are there."""

import pytest
from commands import ROOT
from mutant_trials import judged, read_mutants


def test_every_mutant_applies_once_and_names_tests_that_are_there():
    times = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in read_mutants()}
    assert [name for name, count in times.items() if count != 1] == []


@pytest.mark.parametrize(
    ("status", "said", "judgement"),
    [
        (1, "a.py:3: AssertionError: 1 == 2\nFAILED tests/a.py::test_b[x-1]\n1 failed", (True, "test_b")),
        (None, "", (True, "no end in 180 s")),
        (0, "3 passed, 1 skipped", (False, "SURVIVED")),
        (0, "2 skipped", (False, "SKIPPED: none of its tests ran here")),
        (1, "a.py:3: ImportError: no\nFAILED tests/a.py::test_b\n1 failed", (False, "BROKEN: ImportError")),
        (2, "ERROR tests/a.py\nInterrupted: 1 error", (False, "BROKEN: exit status 2")),
    ],
)
def test_only_a_test_that_ran_and_failed_has_noticed(status, said, judgement):
    assert judged(status, said) == judgement
