"""The sweep over batch sizes: its arithmetic, its folders whatever happens, and the command itself."""

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

from grpo.config import SettingsError
from grpo.logs.tracking import read_lines
from grpo.workbench import lm, trial
from grpo.workbench.corpus import open_corpus, text_file
from grpo.workbench.sizes import SizeResult, read_json, read_size, size_folder
from grpo.workbench.sweep import open_sweep, run_sweep
from grpo.workbench.sweep_settings import LM_DEFAULTS, Sweep, apply_low_resource
from grpo.workbench.trial import TrialStatus, do_task, write_ended, write_task

TINY = {"arch": "gpt2", "layers": 1, "width": 32, "heads": 2, "context": 32}
TRAIN = {**LM_DEFAULTS, "device": "cpu", "precision": "fp32", "eval_prompts": 8}
SMALL = Sweep(batch_sizes=(4, 16), total_tokens=1024, data="bundled", evaluations=2, **TINY, **TRAIN)


def test_rates_are_kept_or_scaled_updates_are_of_whole_batches_and_one_size_of_grpo_is_a_run_so_long():
    settings = replace(SMALL, learning_rate=1e-3, base_batch_size=64)
    rates = {"none": 1e-3, "linear": 4e-3, "sqrt": 2e-3, "tuned": 2e-3}
    assert {name: replace(settings, scale_lr=name).rate(256) for name in rates} == pytest.approx(rates)
    assert SMALL.num_updates(4) == 8 and SMALL.num_updates(12) == 2  # 1024 / (12 · 32) = 2.67
    tuned = replace(SMALL, total_tokens=100_000, tune_share=0.1)
    # A tenth; eight updates, more than a tenth; not more than the whole.
    assert [tuned.tune_total(size) for size in (4, 64, 512)] == [10_000, 16_384, 100_000]
    grpo = Sweep(
        objective="grpo",
        batch_sizes=(16,),
        total_samples=1000,
        warmup_share=0.1,
        evaluations=5,
        group_size=4,
        max_new_tokens=20,
        top_k=5,
    )
    task = grpo.size_task(16, 2e-5)
    assert (task.steps, task.batch_size, task.group_size, task.rows) == (62, 16, 4, 16)
    assert (task.eval_interval, task.warmup_steps, task.learning_rate) == (12, 6, 2e-5)
    assert (task.max_new_tokens, task.top_k) == (20, 5)


def test_settings_are_those_of_a_file_and_are_lowered_where_resources_are_low(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "group_size: 4\nlearning_rate: 3.0e-5\nwarmup_steps: 5\nsteps: 50\nbatch_size: 32\n"
        "profiles:\n  small:\n    group_size: 2\n"
    )
    words = ["--objective", "grpo", "--config", str(file), "--profile", "small"]
    settings = Sweep.parse(words)
    assert settings.group_size == 2 and settings.sizes[0] == 4 and settings.base == 32
    assert settings.learning_rate == 3e-5 and settings.warm_up == 0.1
    assert Sweep.parse([*words, "--batch-sizes", "12", "8"]).sizes == [8, 12]
    of_lm = Sweep.parse(["--arch", "llama", "--data", "text.txt", "--scale-lr", "sqrt"])
    assert of_lm.objective == "lm" and of_lm.arch == "llama" and of_lm.warm_up == 0.05
    assert of_lm.sizes == [8, 16, 32, 64, 128, 256] and of_lm.learning_rate == 1e-3

    wide = {**TRAIN, "arch": "gpt2", "width": 256, "context": 256, "eval_prompts": 20}
    settings = Sweep(batch_sizes=(8, 64, 128), total_tokens=200_000, **wide)
    less, changes = apply_low_resource(settings)
    assert less.batch_sizes == (8, 64) and less.total_tokens == 100_000 and less.eval_prompts == 20
    assert (less.layers, less.width, less.context) == (2, 128, 64)
    assert {"batch_sizes up to 64", "total_tokens 200000 to 100000", "width 256 to 128"} <= set(changes)
    of_grpo = Sweep(objective="grpo", batch_sizes=(8,))
    less_text, changes_of_text = apply_low_resource(of_grpo)  # its length is the reward's, 144
    assert less_text.max_new_tokens == 48 and "max_new_tokens as it is to 48" in changes_of_text
    assert apply_low_resource(replace(of_grpo, max_new_tokens=32))[0].max_new_tokens == 32
    named, _ = apply_low_resource(replace(settings, arch=None))
    assert (named.layers, named.context) == (4, 64)  # its layers are what they are
    assert apply_low_resource(less) == (less, [])


