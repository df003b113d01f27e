"""What several processes would cost, on paper, and how it is read from real runs."""

import json

import pytest
from benchmarks import distribution
from benchmarks.distribution import Network, Step, exchange_seconds, measure, project, reduce_seconds
from rich.console import Console

NETWORK = Network(bytes_per_s=1e9, request_s=1e-3)


def test_a_ring_sends_nearly_twice_the_gradients_however_many_take_part():
    assert reduce_seconds(1, 1e9, NETWORK) == 0
    assert reduce_seconds(2, 1e9, NETWORK) == pytest.approx(1.0)
    assert reduce_seconds(1000, 1e9, NETWORK) == pytest.approx(2.0, rel=2e-3)


def test_exchanges_grow_with_the_square_of_processes():
    assert exchange_seconds(1, 1e6, 5, NETWORK) == 0
    assert exchange_seconds(4, 1e6, 5, NETWORK) == pytest.approx(5 * 3 * 4 * 1e-3 + 4 * 3 * 1e-3)


def test_the_projection_adds_up():
    console = Console(width=140, record=True, quiet=False)
    console.print(project(Step(64, 2.0, summed_bytes=1e9, row_bytes=0.0), (1, 2), NETWORK))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in console.export_text().splitlines()]
    assert ["1", "64", "2.00", "0.000", "0.000", "100%"] in rows
    assert ["2", "128", "2.00", "1.000", "0.030", "66%"] in rows


def test_runs_take_turns_and_their_first_steps_do_not_count(monkeypatch, tmp_path):
    """With a training command that writes what it is told."""
    calls = []

    def run(command, env, **_):
        alone = "torch.distributed.run" not in command
        calls.append((alone, env["OMP_NUM_THREADS"]))
        place = command.index("--runs-dir")
        folder = distribution.Path(command[place + 1], command[place + 3])
        folder.mkdir()
        (folder / "config.yaml").write_text("batch_size: 64\n")
        lines = [
            {"step": step, "step_time": 9.0 if step <= 3 else 2.0 + alone, "timing/learn_s": 1.0,
             **({} if alone else {"processes/exchanged_bytes": 640.0, "processes/summed_bytes": 8.0})}
            for step in range(1, 6)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return distribution.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(distribution.subprocess, "run", run)
    measured = measure(["--batch-size", "64"], processes=2, rounds=2, steps=2)
    assert calls == [(False, "1"), (True, "2"), (True, "2"), (False, "1")]
    assert measured.step_s == {1: 3.0, 2: 2.0} and measured.rows == 64
    assert measured.ratios == [pytest.approx(2 / 3)] * 2
    assert measured.split_s[2]["learn"] == 1.0 and measured.split_s[1]["wait"] == 0.0
    assert (measured.exchanged_bytes, measured.summed_bytes) == (640.0, 8.0)


def test_a_run_that_fails_is_an_error_with_what_it_said(monkeypatch):
    failed = distribution.subprocess.CompletedProcess([], 2, "", "no such model")
    monkeypatch.setattr(distribution.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no such model"):
        measure([], processes=2, rounds=1, steps=1)
