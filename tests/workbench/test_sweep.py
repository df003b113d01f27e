"""The sweep over batch sizes: its arithmetic, its rows whatever happens, and the command itself."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import Command, run

from grpo.config import Config, SettingsError
from grpo.config.groups import OptimizerSettings, SamplingSettings
from grpo.learning.step import Diverged
from grpo.memory import DoesNotFit
from grpo.run.tracking import read_lines
from grpo.workbench.corpus import open_corpus, text_file
from grpo.workbench.processes import Ended
from grpo.workbench.spec import ModelSpec
from grpo.workbench.sweep import grpo as sweep_grpo
from grpo.workbench.sweep import language as sweep_language
from grpo.workbench.sweep import run as sweep_module
from grpo.workbench.sweep.command_line import parse_sweep, shrunk
from grpo.workbench.sweep.language import evaluation_points
from grpo.workbench.sweep.opening import open_sweep
from grpo.workbench.sweep.rows import ROW_KEYS, SweepFolder, curve_facts, whole_row
from grpo.workbench.sweep.run import Sweep
from grpo.workbench.sweep.settings import SweepSettings, from_json, run_config
from grpo.workbench.sweep.worker import SizeTask, point, task_from_json, time_facts, train_size

SWEEP = "scripts/sweep_batch_sizes.py"
TINY = ModelSpec(arch="gpt2", layers=1, width=32, heads=2, context=32)
SMALL = SweepSettings(
    batch_sizes=(4, 16), total_tokens=1024, model=TINY, device="cpu", precision="fp32", data="bundled",
    heldout=8, evaluations=2,
)  # fmt: skip


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_sizes": (0, 8)}, "batch_sizes holds 0"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
        ({"batch_sizes": (64,)}, r"total_tokens is 1024, less than one batch of 64, which has 2048 tokens"),
        ({"evaluations": 0}, "evaluations is 0"),
        ({"train_rows": 0}, "train_rows is 0"),
        ({"base_batch_size": 0}, "base_batch_size is 0"),
        ({"warmup_share": 1.5}, "warmup_share is 1.5"),
        ({"memory_limit": "much"}, "memory_limit is 'much'"),
        ({"optimizer": OptimizerSettings(warmup_steps=3)}, "warmup_steps is 3.*--warmup-share"),
        ({"objective": "grpo"}, "arch is 'gpt2'.*--model"),
        ({"objective": "grpo", "model": ModelSpec()}, "batch_size is 4, less than one group of 8"),
        ({"objective": "grpo", "model": ModelSpec(), "compile": True}, "compile is on"),
        (
            {"objective": "grpo", "model": ModelSpec(), "batch_sizes": (8, 12)},
            "batch_size is 12, which is not a multiple of group_size 8",
        ),
        (
            {"objective": "grpo", "model": ModelSpec(), "batch_sizes": (16,), "total_samples": 8},
            "total_samples is 8, less than one batch of 16",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(changes, said):
    with pytest.raises(SettingsError, match=said):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": None}, "data is not given"),
        ({"data": "no-such-file.txt"}, "data is 'no-such-file.txt', which is no file"),
        ({"model": replace(TINY, vocab=100)}, "give --vocab 256 or more"),
        (
            {"model": ModelSpec(context=600), "total_tokens": 10_000},
            "context is 600, but rook-tiny reaches 512",
        ),
        ({"device": "cuda:77"}, "device is 'cuda:77'"),
        ({"tf32": True}, "tf32 is on, but cpu has no such mode"),
    ],
)
def test_what_is_missing_is_said_before_a_folder_is_made(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        open_sweep(replace(SMALL, output=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_grpo_is_checked_before_it_starts(tmp_path):
    settings = SweepSettings(objective="grpo", batch_sizes=(8,), output=tmp_path / "out", device="cpu")
    with pytest.raises(SettingsError, match="max_new_tokens is 512, but the model's context is 512"):
        open_sweep(replace(settings, max_new_tokens=512))
    with pytest.raises(ValueError, match=r"nothing\.jsonl"):
        open_sweep(replace(settings, train=Config(prompts="nothing.jsonl")))
    with pytest.raises(ValueError, match="no_such_reward"):
        open_sweep(replace(settings, train=Config(reward=("no_such_reward",))))
    assert not (tmp_path / "out").exists()


def test_compile_without_a_compiler_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(SettingsError, match="compile is on, but there is no C\\+\\+ compiler"):
        open_sweep(replace(SMALL, compile=True, output=tmp_path / "out"))


def test_learning_rates_are_kept_or_scaled():
    settings = replace(SMALL, optimizer=OptimizerSettings(learning_rate=1e-3), base_batch_size=64)
    assert settings.rate(256) == 1e-3
    assert replace(settings, scale_lr="linear").rate(256) == pytest.approx(4e-3)
    assert replace(settings, scale_lr="sqrt").rate(256) == pytest.approx(2e-3)
    assert replace(settings, scale_lr="tuned").rate(16) == pytest.approx(5e-4)


def test_updates_are_of_whole_batches_and_a_try_has_some():
    assert SMALL.num_updates(4) == 8 and SMALL.num_updates(12) == 2  # 1024 / (12 · 32) = 2.67
    tuned = replace(SMALL, total_tokens=100_000, tune_share=0.1)
    assert tuned.tune_total(4) == 10_000
    assert tuned.tune_total(100) == 8 * 100 * 32  # eight updates, more than a tenth
    assert tuned.tune_total(1000) == 100_000  # not more than the whole


def test_one_size_of_grpo_is_a_run_of_its_own_length():
    train = Config(
        steps=200, optimizer=OptimizerSettings(warmup_steps=10), sampling=SamplingSettings(top_k=5)
    )
    settings = SweepSettings(
        objective="grpo", batch_sizes=(16,), total_samples=1000, group_size=4, warmup_share=0.1,
        evaluations=5, max_new_tokens=20, train=train,
    )  # fmt: skip
    config = run_config(settings, 16, rate=2e-5, folder=Path("runs/sweep/size-00016"))
    assert (config.steps, config.batch_size, config.group_size) == (62, 16, 4)
    assert (config.eval_interval, config.optimizer.warmup_steps) == (12, 6)
    assert config.optimizer.learning_rate == 2e-5 and config.sampling == SamplingSettings(20, top_k=5)
    assert config.runs_dir / str(config.name) == Path("runs/sweep/size-00016")


def test_the_defaults_of_grpo_are_those_of_its_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("group_size: 4\nmax_new_tokens: 20\nlearning_rate: 3.0e-5\nwarmup_steps: 5\nsteps: 50\n"
                    "policy_share: 0.7\n")  # fmt: skip
    settings = parse_sweep(["--objective", "grpo", "--config", str(file), "--batch-sizes", "8", "12"])
    assert settings.batch_sizes == (8, 12) and settings.group_size == 4 and settings.max_new_tokens == 20
    assert settings.optimizer.learning_rate == 3e-5 and settings.warmup_share == 0.1
    assert settings.train.policy_share == 0.7
    lm = parse_sweep(["--arch", "llama", "--data", "text.txt", "--scale-lr", "sqrt"])
    assert lm.objective == "lm" and lm.model.arch == "llama" and lm.optimizer.learning_rate == 1e-3
    with pytest.raises(SettingsError, match="--objective grpo"):
        parse_sweep(["--config", str(file)])
    file.write_text("profiles:\n  small:\n    group_size: 2\n")
    profile = parse_sweep(["--objective", "grpo", "--config", str(file), "--profile", "small"])
    assert profile.group_size == 2


def test_settings_survive_json():
    grpo = SweepSettings(
        objective="grpo", batch_sizes=(8,), train=Config(policy_share=0.25), output=Path("a")
    )
    for settings in (SMALL, grpo):
        assert from_json(json.loads(json.dumps(settings.as_json()))) == settings
    task = SizeTask(SMALL, 4, 1e-3, 1024, 2, Path("size"))
    assert task_from_json(json.loads(json.dumps(task.as_json()))) == task


def test_low_resource_lowers_what_is_above_and_says_so():
    wide = ModelSpec(arch="gpt2", width=256, context=256)
    settings = SweepSettings(
        batch_sizes=(8, 64, 128), total_tokens=200_000, model=wide, heldout=20, evaluations=3
    )
    less, said = shrunk(settings)
    assert less.batch_sizes == (8, 64) and less.total_tokens == 100_000 and less.heldout == 20
    assert (less.model.layers, less.model.width, less.model.context) == (2, 128, 64)
    assert (
        said[:2] == ["batch_sizes up to 64", "total_tokens 200000 to 100000"] and "width 256 to 128" in said
    )
    named, _ = shrunk(replace(settings, model=ModelSpec(context=256)))
    assert (named.model.layers, named.model.context) == (4, 64)  # its layers are what they are
    assert shrunk(less) == (less, [])


# ---------------------------------------------------------------------------------------- arithmetic


def test_evaluations_are_at_equal_shares():
    assert evaluation_points(20, 4) == [5, 10, 15, 20]
    assert evaluation_points(2, 5) == [1, 2]
    assert evaluation_points(1, 10) == [1]


def test_first_updates_are_kept_apart_from_the_steady_state():
    facts = time_facts([5.0, 2.0, 1.0, 1.0, 3.0], units=10)
    assert (facts["compile_s"], facts["steady_s_per_update"], facts["rate"]) == (5.0, 1.0, 10.0)
    alone = time_facts([3.0], units=6)
    assert (alone["compile_s"], alone["rate"]) == (0.0, 2.0)


def test_a_curve_tells_the_last_and_the_best():
    curve = [
        point(update, 10 * update, float(update), 1e-3, train=train, heldout=heldout)["curve"]
        for update, train, heldout in (
            (0, None, 1.0), (5, 4.0, 3.0), (19, 2.5, 2.0), (20, 2.0, None), (20, None, 2.2)
        )
    ]  # fmt: skip
    assert curve_facts(curve, higher_is_better=False) == {
        "updates": 20, "done": 200, "seconds": 20.0, "final_train": 2.25, "final_heldout": 2.2,
        "best_heldout": 2.0, "best_heldout_at": 190,
    }  # fmt: skip
    assert curve_facts(curve, higher_is_better=True)["best_heldout"] == 3.0
    assert curve_facts([], higher_is_better=True) == {"updates": 0, "done": 0, "seconds": 0.0}
    assert whole_row({"rate": math.nan, "updates": 3}) == dict.fromkeys(ROW_KEYS) | {"updates": 3}


def test_every_size_sees_the_same_windows():
    corpus = open_corpus("bundled", TINY)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    parts = torch.cat([corpus.train_windows(4, 32, one) for _ in range(4)])
    assert torch.equal(parts, corpus.train_windows(16, 32, other))


def test_the_bundled_text_is_mixed():
    """In the file itself policy lines come first; what is held out must be like what is learned from."""
    lines = text_file("bundled").read_text().splitlines()
    late = [line[0] for line in lines[-800:]]
    assert len(lines) == 8000 and 300 < late.count("P") < 500


def test_a_tokenizer_is_trained_once_where_the_vocabulary_asks_for_it(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the knight takes the bishop, the bishop takes the knight\n" * 50)
    corpus = open_corpus(str(text), replace(TINY, vocab=300))
    assert 256 < corpus.vocab <= 300 and len(corpus.ids) < text.stat().st_size / 3
    assert open_corpus(str(text), TINY).vocab == 256


# ------------------------------------------------------------------------------------------ training


def train(settings: SweepSettings, folder: Path, batch_size: int, rate: float = 1e-2) -> tuple[list, dict]:
    """A size's curve and facts, trained in this process."""
    curve, facts = [], {}

    def say(record):
        curve.append(record["curve"]) if "curve" in record else facts.update(record["row"])

    train_size(SizeTask(settings, batch_size, rate, settings.total, settings.evaluations, folder), say)
    return curve, facts


