"""The sweep over batch sizes: its arithmetic, its rows whatever happens, and the command itself."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import Command, run
from conftest import untraced

from grpo.config import Config, SettingsError
from grpo.config.groups import OptimizerSettings, SamplingSettings
from grpo.learning.step import Diverged
from grpo.memory import Device, DoesNotFit
from grpo.memory.budget import Budget
from grpo.run.tracking import read_lines
from grpo.workbench.corpus import open_corpus, text_file
from grpo.workbench.processes import Ended
from grpo.workbench.spec import ModelSpec
from grpo.workbench.sweep import language as sweep_language
from grpo.workbench.sweep import run as sweep_module
from grpo.workbench.sweep.command_line import parse_sweep, shrunk
from grpo.workbench.sweep.language import evaluation_points
from grpo.workbench.sweep.opening import open_sweep
from grpo.workbench.sweep.rows import ROW_KEYS, SweepFolder, curve_facts, whole_row
from grpo.workbench.sweep.run import Sweep
from grpo.workbench.sweep.settings import SweepSettings, from_json, run_config
from grpo.workbench.sweep.worker import SizeTask, point, task_from_json, time_facts, train_size

TINY = ModelSpec(arch="gpt2", layers=1, width=32, heads=2, context=32)
SMALL = SweepSettings(
    batch_sizes=(4, 16), total_tokens=1024, model=TINY, device="cpu", precision="fp32", data="bundled",
    heldout=8, evaluations=2,
)  # fmt: skip


def nothing(batch_size, point): ...


def test_rates_are_kept_or_scaled_updates_are_of_whole_batches_and_one_size_of_grpo_is_a_run_so_long():
    settings = replace(SMALL, optimizer=OptimizerSettings(learning_rate=1e-3), base_batch_size=64)
    rates = {"none": 1e-3, "linear": 4e-3, "sqrt": 2e-3, "tuned": 2e-3}
    assert {name: replace(settings, scale_lr=name).rate(256) for name in rates} == pytest.approx(rates)
    assert SMALL.num_updates(4) == 8 and SMALL.num_updates(12) == 2  # 1024 / (12 · 32) = 2.67
    tuned = replace(SMALL, total_tokens=100_000, tune_share=0.1)
    # A tenth; eight updates, more than a tenth; not more than the whole.
    assert [tuned.tune_total(size) for size in (4, 100, 1000)] == [10_000, 8 * 100 * 32, 100_000]
    assert [evaluation_points(*case) for case in ((20, 4), (2, 5), (1, 10))] == [[5, 10, 15, 20], [1, 2], [1]]
    settings = SweepSettings(
        objective="grpo", batch_sizes=(16,), total_samples=1000, group_size=4, warmup_share=0.1,
        evaluations=5, max_new_tokens=20, train=Config(sampling=SamplingSettings(top_k=5)),
    )  # fmt: skip
    config = run_config(settings, 16, rate=2e-5, folder=Path("runs/sweep/size-00016"))
    assert (config.steps, config.batch_size, config.group_size) == (62, 16, 4)
    assert (config.eval_interval, config.optimizer.warmup_steps) == (12, 6)
    assert config.optimizer.learning_rate == 2e-5 and config.sampling == SamplingSettings(20, top_k=5)
    assert config.runs_dir / str(config.name) == Path("runs/sweep/size-00016")


def test_settings_are_those_of_a_file_survive_json_and_are_lowered_where_resources_are_low(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("group_size: 4\nmax_new_tokens: 20\nlearning_rate: 3.0e-5\nwarmup_steps: 5\nsteps: 50\n"
                    "policy_share: 0.7\n")  # fmt: skip
    settings = parse_sweep(["--objective", "grpo", "--config", str(file), "--batch-sizes", "8", "12"])
    assert settings.batch_sizes == (8, 12) and settings.group_size == 4 and settings.max_new_tokens == 20
    assert settings.optimizer.learning_rate == 3e-5 and settings.warmup_share == 0.1
    assert settings.train.policy_share == 0.7
    lm = parse_sweep(["--arch", "llama", "--data", "text.txt", "--scale-lr", "sqrt"])
    assert lm.objective == "lm" and lm.model.arch == "llama" and lm.optimizer.learning_rate == 1e-3
    for each in (settings, lm, replace(lm, output=tmp_path)):
        assert from_json(json.loads(json.dumps(each.as_json()))) == each
    file.write_text("profiles:\n  small:\n    group_size: 2\n")
    small = ["--objective", "grpo", "--config", str(file), "--profile", "small"]
    assert parse_sweep(small).group_size == 2

    wide = ModelSpec(arch="gpt2", width=256, context=256)
    settings = SweepSettings(batch_sizes=(8, 64, 128), total_tokens=200_000, model=wide, heldout=20)
    less, said = shrunk(settings)
    assert less.batch_sizes == (8, 64) and less.total_tokens == 100_000 and less.heldout == 20
    assert (less.model.layers, less.model.width, less.model.context) == (2, 128, 64)
    assert {"batch_sizes up to 64", "total_tokens 200000 to 100000", "width 256 to 128"} <= set(said)
    named, _ = shrunk(replace(settings, model=ModelSpec(context=256)))
    assert (named.model.layers, named.model.context) == (4, 64)  # its layers are what they are
    assert shrunk(less) == (less, [])


def test_first_updates_are_apart_from_the_steady_state_and_a_curve_tells_the_last_and_the_best():
    facts, alone = time_facts([5.0, 2.0, 1.0, 1.0, 3.0], units=10), time_facts([3.0], units=6)
    assert (facts["compile_s"], facts["steady_s_per_update"], facts["rate"]) == (5.0, 1.0, 10.0)
    assert (alone["compile_s"], alone["rate"]) == (0.0, 2.0)
    points = ((0, None, 1.0), (5, 4.0, 3.0), (19, 2.5, 2.0), (20, 2.0, None), (20, None, 2.2))
    curve = [point(at, 10 * at, float(at), 1e-3, train=a, heldout=b)["curve"] for at, a, b in points]
    assert curve_facts(curve, higher_is_better=False) == {
        "updates": 20, "done": 200, "seconds": 20.0, "final_train": 2.25, "final_heldout": 2.2,
        "best_heldout": 2.0, "best_heldout_at": 190,
    }  # fmt: skip
    assert curve_facts(curve, higher_is_better=True)["best_heldout"] == 3.0
    assert whole_row({"rate": math.nan, "updates": 3}) == dict.fromkeys(ROW_KEYS) | {"updates": 3}


def test_every_size_sees_the_same_windows_of_a_text_that_is_mixed():
    """In the bundled file policy lines come first; what is held out must be like what is learned from."""
    corpus = open_corpus("bundled", TINY)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    parts = torch.cat([corpus.train_windows(4, 32, one) for _ in range(4)])
    assert torch.equal(parts, corpus.train_windows(16, 32, other))
    late = [line[0] for line in text_file("bundled").read_text().splitlines()[-800:]]
    assert 300 < late.count("P") < 500


def train(settings: SweepSettings, folder: Path, batch_size: int, rate: float = 1e-2) -> tuple[list, dict]:
    """A size's curve and facts, trained in this process."""
    curve, facts = [], {}

    def say(record):
        curve.append(record["curve"]) if "curve" in record else facts.update(record["row"])

    train_size(SizeTask(settings, batch_size, rate, settings.total, settings.evaluations, folder), say)
    return curve, facts