def test_first_updates_are_apart_from_the_steady_state_and_a_curve_tells_the_last_and_the_best():
    def size(times, **changes) -> SizeResult:
        steps = [{"step": i, "step_time": time, "loss": 4.0} for i, time in enumerate(times, start=1)]
        return SizeResult(10, "ok", steps=steps, **changes)

    found, alone = size([5.0, 2.0, 1.0, 1.0, 3.0]), size([3.0])
    assert (found.start_s, found.steady_s, found.rate, found.seconds) == (5.0, 1.0, 10.0, 12.0)
    assert (alone.start_s, alone.steady_s) == (0.0, 3.0)
    steps = [{"step": i, "step_time": 1.0, "loss": {19: 2.5, 20: 2.0}.get(i, 4.0)} for i in range(1, 21)]
    held = [{"step": at, "eval_loss": value} for at, value in ((0, 1.0), (5, 3.0), (19, 2.0), (20, 2.2))]
    learned = SizeResult(5, "ok", row_units=2, steps=steps, evaluations=held)
    assert (learned.updates, learned.done, learned.seconds, learned.final_train) == (20, 200, 20.0, 2.25)
    # The untrained model, at 1.0, is none that training reached.
    assert (learned.final_heldout, learned.best_heldout, learned.best_heldout_at) == (2.2, 2.0, 190)
    at = {point["update"]: point["seconds"] for point in learned.curve if point["heldout"] is not None}
    assert at == {0: 0.0, 5: 5.0, 19: 19.0, 20: 20.0}
    broken = size([1.0, 1.0, 1.0], memory=[{"step": 1, "process_bytes": None}])
    assert broken.peak_bytes is None and broken.final_heldout is None


def test_every_size_sees_the_same_windows_of_a_text_that_is_mixed():
    """In the bundled file policy lines come first; what is held out must be like what is learned from."""
    corpus = open_corpus(SMALL)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    parts = torch.cat([corpus.train_windows(4, 32, one) for _ in range(4)])
    assert torch.equal(parts, corpus.train_windows(16, 32, other))
    late = [line[0] for line in text_file("bundled").read_text().splitlines()[-800:]]
    assert 300 < late.count("P") < 500


def in_this_process(task, folder, watch=None, tuned=()) -> TrialStatus:
    """In place of a process of its own."""
    write_task(task, folder, tuned)
    return do_task(folder)


def train(settings: Sweep, folder: Path, batch_size: int, rate: float = 1e-2) -> SizeResult:
    """A size as a sweep reads it, trained in this process."""
    in_this_process(settings.size_task(batch_size, rate), size_folder(folder, batch_size))
    return read_size(folder, batch_size, {"objective": settings.objective, "context": settings.row_units})


