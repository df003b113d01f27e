"""Runs whose memory is short: the plan and out of memory change nothing that is learned (I4).

memory.jsonl, batch size auto, the dry run, and what is said when it does not fit.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import untraced
from rich.console import Console
from safetensors.torch import load_file

from grpo import phases as planned
from grpo.config import CONFIG_FILE, Config, SettingsError, parse_command_line, read_yaml
from grpo.config.groups import OptimizerSettings, SamplingSettings
from grpo.learning.loss import LossSettings
from grpo.memory import Budget, DoesNotFit, MemoryMonitor, Shape, adaptive
from grpo.memory.budget import GB, DeviceMemory
from grpo.memory.planner import smaller_rows
from grpo.model import load as model_module
from grpo.run import planning
from grpo.run.dry_run import dry_run
from grpo.run.interrupt import StopRequest
from grpo.run.setup import Run, open_run
from grpo.run.tracking import COMPLETIONS_FILE, MEMORY_FILE, METRICS_FILE, read_lines
from grpo.trainer import Trainer

STEPS, G, BATCH, NEW = 2, 4, 16, 10
PHASES = ["sample", "score", "learn", "update"]
ROW_BYTES = 2e6
"""What a row is said to add, more than the optimizer's step: plans are made up."""


@pytest.fixture(scope="module")
def fp64(model_folders: dict[str, Path], data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two steps of four groups in float64, evaluated and saved after each."""
    return Config(
        steps=STEPS, batch_size=BATCH, group_size=G, model=str(model_folders["gpt2"]), device="cpu",
        precision="fp64", prompts=str(data_file), heldout_share=0.2, engine="off",
        sampling=SamplingSettings(max_new_tokens=NEW), loss=LossSettings(kl_coef=0.05),
        optimizer=OptimizerSettings(learning_rate=1e-3), eval_interval=1, eval_prompts=4,
        runs_dir=tmp_path_factory.mktemp("runs"), name="plain", checkpoint_interval=1, trackers=(),
        gradient_checkpointing="selective",  # budgets here are made from predictions: the same in every run
    )  # fmt: skip


def train(config: Config, prepare: Callable[[Run], object] = lambda run: None) -> Path:
    with untraced(ROW_BYTES, counted=True), open_run(config) as run:
        prepare(run)
        Trainer(run, Console(quiet=True)).train(StopRequest())
        assert all(parameter.grad is None for parameter in run.policy.model.parameters())
        return run.folder


def outcome(folder: Path) -> dict[str, Any]:
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    passing = ("timing/", "memory/", "step_time")
    return {
        "weights": load_file(last / "model.safetensors"),
        "optimizer": load_file(last / "trainer.safetensors"),
        "metrics": [
            {name: value for name, value in record.items() if not name.startswith(passing)}
            for record in read_lines(folder / METRICS_FILE)
        ],
        "completions": read_lines(folder / COMPLETIONS_FILE),
    }


@pytest.fixture(scope="module")
def plain(fp64: Config) -> Path:
    return train(fp64)


def assert_same(folder: Path, plain: Path, *, exactness: float = 0.0) -> None:
    """The weights in global norm, Adam's moments one by one; the same tokens, and metrics as close."""
    one, other = outcome(folder), outcome(plain)
    weights, others = (torch.cat([t.flatten() for t in each["weights"].values()]) for each in (one, other))
    assert (weights - others).norm() <= exactness * others.norm()
    for name, tensor in other["optimizer"].items():
        assert torch.allclose(one["optimizer"][name], tensor, rtol=1e3 * exactness, atol=exactness), name
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=100 * exactness, abs=100 * exactness)
    texts = [[row["completion"] for row in each["completions"]] for each in (one, other)]
    assert texts[0] == texts[1] and len(texts[0]) == STEPS * BATCH


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_lines(folder / MEMORY_FILE) if record["phase"] == phase]


# ------------------------------------------------------------------------------- memory.jsonl


def test_every_phase_of_every_step_leaves_a_record(plain: Path):
    lines = read_lines(plain / MEMORY_FILE)
    assert [(line["step"], line["phase"]) for line in lines] == [
        (step, phase) for step in range(1, STEPS + 1) for phase in PHASES
    ]
    for line in lines:
        assert line["rows"] == BATCH and line["retries"] == 0 and line["reason"] is None
        assert line["device_used_bytes"] >= line["peak_bytes"] > 0 and line["reserved_bytes"] > 0
        assert line["allocated_bytes"] > 0 and line["predicted_bytes"] > 0
        assert (line["added_bytes"] is None) == (line["phase"] == "update")
        if line["phase"] in ("score", "learn"):
            assert 0 < line["new_tokens"] <= NEW < line["prompt_tokens"]


