"""scripts/gpu_check.sh as far as a machine without a card can show it."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import gpu_check
import pytest
import torch
from benchmarks.speed import Outcome
from benchmarks.speed_worker import StepTime
from commands import ROOT, run
from several_processes import in_processes


def test_it_is_one_command():
    done = subprocess.run(
        ["sh", str(ROOT / "scripts/gpu_check.sh"), "--help"],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "--quick" in done.stdout, done.stderr


def raced(case, folder, **options) -> Outcome:
    return Outcome(case, {"ours": [StepTime(2.0, 59.0, 16.0, {}, 100)]})


def check(rank: int, file: Path) -> str:
    """All parts in a process that may get limits; the race is test_speed.py's."""
    with patch("benchmarks.gpu_check.race", raced), redirect_stdout(StringIO()) as said:
        gpu_check.main(output=file, small=True)
    return said.getvalue()


def test_every_part_runs_small(tmp_path):
    (ended,) = in_processes(1, check, tmp_path / "card.json")
    assert ended.error is None
    results = json.loads((tmp_path / "card.json").read_text())
    assert [row["batch_size"] for row in results["rows"]] == [8, 16]
    assert all(row["status"] == "fits" and row["samples_per_minute"] > 0 for row in results["rows"])
    assert results["limit"]["auto"]["batch_size"] % 8 == 0 and results["limit"]["zero out of memory"]
    assert results["race"]["samples_per_minute"] == 60 * 8 / 2
    assert results["recorded steps"]["plain"] > 0 and results["recorded steps"]["equal"] == 1
    assert results["whole rollout"]["whole"]
    assert results["recovery"]["steps"] == 1 and "speed" in results["emptied cache"]
    assert "batch  allocated" in ended.value and "learning reaches" in ended.value
    for phase, found in results["rows"][0]["phases"].items():
        assert found["seconds"] >= 0 and 0 <= found["measured_bytes"] < 2 * found["predicted_bytes"], phase
    assert results["rates"]["flops"] > 1e9 and results["rates"]["copied_bytes_per_s"] > 1e8


def test_what_was_found_is_written_part_by_part(tmp_path, monkeypatch):
    """Whatever ends it then."""

    def parts(*args, **options):
        yield "device", "a card"
        yield "torch", "2"
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.gpu_check.check_card", parts)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(output=tmp_path / "card.json", small=True, quick=True)
    assert json.loads((tmp_path / "card.json").read_text()) == {"device": "a card", "torch": "2"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(tmp_path):
    done = run("scripts/gpu_check.py", cwd=tmp_path)
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stderr
