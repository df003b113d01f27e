"""scripts/benchmark_memory.py, each command at its smallest, and the meter it trusts."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.memory_trials import Cells, PredictionTrial, prediction_verdicts
from benchmarks.planning_trials import Case, LargestTrial, largest_verdicts
from benchmarks.real_phases import RealPhases, Setting, allocator_peak, own_meter
from transformers import GPT2Config

from grpo.memory import Shape
from grpo.model.cpu import feed_forward

SMALL = GPT2Config(
    vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, activation_function="gelu_pytorch_tanh",
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    path = Path(__file__).parents[2] / "scripts" / "benchmark_memory.py"
    spec = importlib.util.spec_from_file_location("benchmark_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(command, output, **options):
    with pytest.raises(SystemExit):
        command(output=output, **options)
    return json.loads(output.read_text())


def test_the_allocators_peak_is_what_was_held_at_once():
    def work():
        first = torch.zeros(1000)
        second = first + 1  # 8,000 bytes
        del first
        return second * 2 + second  # second, the product and the sum: 12,000

    assert allocator_peak(work) == 12_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("phase", ["sample", "score", "learn split"])
def test_our_own_meter_agrees_with_the_allocator(phase, dtype):
    real, shape = RealPhases(Setting("small", SMALL, dtype, group_size=4)), Shape(64, 20, 24)
    measured, true = own_meter(real.prepare(phase, shape)), allocator_peak(real.prepare(phase, shape))
    tiles = torch.cpu._is_amx_tile_supported()
    scratch = (1_000_000 if tiles else 300_000) if dtype == torch.bfloat16 else 0  # oneDNN's own, at most
    assert 0.99 * true - scratch <= measured <= 1.01 * true


def test_predictions_are_compared_with_what_is_allocated(script, monkeypatch, tmp_path, capsys):
    cells = Cells("grid", Setting("small", SMALL), (Shape(16, 20, 24),), (Shape(16, 24, 20),), ("score",))
    monkeypatch.setattr(script, "quick_grid", lambda: [cells])
    written = run(script.predict, tmp_path / "out.json", quick=True)
    assert [row["phase"] for row in written["rows"]] == ["score"]
    for row in written["rows"]:
        assert row["uncalibrated_bytes"] == pytest.approx(row["true_bytes"], rel=0.05)
        assert row["calibrated_bytes"] == pytest.approx(row["true_bytes"], rel=0.05)
    assert "grid: calibrated P95" in capsys.readouterr().out


def test_the_planners_rows_are_compared_with_every_size(script, monkeypatch, tmp_path, capsys):
    case = Case(Setting("small", SMALL, group_size=2), ("score",), 12, 40, groups=4, budgets=2)
    monkeypatch.setattr(script, "cases", lambda quick: [case])
    written = run(script.largest, tmp_path / "out.json")
    assert [row["true_groups"] for row in written["rows"]] == [2, 3]
    assert all(row["calibrated_groups"] <= row["true_groups"] for row in written["rows"])
    assert "never unsafe after calibration" in capsys.readouterr().out


def test_kinds_of_checkpointing_are_compared(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "cost_works", lambda quick: iter([("small", SMALL, Shape(16, 20, 24))]))
    monkeypatch.setattr(feed_forward, "_SLICE", 2**10)  # for so small a model
    written = run(script.checkpointing, tmp_path / "out.json", rounds=1)
    peaks = {row["way"]: row["peak_bytes"] for row in written["rows"]}
    assert peaks["full"] < 0.9 * peaks["selective"]
    assert peaks["selective"] < 0.95 * peaks["none"]  # 0.91 with tiles, whose attention keeps less already
    assert peaks["none, rows in halves"] < 0.7 * peaks["none"]
    assert all(written["verdicts"].values()) and all(row["seconds"] > 0 for row in written["rows"])
    assert "selective" in capsys.readouterr().out


@pytest.mark.usefixtures("made_up_plans")
def test_the_cost_of_watching_is_measured(script, monkeypatch, tmp_path, capsys, config):
    small = replace(config, eval_interval=0, checkpoint_interval=0)
    monkeypatch.setattr(script, "Config", lambda **changes: replace(small, steps=changes["steps"]))
    written = run(script.overhead, tmp_path / "out.json", steps=1, skip=1)
    (row,) = written["rows"]
    assert {"plan", "run", "watch", "read", "reset_peak", "log_memory", "take_records"} == set(row["parts_s"])
    assert 0 < sum(row["parts_s"].values()) < row["step_s"]
    assert "monitor and planner take" in capsys.readouterr().out


def test_verdicts_follow_the_bars():
    trial = PredictionTrial("grid", "s", "learn", 8, 1, 1, 1000, 1000, 0, 1120.0, 1020.0, 50.0, 50.0)
    assert math.isclose(trial.error("uncalibrated", whole=True), 0.06)
    assert trial.error("calibrated", whole=False) == 0.02
    assert list(prediction_verdicts([trial]).values()) == [False, True]  # 6 % above 5 %, 1 % below 1.5 %

    few = LargestTrial("s", "learn", 100, 10, 99, 8, 9, 2.0, 3, 0)
    assert few.is_close and not replace(few, margin_bytes=0.5).is_close
    assert not replace(few, true_groups=20, calibrated_groups=18).is_close
    verdicts = largest_verdicts([replace(few, uncalibrated_groups=11)])
    assert not verdicts["never unsafe before calibration"] and verdicts["never unsafe after calibration"]