def test_a_size_of_lm_learns_from_its_tokens_and_splitting_a_batch_changes_no_loss(tmp_path, monkeypatch):
    curve, facts = train(replace(SMALL, total_tokens=4096, warmup_share=0.25), tmp_path, 8)
    held = [each for each in curve if each["heldout"] is not None]
    assert [each["update"] for each in held] == [0, 8, 16] and held[-1]["done"] == 4096
    assert held[0]["heldout"] == pytest.approx(math.log(256), abs=0.1) and held[-1]["heldout"] < 5.3
    rates = [each["learning_rate"] for each in curve if each["train"] is not None]
    assert rates[:4] == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 1e-2]) and rates[-1] < 0.15e-2
    assert facts["rate"] == pytest.approx(8 * 32 / facts["steady_s_per_update"])
    assert facts["peak_bytes"] >= facts["held_bytes"] and facts["heldout_stderr"] > 0

    watched = mock.Mock(wraps=sweep_language.accumulate_lm)
    monkeypatch.setattr(sweep_language, "accumulate_lm", watched)
    whole, split = (train(replace(SMALL, train_rows=rows), tmp_path, 16)[0] for rows in (None, 5))
    losses = [[each["train"] or each["heldout"] for each in curve] for curve in (whole, split)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    rows = [call.kwargs["rows"] for call in watched.call_args_list]
    assert rows == [1, 16, 16, 1, 5, 5]  # the first is a rehearsal


def test_divergence_and_a_plan_that_fails_are_errors_a_worker_knows(tmp_path, monkeypatch):
    wild = replace(SMALL, optimizer=OptimizerSettings(max_grad_norm=0.0), warmup_share=0.0)
    with pytest.raises(FloatingPointError):
        train(wild, tmp_path, 4, rate=1e30)
    with pytest.raises(FloatingPointError, match="after 1 updates the held-out loss is nan"):
        train(replace(wild, total_tokens=256, batch_sizes=(4,)), tmp_path, 4, rate=1e30)
    for error, known in ((Diverged("not finite"), FloatingPointError), (DoesNotFit("one row"), MemoryError)):
        monkeypatch.setattr(sweep_language, "train_language", mock.Mock(side_effect=error))
        with pytest.raises(known):
            train(SMALL, tmp_path, 4)


def in_this_process(module, task, on_record, *, limited=False):
    """In place of a worker's process: the task as it would read it, in this one."""
    train_size(task_from_json(json.loads(json.dumps(task))), on_record)
    return Ended("ok")


def test_a_size_of_grpo_is_a_run_of_the_trainer_unless_its_plan_splits_it(
    model_folders, data_file, tmp_path, monkeypatch
):
    file, out = tmp_path / "train.yaml", tmp_path / "out"
    file.write_text(
        f"prompts: {data_file}\nheldout_share: 0.2\nengine: 'off'\ngroup_size: 4\nkl_coef: 0.05\n"
    )
    words = (
        f"--objective grpo --config {file} --model {model_folders['gpt2']} --precision fp32 --device cpu "
        f"--max-new-tokens 10 --total-samples 32 --heldout 4 --evaluations 2 --batch-sizes 8 --output {out}"
    )
    monkeypatch.setattr(sweep_module, "run_worker", in_this_process)
    sweep = open_sweep(parse_sweep(words.split()))
    with untraced():
        (row,) = sweep.run(nothing)
    folder = out / "size-00008"
    curve, logged = read_lines(folder.with_suffix(".jsonl")), read_lines(folder / "metrics.jsonl")
    for kind, name in (("train", "reward"), ("heldout", "eval_reward")):
        points = [(line["step"], line[name]) for line in logged if name in line]
        assert [(each["update"], each[kind]) for each in curve if each[kind] is not None] == points
    assert [step for step, _ in points] == [0, 2, 4] and curve[-1]["done"] == 32
    assert curve[-1]["seconds"] == pytest.approx(sum(line.get("step_time", 0.0) for line in logged))
    assert row["status"] == "ok" and row["updates"] == 4 and row["final_heldout"] == points[-1][1]
    assert sum(row["parts"].values()) == pytest.approx(row["predicted_bytes"], rel=1e-3)
    assert row["peak_bytes"] > 0 and not (folder / "checkpoints").exists()
    lines = [
        line for line in read_lines(folder / "memory.jsonl") if line["phase"] in ("sample", "score", "learn")
    ]
    assert lines and not any(line["added_bytes"] for line in lines), "tensors were counted, which takes time"
    assert json.loads((out / "sweep.json").read_text())["quality"]["better"] == "higher"

    monkeypatch.setattr(Device, "budget", lambda self: Budget(6 * 10**12, "6 TB"))
    with untraced(row_bytes=1e12):
        with pytest.raises(MemoryError, match=r"planned with 4 rows at once in .*--train-rows"):
            train(sweep.settings, tmp_path / "whole", 8)
        _, facts = train(replace(sweep.settings, train_rows=4, total_samples=8), tmp_path / "split", 8)
    assert facts["peak_bytes"] > 0


class Worker:
    """In place of processes: ends as told, after what it was told to say."""

    def __init__(self, *says: dict, ended: str = "ok", best_rate: float | None = None) -> None:
        self.says, self.ended, self.best_rate = says, Ended(ended, "SIGKILL"), best_rate
        self.tasks: list[dict] = []

    def __call__(self, module, task, on_record, *, limited=False):
        self.tasks.append(task)
        for record in self.says:
            on_record(record)
        if self.best_rate is not None:
            loss = abs(math.log(task["learning_rate"] / self.best_rate))
            on_record(point(1, 8, 1.0, 1e-3, heldout=loss))
        return self.ended


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """sweep(worker, **changes): the rows of a sweep without processes, in one folder."""

    def swept(worker: Worker, **changes) -> list[dict]:
        monkeypatch.setattr(sweep_module, "run_worker", worker)
        folder, settings = SweepFolder(tmp_path), replace(SMALL, **changes)
        sizes = list(settings.batch_sizes)
        folder.open({"batch_sizes": sizes, "started": "now", "settings": settings.as_json()})
        return Sweep(settings, folder, None).run(nothing)

    return swept


SAYS = [
    {"row": {"peak_bytes": 7, "rate": 2.0, "parts": {"weights": 5}}},
    point(0, 0, 0.0, 1e-3, heldout=5.0), point(1, 128, 0.5, 1e-3, train=4.0),
]  # fmt: skip


def test_sizes_that_fail_have_rows_finished_ones_are_kept_and_others_done_again(sweep, tmp_path, logged):
    rows = sweep(Worker(*SAYS, ended="out of memory"))
    assert [row["batch_size"] for row in rows] == [4, 16]
    (row, _) = rows
    assert tuple(row) == ROW_KEYS and row["status"] == "out of memory" and row["message"] == "SIGKILL"
    assert (row["updates"], row["done"], row["final_train"], row["peak_bytes"]) == (1, 128, 4.0, 7)
    assert row["parts"] == {"weights": 5} and row["final_heldout"] is None
    assert [each["update"] for each in read_lines(tmp_path / "size-00004.jsonl")] == [0, 1]

    def done(*batch_sizes: int, ended: str = "ok", **changes) -> list[int]:
        worker = Worker(*SAYS, ended=ended)
        sweep(worker, batch_sizes=batch_sizes, **changes)
        return [task["batch_size"] for task in worker.tasks]

    assert done(4, 8, 16) == [8]
    assert done(32, ended="failed") == done(8, 32) == [32] and done(8, again=True) == [8]
    assert json.loads((tmp_path / "sweep.json").read_text())["batch_sizes"] == [4, 8, 16, 32]
    whole = (file := tmp_path / "size-00032.json").read_text()
    file.write_text(whole[: len(whole) // 2])
    assert done(8, 32) == [32] and file.read_text() == whole
    assert "WARNING size-00032.json was written by half: size 32 is done again" in logged


def test_another_sweep_does_not_go_on_in_the_same_folder_and_a_refused_one_makes_none(sweep, tmp_path):
    sweep(Worker(*SAYS))
    with pytest.raises(SettingsError, match="settings: width is 32 there and 64 here; seed is 0 there and 1"):
        sweep(Worker(), seed=1, model=replace(TINY, width=64))
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(SettingsError, match=r"sweep\.json is broken"):
        sweep(Worker())
    with pytest.raises(SettingsError, match="tf32 is on, but cpu has no such mode"):
        open_sweep(replace(SMALL, tf32=True, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_best_of_a_grid_of_learning_rates_is_trained_with(sweep, logged):
    def tuned(worker: Worker, **changes) -> dict:
        given = {"batch_sizes": (16,), "base_batch_size": 16, "scale_lr": "tuned"}
        return sweep(worker, optimizer=OptimizerSettings(learning_rate=1e-3), **given, **changes)[0]

    row = tuned(worker := Worker(*SAYS, best_rate=2.1e-3))
    tried = [each["learning_rate"] for each in row["tuned"]]
    assert tried == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3])
    assert row["learning_rate"] == worker.tasks[-1]["learning_rate"] == tried[3]
    assert [task["evaluations"] for task in worker.tasks] == [1, 1, 1, 1, 1, 2]
    assert not any("edge" in line for line in logged)
    tuned(Worker(*SAYS, best_rate=1.0), again=True)
    assert any("at the edge of those tried" in line for line in logged)
    row = tuned(lost := Worker(ended="out of memory"), again=True)  # which ends the grid
    assert len(lost.tasks) == 1 and row["status"] == "out of memory" and row["tuned"][0]["heldout"] is None
    row = tuned(Worker(ended="diverged"), again=True)
    assert row["status"] == "diverged" and len(row["tuned"]) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_sweep_is_stopped_goes_on_and_survives_running_out_of_memory(tmp_path):
    """As it is typed, in processes."""
    words = (
        "--data bundled --arch gpt2 --layers 1 --width 32 --heads 2 --context 64 --total-tokens 131072 "
        "--heldout 8 --evaluations 1 --memory-limit 550MB --batch-sizes 128 2048"
    )
    command = ["scripts/sweep_batch_sizes.py", *words.split()]
    first = Command(*command, cwd=tmp_path)
    first.wait_for("updates in")
    first.interrupt()
    stopped = first.finish(timeout_s=60)
    assert stopped.returncode == 130 and "Traceback" not in stopped.stderr, stopped.stderr
    assert "Go on with: python" in stopped.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    row = json.loads((folder / "size-00128.json").read_text())
    assert row["status"] == "ok" and row["updates"] == 16 and row["final_heldout"] < 5
    assert row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.25)

    again = run(*command, "--output", folder, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "size 128: kept from before (ok)" in again.stderr and "scripts/report.py" in again.stderr
    assert "held-out" in again.stdout and "out of memory" in again.stdout
    lost = json.loads((folder / "size-02048.json").read_text())
    assert lost["status"] == "out of memory" and lost["parts"]["activations"] > 2e8