def test_a_size_of_lm_learns_from_its_tokens_and_splitting_a_batch_changes_no_loss(tmp_path, monkeypatch):
    size = train(replace(SMALL, total_tokens=4096, warmup_share=0.25), tmp_path, 8)
    assert size.status == "ok"
    held = [(line["step"], line["eval_loss"]) for line in size.evaluations]
    assert [step for step, _ in held] == [0, 8, 16] and size.done == 4096
    assert held[0][1] == pytest.approx(math.log(256), abs=0.1) and held[-1][1] < 5.3
    rates = [line["learning_rate"] for line in size.steps]
    assert rates[:4] == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 1e-2]) and rates[-1] < 0.15e-2
    assert size.rate == pytest.approx(8 * 32 / size.steady_s)
    assert len(size.heldout) == 8 and sum(size.heldout) / 8 == pytest.approx(size.final_heldout)
    assert size.peak_bytes > size.predicted_bytes > 0
    counted = [line for line in size.memory if line["added_bytes"]]
    assert 0 < len(counted) <= 2, "tensors are counted in the first updates alone: it takes time"
    assert counted[0]["predicted_bytes"] == pytest.approx(counted[0]["added_bytes"], rel=0.03)

    watched = mock.Mock(wraps=lm.accumulate_lm)
    monkeypatch.setattr(lm, "accumulate_lm", watched)
    split = replace(SMALL, train_rows=4)
    whole, parts = (train(settings, tmp_path, 16) for settings in (SMALL, split))
    for ours, theirs in zip(whole.steps, parts.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert whole.heldout == pytest.approx(parts.heldout, abs=1e-4)
    rows = [call.kwargs["rows"] for call in watched.call_args_list]
    assert rows == [16] * 3 + [4] * 3  # the first of each is a rehearsal


def test_divergence_is_a_result_of_a_size(tmp_path):
    """Language modelling has no KL that is raised against it."""
    wild = replace(SMALL, warmup_share=0.0, max_grad_norm=0.0)
    diverged = train(wild, tmp_path, 4, rate=9e29)
    assert diverged.status == "diverged" and diverged.message.endswith("): lower --learning-rate.")
    size = train(replace(wild, total_tokens=256, batch_sizes=(4,)), tmp_path, 4, rate=9e29)
    assert size.message == "after 1 updates the held-out loss is nan" and size.updates == 1


def test_a_size_of_grpo_is_a_run_of_the_trainer_of_whole_batches(
    model_folders, data_file, tmp_path, monkeypatch
):
    file, out = tmp_path / "train.yaml", tmp_path / "out"
    file.write_text(
        f"prompts: {data_file}\nheldout_share: 0.2\nengine: 'off'\ngroup_size: 4\nkl_coef: 0.05\n"
    )
    words = (
        f"--objective grpo --config {file} --model {model_folders['gpt2']} --precision fp32 --device cpu "
        f"--max-new-tokens 10 --total-samples 32 --eval-prompts 4 --evaluations 2 --batch-sizes 8 "
        f"--output {out}"
    )
    monkeypatch.setattr(trial, "run_task", in_this_process)
    settings, folder = open_sweep(Sweep.parse(words.split()))
    with untraced(counted=True):
        (size,) = run_sweep(settings, folder)
    assert size.status == "ok", size.message
    points = [(line["step"], line["eval_reward"]) for line in size.evaluations]
    assert [step for step, _ in points] == [0, 2, 4] and size.done == 32 and size.updates == 4
    assert size.final_heldout == points[-1][1] and len(size.heldout) == 4
    assert sum(size.heldout) / 4 == pytest.approx(points[-1][1])
    lines = read_lines(folder / "size-00008/memory.jsonl")
    assert {line["rows"] for line in lines if line["phase"] in ("sample", "score", "learn")} == {8}
    assert size.peak_bytes > 0 and size.predicted_bytes and not (folder / "size-00008/checkpoints").exists()
    assert read_json(out / "sweep.json")["quality"]["better"] == "higher"


class Trained:
    """In place of processes: writes what it is told to, and ends as told."""

    def __init__(self, *lines: dict, ended: str = "ok", best_rate: float | None = None) -> None:
        self.lines, self.ended, self.best_rate = lines, TrialStatus(ended, "SIGKILL"), best_rate
        self.tasks: list[trial.Task] = []

    def __call__(self, task, folder, watch=None, tuned=()):
        self.tasks.append(task)
        write_task(task, folder, tuned)
        lines = list(self.lines)
        if self.best_rate is not None:
            off = abs(math.log(task.learning_rate / self.best_rate))
            lines.append({"step": 1, "eval_loss": off})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return write_ended(folder, self.ended)


LINES = [{"step": 0, "eval_loss": 5.0}, {"step": 1, "step_time": 0.5, "loss": 4.0, "learning_rate": 1e-3}]


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """swept(trained, **changes): the sizes of a sweep without processes, in one folder."""

    def sizes(trained: Trained, **changes) -> list[SizeResult]:
        monkeypatch.setattr(trial, "run_task", trained)
        settings, folder = open_sweep(replace(SMALL, output=tmp_path / "out", **changes))
        return run_sweep(settings, folder)

    return sizes


def test_sizes_that_fail_have_rows_finished_ones_are_kept_and_others_done_again(swept, tmp_path):
    lost, _ = swept(Trained(*LINES, ended="out of memory"))
    assert (lost.batch_size, lost.status, lost.message) == (4, "out of memory", "SIGKILL")
    assert (lost.updates, lost.done, lost.final_train, lost.final_heldout) == (1, 128, 4.0, None)
    assert (lost.learning_rate, lost.task["steps"], lost.warmup_updates) == (1e-3, 8, 0)

    def done(*batch_sizes: int, ended: str = "ok", **changes) -> list[int]:
        trained = Trained(*LINES, ended=ended)
        swept(trained, batch_sizes=batch_sizes, **changes)
        return [task.batch_size for task in trained.tasks]

    assert done(4, 8, 16) == [8]
    assert done(32, ended="failed") == done(8, 32) == [32] and done(8, again=True) == [8]
    assert read_json(tmp_path / "out/sweep.json")["batch_sizes"] == [4, 8, 16, 32]
    whole = (file := tmp_path / "out/size-00032/ended.json").read_text()
    file.write_text(whole[: len(whole) // 2])
    assert read_size(tmp_path / "out", 32, {}).status == "unfinished"
    assert done(8, 32) == [32] and file.read_text() == whole
    assert read_size(tmp_path / "out", 64, {}).status == "not run"


def test_another_sweep_does_not_go_on_in_the_same_folder_and_a_refused_one_makes_none(swept, tmp_path):
    swept(Trained(*LINES))
    with pytest.raises(SettingsError, match=r"width is 32 there and 64 here; .*seed is 0 there and 1"):
        swept(Trained(), width=64, seed=1)
    (tmp_path / "out/sweep.json").write_text("{")
    with pytest.raises(SettingsError, match=r"sweep\.json is broken"):
        swept(Trained())
    with pytest.raises(SettingsError, match="tf32 is on, but cpu has no such mode"):
        open_sweep(replace(SMALL, tf32=True, output=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_the_best_of_a_grid_of_learning_rates_is_trained_with(swept, logged):
    def tuned(trained: Trained, **changes) -> SizeResult:
        settings = {"batch_sizes": (16,), "base_batch_size": 16, "scale_lr": "tuned"}
        return swept(trained, **settings, **changes)[0]

    size = tuned(trained := Trained(*LINES, best_rate=2.1e-3))
    tried = [rate for rate, _ in size.tuned]
    assert tried == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3])
    assert size.learning_rate == trained.tasks[-1].learning_rate == tried[3]
    assert [task.eval_interval for task in trained.tasks] == [2, 2, 2, 2, 2, 1]
    assert not any("edge" in line for line in logged)
    tuned(Trained(*LINES, best_rate=1.0), again=True)
    assert any("at the edge of those tried" in line for line in logged)
    size = tuned(lost := Trained(ended="out of memory"), again=True)  # which ends the grid
    assert (
        len(lost.tasks) == 1 and size.status == "out of memory" and size.task["tuned"][0]["heldout"] is None
    )
    size = tuned(Trained(ended="diverged"), again=True)
    assert size.status == "diverged" and len(size.task["tuned"]) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_sweep_is_stopped_goes_on_and_survives_running_out_of_memory(tmp_path):
    """As it is typed, in processes."""
    words = (
        "--data bundled --arch gpt2 --layers 1 --width 32 --heads 2 --context 64 --total-tokens 131072 "
        "--eval-prompts 8 --evaluations 1 --memory-limit 550MB --batch-sizes 128 2048"
    )
    command = ["tests/grpo_lean.py", "sweep", *words.split()]
    first = Command(*command, cwd=tmp_path)
    first.wait_for("size 128: ok")
    first.interrupt()
    stopped = first.finish(timeout_s=60)
    assert stopped.returncode == 130 and "Traceback" not in stopped.stderr, stopped.stderr
    assert "Go on with: grpo-lean sweep" in stopped.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    header = read_json(folder / "sweep.json")
    size = read_size(folder, 128, header)
    assert size.status == "ok" and size.updates == 16 and size.final_heldout < 5
    assert size.added_bytes == pytest.approx(size.predicted_bytes, rel=0.03)

    again = run(*command, "--output", folder, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "size 128: kept from before (ok)" in again.stderr and "grpo-lean report" in again.stderr
    assert "held-out" in again.stdout and "out of memory" in again.stdout
    lost = read_size(folder, 2048, header)
    assert lost.status == "out of memory" and lost.predicted_bytes > 2e8