def test_the_cache_is_watched_as_it_grows_within_a_rollout(plain: Path):
    """GPT-2's is static: 2 layers of 32 wide keys and values in 8 bytes, for prompts and a block of 48."""
    for line in records(plain, "sample"):
        tokens = [count for count, _ in line["kv_growth"]]
        assert tokens[0] == 1 and tokens == sorted(set(tokens)) and tokens[-1] <= NEW
        per_token = 2 * 2 * 32 * 8
        assert line["kv_growth"][0][1] == (BATCH * 48 + BATCH // G * line["prompt_tokens"]) * per_token
        assert line["kv_bytes"] == max(size for _, size in line["kv_growth"])
    assert all(line["kv_bytes"] is None for line in records(plain, "learn"))


# --------------------------------------------------------------------------- I4 out of memory


class RunsOut:
    """Does the work, gradients and all, and then runs out of memory: the first `times` times."""

    def __init__(self, work: Callable[..., Any], times: int) -> None:
        self.work, self.times, self.fired = work, times, 0
        self.rows: list[int | None] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.rows.append(options.get("rows"))
        result = self.work(*arguments, **options)
        if self.fired < self.times:
            self.fired += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result


def run_out_in(place: str, monkeypatch: pytest.MonkeyPatch, *, times: int) -> RunsOut:
    runs_out = RunsOut(getattr(planned, PLACES[place]), times)
    monkeypatch.setattr(planned, PLACES[place], runs_out)
    return runs_out


PLACES = {"sample": "rollout", "score": "score", "learn": "accumulate_grpo", "evaluate": "score_heldout"}


@pytest.mark.parametrize("place", PLACES)
def test_i4_one_out_of_memory_changes_not_a_bit(fp64: Config, plain: Path, monkeypatch, place: str):
    """It is done again with as many rows: the first time something else may have been in the way."""
    runs_out = run_out_in(place, monkeypatch, times=1)
    folder = train(dataclasses.replace(fp64, name=f"once-{place}"))
    assert runs_out.fired == 1 and runs_out.rows[0] == runs_out.rows[1]
    assert_same(folder, plain)
    if place in PHASES:
        assert [line["retries"] for line in records(folder, place)] == [1, 0]
        assert [line["rows"] for line in records(folder, place)] == [BATCH] * 2


@pytest.mark.parametrize("place", PLACES)
def test_i4_with_fewer_rows_the_same_is_learned(fp64: Config, plain: Path, monkeypatch, place: str):
    """To 1e-12, in float64; the plan keeps the smaller size."""
    runs_out = run_out_in(place, monkeypatch, times=3)
    folder = train(dataclasses.replace(fp64, name=f"thrice-{place}"))
    most = runs_out.rows[0] if place == "evaluate" else 16  # an evaluation has what other phases need
    assert runs_out.fired == 3 and runs_out.rows[:2] == [most, most]
    group = 1 if place == "evaluate" else G
    assert runs_out.rows[2:4] == [smaller := smaller_rows(most, group), smaller_rows(smaller or 0, group)]
    assert_same(folder, plain, exactness=1e-12)
    if place in PHASES:
        first, second = records(folder, place)
        assert (first["rows"], first["retries"], second["rows"], second["retries"]) == (4, 3, 4, 0)
        assert first["reason"].startswith("16 -> 4: out of memory, replayed (OutOfMemoryError")


def test_i4_a_checkpoint_that_ran_out_of_memory_is_written_again(fp64: Config, plain: Path):
    made: list[RunsOut] = []

    def prepare(run: Run) -> None:
        made.append(RunsOut(run.checkpoints.save, times=1))
        run.checkpoints.save = made[0]  # type: ignore[method-assign]

    folder = train(dataclasses.replace(fp64, name="once-checkpoint"), prepare)
    assert made[0].fired == 1
    assert_same(folder, plain)


def test_a_checkpoint_that_never_fits_is_a_warning_and_training_goes_on(fp64: Config, logged: list[str]):
    def prepare(run: Run) -> None:
        run.checkpoints.save = RunsOut(lambda *args, **options: True, times=99)  # type: ignore[method-assign]

    folder = train(dataclasses.replace(fp64, name="no-checkpoint"), prepare)
    assert len(records(folder, "learn")) == STEPS
    assert sum(line.startswith("WARNING no checkpoint of step") for line in logged) == STEPS


# ------------------------------------------------------------------------ plans change nothing


@pytest.fixture
def fixed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process holds 1 GB and no more, no tensor is counted: plans follow from predictions alone."""
    monkeypatch.setattr(adaptive, "EXACT_STEPS", 0)
    monkeypatch.setattr(MemoryMonitor, "memory", lambda self: DeviceMemory(1000 * GB, 900 * GB, GB))
    monkeypatch.setattr(MemoryMonitor, "in_use_bytes", lambda self: GB)
    monkeypatch.setattr(MemoryMonitor, "gap_bytes", lambda self: 0)
    monkeypatch.setattr(MemoryMonitor, "read_peaks", lambda self: (GB, GB, 0))


def upper_bytes(run: Run, phase: str, rows: int, *, batch_size: int | None = None) -> int:
    """What `rows` of a phase may hold in the first plan, the longest prompts' and full completions."""
    shape = Shape(rows, run.longest_prompt, NEW)
    return int(run.memory.footprint(phase, shape, batch_size).upper_bytes) + 1


@pytest.mark.parametrize("rows", [8, 4, 1])
def test_a_budget_that_forces_splits_changes_nothing(
    fp64: Config, plain: Path, fixed_process, monkeypatch, rows: int
):
    def prepare(run: Run) -> None:
        budget = Budget(max(upper_bytes(run, phase, rows) for phase in PHASES), "test")
        run.memory._budget = lambda: budget

    folder = train(dataclasses.replace(fp64, name=f"split-{rows}"), prepare)
    first = records(folder, "learn")[0]
    assert first["rows"] == rows and f"16 -> {rows}: predictions with their error exceed" in first["reason"]
    assert_same(folder, plain, exactness=1e-12)


def test_an_evaluation_has_the_rows_that_fit(fp64: Config, fixed_process, monkeypatch):
    """No two of its prompts are shared, so each row holds all its tokens; what failed once is not tried."""
    seen: list[int] = []
    sampled = planned.score_heldout

    def watched(*arguments: Any, rows: int, **options: Any) -> Any:
        seen.append(rows)
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sampled(*arguments, rows=rows, **options)

    def prepare(run: Run) -> None:
        own = Shape(24, 1, run.longest_prompt + NEW)
        budget = Budget(int(run.memory.footprint("sample", own, 24).upper_bytes) + 1, "test")
        run.memory._budget = lambda: budget
        run.memory.expected_bytes = math.inf

    monkeypatch.setattr(planned, "score_heldout", watched)
    folder = train(dataclasses.replace(fp64, name="evaluated", train_rows=1, score_rows=4), prepare)
    assert seen[:3] == [24, 24, 12] and set(seen[3:]) == {12} and len(seen) == 3 + STEPS
    assert len(records(folder, "sample")) == STEPS


# --------------------------------------------------------------------------------- batch size auto


def limit_to(monkeypatch: pytest.MonkeyPatch, usable_bytes: int) -> None:
    monkeypatch.setattr(planning, "make_budget", lambda *args, **options: Budget(usable_bytes, "test"))


@pytest.fixture
def auto(fp64: Config, tmp_path: Path) -> Iterator[Config]:
    with untraced(ROW_BYTES):
        yield dataclasses.replace(fp64, batch_size="auto", max_batch_size=27, runs_dir=tmp_path, steps=1)


def test_batch_size_auto_is_the_largest_that_needs_no_splitting(auto, fixed_process, monkeypatch, logged):
    with open_run(auto) as run:
        assert run.config.batch_size == run.config.num_rows == 24
        assert {plan.rows for plan in run.memory.plan.values()} == {24}
        enough = max(upper_bytes(run, phase, 12, batch_size=12) for phase in PHASES)
    limit_to(monkeypatch, enough)
    with open_run(auto) as run:
        assert run.config.batch_size == 12
    limit_to(monkeypatch, enough - 2)
    with open_run(auto) as run:
        assert run.config.batch_size == 8
    assert "INFO batch size 24: the largest that needs no splitting, of " in "\n".join(logged)


def test_batch_size_auto_is_settled_once_and_kept(auto, fixed_process, monkeypatch):
    with open_run(auto) as run:
        limit_to(monkeypatch, max(upper_bytes(run, phase, 12, batch_size=12) for phase in PHASES))
    folder = train(auto)
    assert read_yaml(folder / CONFIG_FILE)["batch_size"] == 12
    assert [line["rows"] for line in records(folder, "learn")] == [12]
    limit_to(monkeypatch, 100 * GB)
    resumed = parse_command_line(["--resume", str(folder), "--steps", "2"])
    assert resumed.batch_size == 12
    with open_run(resumed) as run:
        assert run.config.num_rows == 12 and run.memory.plan["learn"].rows == 12


def test_batch_size_auto_computes_what_the_number_does_that_it_takes(auto, fixed_process, monkeypatch):
    with open_run(auto) as run:
        limit_to(monkeypatch, max(upper_bytes(run, phase, 12, batch_size=12) for phase in PHASES))
    found, given = train(auto), train(dataclasses.replace(auto, batch_size=12, name="given"))
    for file in ("model.safetensors", "trainer.safetensors"):
        ours, theirs = (load_file(each / "checkpoints/step-000001" / file) for each in (found, given))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_batch_size_auto_wants_room_for_a_group(auto, fixed_process, monkeypatch):
    with open_run(auto) as run:
        print({p: [upper_bytes(run, p, r, batch_size=r) - GB for r in (4, 8, 12, 24)] for p in PHASES})
        too_little = upper_bytes(run, "sample", G, batch_size=G) - 2
    limit_to(monkeypatch, too_little)
    with pytest.raises(SettingsError) as error, open_run(auto):
        raise AssertionError
    assert "batch_size is auto, but sample does not hold one group of 4 at once" in str(error.value)
    assert "give --batch-size 4, which is then done in parts" in str(error.value)


# ------------------------------------------------------------------- when it does not fit, dry runs


@pytest.mark.usefixtures("made_up_plans")
def test_when_it_does_not_fit_phase_bytes_and_settings_are_named(config, fixed_process, monkeypatch):
    limit_to(monkeypatch, GB + 12 * 2**20)
    with pytest.raises(DoesNotFit) as error, open_run(config):
        raise AssertionError
    said = str(error.value)
    assert said.startswith("sample does not fit: one row needs 1.02 GB (weights 0 MB, ")
    assert "there are 1.01 GB (test)" in said and said.endswith(
        "a smaller --model saves more. As it is, 1.03 GB have to be there."
    )
    assert not config.runs_dir.exists()


def dry(config: Config, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a dry run prints; no weights are loaded."""
    monkeypatch.setattr(model_module, "AutoModelForCausalLM", None)
    console = Console(file=StringIO(), width=200)
    dry_run(config, console)
    assert not config.runs_dir.exists()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cells(table: str, name: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.strip("│ ").startswith(name))
    return [cell.strip() for cell in line.strip("│ ").split("│")][1:]


@pytest.mark.usefixtures("made_up_plans")
def test_a_dry_run_prints_the_plan_and_leaves_nothing_behind(config: Config, monkeypatch):
    table = dry(dataclasses.replace(config, dry_run=True), monkeypatch)
    assert "Memory planned; budget" in table
    assert cells(table, "rows at once") == ["8"] * 4
    assert all(float(cell) > 0 for cell in cells(table, "worst case"))


def test_a_dry_run_knows_a_card_that_is_not_there(config: Config, monkeypatch, logged: list[str]):
    config = dataclasses.replace(
        config, dry_run=True, device_memory="24GB", batch_size="auto", max_batch_size=40
    )
    table = dry(config, monkeypatch)
    assert "budget 19.99 GB (85% of 23.52 GB)" in table
    assert cells(table, "rows at once") == ["40"] * 4
    assert cells(table, "not torch") == ["0.500"] * 4
    assert any(line.startswith("INFO 40 rows of up to") and "10 new tokens" in line for line in logged)
    with pytest.raises(DoesNotFit, match="does not fit: one row needs"):
        dry(dataclasses.replace(config, dry_run=True, device_memory="500MB", batch_size=8), monkeypatch)


@pytest.mark.usefixtures("made_up_plans")
def test_a_card_is_planned_for_without_the_hub(config: Config, monkeypatch, logged: list[str]):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grpo.model.hub._answers", lambda name: False)
    config = dataclasses.replace(config, model="auto", dry_run=True, device_memory="24GB")
    assert cells(dry(config, monkeypatch), "rows at once") == ["8"] * 4
    (line,) = (line for line in logged if "the hub was not reached" in line)
    assert line.startswith("INFO") and "built-in shape" in line
    assert any("a token a byte" in line for line in logged)
    with pytest.raises(ValueError, match="could not be fetched"):
        dry(dataclasses.replace(config, model="nobody/other-model"), monkeypatch)


@pytest.mark.usefixtures("made_up_plans")
def test_a_limit_holds_in_a_dry_run_too(config: Config, monkeypatch):
    table = dry(
        dataclasses.replace(config, dry_run=True, device_memory="24GB", memory_limit="2GB"), monkeypatch
    )
    assert "budget 2.00 GB (--memory-limit)" in table
