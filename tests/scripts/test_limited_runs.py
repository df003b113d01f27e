"""The benchmark of whole runs: one real run, and what it makes of outcomes that are made up."""

from dataclasses import replace

from benchmarks.limit_ladder import ladder_table, ladder_verdicts
from benchmarks.limited_runs import RunOutcome, run_command
from benchmarks.run_grid import grid, grid_table, grid_verdicts

MB = 2**20
GOOD = RunOutcome(
    "good", 0, False, step_s=2.0, most_bytes=900 * MB, expected_bytes=600 * MB, error_bytes=20 * MB,
    measured_bytes=615 * MB, baseline_bytes=500 * MB,
)  # fmt: skip


def test_a_run_is_held_against_what_it_said(tmp_path):
    (outcome,) = grid(tmp_path, only="rook-tiny --batch-size 8 --precision fp32")
    assert outcome.status == 0 and not outcome.traceback and outcome.step_s
    assert outcome.baseline_bytes < outcome.measured_bytes <= outcome.most_bytes
    assert abs(outcome.miss) < 3


def test_a_limit_that_is_too_tight_is_a_refusal_however_it_is_set():
    options = ["--model", "rook-tiny", "--batch-size", "8", "--precision", "fp32"]
    outcome = run_command("tight", options, limit=560 * MB, how="ulimit -d")
    assert outcome.status == 2 and not outcome.traceback
    assert "does not fit: one row needs" in " ".join(outcome.said.split())


def test_verdicts():
    off, wide = replace(GOOD, measured_bytes=650 * MB), replace(GOOD, error_bytes=60 * MB)
    assert list(grid_verdicts([GOOD] * 20).values()) == [True] * 4 + [False]  # 20 of 16 MB
    assert list(grid_verdicts([replace(GOOD, error_bytes=15 * MB)] * 20).values()) == [True] * 5
    assert list(grid_verdicts([GOOD, off, wide]).values())[2] is False
    assert list(grid_verdicts([replace(GOOD, measured_bytes=901 * MB), wide]).values())[1] is False
    assert list(grid_verdicts([replace(GOOD, phases_beyond=("learn",))]).values())[1] is False
    assert list(grid_verdicts([replace(GOOD, phases_inside=(True, False))]).values())[3] is False
    assert not all(grid_verdicts([GOOD, replace(GOOD, status=1)]).values())
    free = ("tiny", None, GOOD)
    assert all(ladder_verdicts([free, ("tiny", 700 * MB, GOOD)]).values())
    for bad, place in (
        (replace(GOOD, traceback=True), 0), (replace(GOOD, status=1), 1), (replace(GOOD, step_s=None), 2),
        (replace(GOOD, step_s=6.1), 3), (replace(GOOD, measured_bytes=901 * MB), 4),
    ):  # fmt: skip
        assert list(ladder_verdicts([free, ("tiny", 700 * MB, bad)]).values())[place] is False


def test_tables():
    assert grid_table([GOOD]).row_count == 1
    assert ladder_table([("tiny", None, GOOD), ("tiny", 700 * MB, GOOD)], "cgroup").row_count == 2