def test_a_size_of_lm_learns_from_its_tokens(tmp_path):
    settings = replace(SMALL, total_tokens=4096, warmup_share=0.25)
    curve, facts = train(settings, tmp_path, 8)
    held = [each for each in curve if each["heldout"] is not None]
    assert [each["update"] for each in held] == [0, 8, 16] and held[-1]["done"] == 4096
    assert held[0]["heldout"] == pytest.approx(math.log(256), abs=0.1) and held[-1]["heldout"] < 5.3
    rates = [each["learning_rate"] for each in curve if each["train"] is not None]
    assert rates[:4] == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 1e-2]) and rates[-1] < 0.15e-2
    assert facts["rate"] == pytest.approx(8 * 32 / facts["steady_s_per_update"])
    assert facts["peak_bytes"] >= facts["held_bytes"] and facts["heldout_stderr"] > 0


def test_splitting_a_batch_changes_no_loss(tmp_path, monkeypatch):
    real, rows = sweep_language.accumulate_lm, []
    monkeypatch.setattr(
        sweep_language, "accumulate_lm", lambda *a, **kw: rows.append(kw["rows"]) or real(*a, **kw)
    )
    whole, _ = train(SMALL, tmp_path, 16)
    split, _ = train(replace(SMALL, train_rows=5), tmp_path, 16)
    assert rows == [1, 16, 16, 1, 5, 5]  # the first is a rehearsal
    losses = [[each["train"] or each["heldout"] for each in curve] for curve in (whole, split)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_divergence_and_a_plan_that_fails_are_errors_a_worker_knows(tmp_path, monkeypatch):
    wild = replace(SMALL, optimizer=OptimizerSettings(max_grad_norm=0.0), warmup_share=0.0)
    with pytest.raises(FloatingPointError):
        train(wild, tmp_path, 4, rate=1e30)
    with pytest.raises(FloatingPointError, match="after 1 updates the held-out loss is nan"):
        train(replace(wild, total_tokens=256, batch_sizes=(4,)), tmp_path, 4, rate=1e30)
    for error, known in ((Diverged("not finite"), FloatingPointError), (DoesNotFit("one row"), MemoryError)):

        def failing(task, say, error=error):
            raise error

        monkeypatch.setattr(sweep_language, "train_language", failing)
        with pytest.raises(known):
            train(SMALL, tmp_path, 4)


@pytest.fixture
def grpo_settings(config) -> SweepSettings:
    return SweepSettings(
        objective="grpo", batch_sizes=(8, 16), total_samples=32, device="cpu", precision="fp32",
        model=ModelSpec(model=config.model), heldout=4, evaluations=2, group_size=4, max_new_tokens=10,
        kl_coef=config.loss.kl_coef, train=replace(config, name=None), optimizer=OptimizerSettings(),
    )  # fmt: skip


@pytest.mark.usefixtures("made_up_plans")
def test_a_size_of_grpo_is_a_run_of_the_trainer(grpo_settings, tmp_path):
    folder = tmp_path / "size-00008"
    curve, facts = train(grpo_settings, folder, 8, rate=1e-4)
    logged = read_lines(folder / "metrics.jsonl")
    rewards = [(line["step"], line["reward"]) for line in logged if "reward" in line]
    assert [(each["update"], each["train"]) for each in curve if each["train"] is not None] == rewards
    evaluated = [(line["step"], line["eval_reward"]) for line in logged if "eval_reward" in line]
    assert [(each["update"], each["heldout"]) for each in curve if each["heldout"] is not None] == evaluated
    assert [step for step, _ in evaluated] == [0, 2, 4] and curve[-1]["done"] == 32
    times = [line["step_time"] for line in logged if "step_time" in line]
    assert curve[-1]["seconds"] == pytest.approx(sum(times))
    assert sum(facts["parts"].values()) == pytest.approx(facts["predicted_bytes"], rel=1e-3)
    assert facts["peak_bytes"] > 0 and not (folder / "checkpoints").exists()
    measured = [line["added_bytes"] for line in read_lines(folder / "memory.jsonl")]
    assert measured and not any(measured), "tensors were counted one by one, which takes time"


def test_a_batch_that_the_plan_splits_is_out_of_memory_unless_rows_are_given(grpo_settings, tmp_path):
    run = SimpleNamespace(
        folder=tmp_path, budget="1 GB", memory=SimpleNamespace(plan={"learn": SimpleNamespace(rows=4)})
    )
    task = SizeTask(grpo_settings, 8, 1e-4, 32, 2, tmp_path)
    with pytest.raises(MemoryError, match="learn is planned with 4 rows at once in 1 GB"):
        sweep_grpo._Reader(task, run, print)
    sweep_grpo._Reader(replace(task, settings=replace(grpo_settings, train_rows=4)), run, print)


# ---------------------------------------------------------------------------------------------- rows


class Worker:
    """In place of processes: ends as told, after what it was told to say."""

    def __init__(self, **ends: object) -> None:
        self.ends = ends
        self.tasks: list[dict] = []

    def __call__(self, module, task, on_record, *, limited=False):
        self.tasks.append(task)
        for record in self.ends.get("says", []):
            on_record(record)
        best = self.ends.get("best_rate")
        if best is not None:
            on_record(point(1, 8, 1.0, 1e-3, heldout=abs(math.log(task["learning_rate"] / best))))
        return self.ends.get("ended", Ended("ok"))


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """sweep(worker, **changes): a sweep without processes, in one folder."""

    def made(worker: Worker, **changes) -> Sweep:
        monkeypatch.setattr(sweep_module, "run_worker", worker)
        folder = SweepFolder(tmp_path)
        settings = replace(SMALL, **changes)
        folder.open(
            {"batch_sizes": list(settings.batch_sizes), "started": "now", "settings": settings.as_json()}
        )
        return Sweep(settings, folder, None)

    return made


def nothing(batch_size, point):
    """Shows no progress."""


SAYS = [
    {"row": {"peak_bytes": 7, "rate": 2.0, "parts": {"weights": 5}}},
    point(0, 0, 0.0, 1e-3, heldout=5.0), point(1, 128, 0.5, 1e-3, train=4.0),
]  # fmt: skip


def test_sizes_that_fail_have_rows_with_what_was_known(sweep, tmp_path):
    lost = Worker(says=SAYS, ended=Ended("out of memory", "SIGKILL"))
    rows = sweep(lost).run(nothing)
    assert [row["batch_size"] for row in rows] == [4, 16]
    (row, _) = rows
    assert tuple(row) == ROW_KEYS and row["status"] == "out of memory" and row["message"] == "SIGKILL"
    assert (row["updates"], row["done"], row["final_train"], row["peak_bytes"]) == (1, 128, 4.0, 7)
    assert row["parts"] == {"weights": 5} and row["final_heldout"] is None
    assert [each["update"] for each in read_lines(tmp_path / "size-00004.jsonl")] == [0, 1]


def test_finished_rows_are_kept_and_failed_ones_tried_again(sweep):
    sweep(Worker(ended=Ended("out of memory", ""))).run(nothing)
    kept = Worker(says=SAYS)
    sweep(kept, batch_sizes=(4, 8, 16)).run(nothing)
    assert [task["batch_size"] for task in kept.tasks] == [8]
    sweep(Worker(ended=Ended("failed", "a bug")), batch_sizes=(32,)).run(nothing)
    again = Worker(says=SAYS)
    sweep(again, batch_sizes=(8, 32)).run(nothing)
    assert [task["batch_size"] for task in again.tasks] == [32]
    sweep(again, batch_sizes=(8,), again=True).run(nothing)
    assert again.tasks[-1]["batch_size"] == 8
    assert json.loads((sweep(again).folder.path / "sweep.json").read_text())["batch_sizes"] == [4, 8, 16, 32]


def test_a_row_written_by_half_is_done_again(sweep, tmp_path, logged):
    sweep(Worker(says=SAYS)).run(nothing)
    whole = (tmp_path / "size-00016.json").read_text()
    (tmp_path / "size-00016.json").write_text(whole[: len(whole) // 2])
    again = Worker(says=SAYS)
    sweep(again).run(nothing)
    assert [task["batch_size"] for task in again.tasks] == [16]
    assert "WARNING size-00016.json was written by half: size 16 is done again" in logged
    assert (tmp_path / "size-00016.json").read_text() == whole


def test_another_sweep_does_not_go_on_in_the_same_folder(sweep, tmp_path):
    sweep(Worker())
    with pytest.raises(SettingsError, match="settings: width is 32 there and 64 here; seed is 0 there and 1"):
        sweep(Worker(), seed=1, model=replace(TINY, width=64))
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(SettingsError, match=r"sweep\.json is broken"):
        sweep(Worker())


def test_the_best_of_a_grid_of_learning_rates_is_trained_with(sweep, logged):
    base = OptimizerSettings(learning_rate=1e-3)
    worker = Worker(says=SAYS, best_rate=2.1e-3)
    (row,) = sweep(worker, batch_sizes=(16,), base_batch_size=16, optimizer=base, scale_lr="tuned").run(
        nothing
    )
    assert [each["learning_rate"] for each in row["tuned"]] == pytest.approx(
        [0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3]
    )
    assert (
        row["learning_rate"] == pytest.approx(2e-3)
        and worker.tasks[-1]["learning_rate"] == row["learning_rate"]
    )
    assert [task["evaluations"] for task in worker.tasks] == [1, 1, 1, 1, 1, 2]
    assert not any("edge" in line for line in logged)


def test_the_edge_of_a_grid_is_said_and_memory_ends_it(sweep, logged):
    changes = {"batch_sizes": (16,), "base_batch_size": 16, "scale_lr": "tuned"}
    sweep(Worker(says=SAYS, best_rate=1.0), **changes).run(nothing)
    assert any("at the edge of those tried" in line for line in logged)
    lost = Worker(ended=Ended("out of memory", "no room"))
    (row,) = sweep(lost, **changes, again=True).run(nothing)
    assert len(lost.tasks) == 1 and row["status"] == "out of memory" and row["tuned"][0]["heldout"] is None
    (row,) = sweep(Worker(ended=Ended("diverged", "inf")), **changes, again=True).run(nothing)
    assert row["status"] == "diverged" and len(row["tuned"]) == 5


# --------------------------------------------------------------------------------------- the command


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_a_sweep_is_stopped_goes_on_and_survives_running_out_of_memory(tmp_path):
    arguments = [
        "--data", "bundled", "--arch", "gpt2", "--layers", 1, "--width", 32, "--heads", 2, "--context", 64,
        "--total-tokens", 131_072, "--heldout", 8, "--evaluations", 1, "--memory-limit", "550MB",
    ]  # fmt: skip
    command = Command(SWEEP, *arguments, "--batch-sizes", 128, 256, cwd=tmp_path)
    command.wait_for("updates in")
    command.interrupt()
    stopped = command.finish(timeout_s=60)
    assert stopped.returncode == 130 and "Traceback" not in stopped.stderr, stopped.stderr
    assert "Go on with: python" in stopped.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    row = json.loads((folder / "size-00128.json").read_text())
    assert row["status"] == "ok" and row["updates"] == 16 and row["final_heldout"] < 5
    assert abs(row["peak_bytes"] / row["predicted_bytes"] - 1) < 0.25

    again = run(SWEEP, *arguments, "--batch-sizes", 128, 2048, "--output", folder, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "size 128: kept from before (ok)" in again.stderr and "scripts/report.py" in again.stderr
    assert "held-out" in again.stdout and "out of memory" in again.stdout
    lost = json.loads((folder / "size-02048.json").read_text())
    assert lost["status"] == "out of memory" and lost["parts"]["activations"] > 2e8
    assert json.loads((folder / "sweep.json").read_text())["batch_sizes"] == [128, 256, 2048]


def test_a_sweep_of_grpo_in_processes_of_its_own(model_folders, data_file, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text(f"prompts: {data_file}\nheldout_share: 0.2\nengine: 'off'\ngroup_size: 4\n")
    arguments = [
        "--objective", "grpo", "--config", file, "--model", model_folders["gpt2"], "--precision", "fp64",
        "--max-new-tokens", 10, "--kl-coef", 0.05, "--total-samples", 16, "--heldout", 4,
        "--evaluations", 1, "--output", tmp_path / "out", "--device", "cpu",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as wrong:
        parse_sweep([*map(str, arguments), "--batch-sizes", "8", "10"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert wrong.value.code == 2 and "batch_size is 10, which is not a multiple of group_size 4" in said
    (row,) = open_sweep(parse_sweep([*map(str, arguments), "--batch-sizes", "8"])).run(nothing)
    assert row["status"] == "ok" and row["updates"] == 2 and row["final_heldout"] is not None
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["quality"]["better"] == "higher"
