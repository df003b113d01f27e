"""Runs whose memory is short: neither plan nor out of memory changes what is learned (I4). The dry run."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import untraced
from rich.console import Console
from whole_runs import assert_close_outcome, assert_same_outcome, outcome, train

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
from grpo.run.setup import Run, open_run
from grpo.run.tracking import MEMORY_FILE, read_lines
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


def trained(config: Config, prepare: Callable[[Run], object] = lambda run: None) -> Path:
    """The folder of a run by a made-up plan; it leaves no gradients."""
    held: list[Trainer] = []
    with untraced(ROW_BYTES, counted=True):
        folder = train(config, lambda trainer: (held.append(trainer), prepare(trainer.run)))
    assert all(parameter.grad is None for parameter in held[0].model.parameters())
    return folder


@pytest.fixture(scope="module")
def plain(fp64: Config) -> Path:
    return trained(fp64)


def learned(folder: Path) -> dict[str, Any]:
    """What a run leaves behind, but for what its plan has seen."""
    found = outcome(folder)
    del found["state"]["memory"]
    return found


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_lines(folder / MEMORY_FILE) if record["phase"] == phase]


def test_every_phase_of_every_step_leaves_a_record(plain: Path):
    """GPT-2's cache is static: 2 layers of 32 wide keys and values in 8 bytes, for prompts and 48 more."""
    lines = read_lines(plain / MEMORY_FILE)
    assert [(line["step"], line["phase"]) for line in lines] == list(product((1, 2), PHASES))
    for line in lines:
        assert line["rows"] == BATCH and line["retries"] == 0 and line["reason"] is None
        assert line["device_used_bytes"] >= line["peak_bytes"] > 0 and line["reserved_bytes"] > 0
        assert line["allocated_bytes"] > 0 and line["predicted_bytes"] > 0
        assert (line["added_bytes"] is None) == (line["phase"] == "update")
        if line["phase"] in ("score", "learn"):
            assert 0 < line["new_tokens"] <= NEW < line["prompt_tokens"]
        if line["phase"] != "sample":
            assert line["kv_bytes"] is None
            continue
        tokens = [count for count, _ in line["kv_growth"]]
        assert tokens[0] == 1 and tokens == sorted(set(tokens)) and tokens[-1] <= NEW
        per_token = 2 * 2 * 32 * 8
        assert line["kv_growth"][0][1] == (BATCH * 48 + BATCH // G * line["prompt_tokens"]) * per_token
        assert line["kv_bytes"] == max(size for _, size in line["kv_growth"])


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


PLACES = {"sample": "rollout", "score": "score", "learn": "accumulate_grpo", "evaluate": "score_heldout"}


def run_out_everywhere(monkeypatch: pytest.MonkeyPatch, times: int) -> dict[str, RunsOut]:
    places = {place: RunsOut(getattr(planned, name), times) for place, name in PLACES.items()}
    for place, name in PLACES.items():
        monkeypatch.setattr(planned, name, places[place])
    return places


def test_i4_one_out_of_memory_changes_not_a_bit(fp64: Config, plain: Path, monkeypatch):
    """In every phase, and of a checkpoint. It is done again with as many rows, the first time."""
    places = run_out_everywhere(monkeypatch, times=1)

    def prepare(run: Run) -> None:
        places["checkpoint"] = RunsOut(run.checkpoints.save, times=1)
        run.checkpoints.save = places["checkpoint"]  # type: ignore[method-assign]

    folder = trained(replace(fp64, name="once"), prepare)
    for runs_out in places.values():
        assert runs_out.fired == 1 and runs_out.rows[0] == runs_out.rows[1]
    assert_same_outcome(learned(folder), learned(plain))
    for phase in PHASES[:3]:
        tries = [(line["retries"], line["rows"]) for line in records(folder, phase)]
        assert tries == [(1, BATCH), (0, BATCH)]


def test_i4_with_fewer_rows_the_same_is_learned(fp64: Config, plain: Path, monkeypatch):
    """To 1e-12, in float64; each plan keeps the smaller size."""
    places = run_out_everywhere(monkeypatch, times=3)
    folder = trained(replace(fp64, name="thrice"))
    for place, runs_out in places.items():
        most, unit = (runs_out.rows[0], 1) if place == "evaluate" else (BATCH, G)  # it has what others need
        smaller = smaller_rows(most, unit)
        smallest = smaller_rows(smaller, unit)
        assert runs_out.fired == 3 and runs_out.rows[:4] == [most, most, smaller, smallest]
    assert_close_outcome(learned(folder), learned(plain), exactness=1e-12)
    for phase in PHASES[:3]:
        first, second = records(folder, phase)
        assert (first["rows"], first["retries"], second["rows"], second["retries"]) == (4, 3, 4, 0)
        assert first["reason"].startswith("16 -> 4: out of memory")


def test_a_checkpoint_that_never_fits_is_a_warning_and_training_goes_on(fp64: Config, logged: list[str]):
    def prepare(run: Run) -> None:
        run.checkpoints.save = RunsOut(lambda *args, **options: True, times=99)  # type: ignore[method-assign]

    folder = trained(replace(fp64, name="no-checkpoint", eval_interval=0), prepare)
    assert len(records(folder, "learn")) == STEPS
    assert sum(line.startswith("WARNING no checkpoint of step") for line in logged) == STEPS


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


@pytest.mark.parametrize("rows", [8, 1])
def test_a_budget_that_forces_splits_changes_nothing(fp64: Config, plain: Path, fixed_process, rows: int):
    def prepare(run: Run) -> None:
        budget = Budget(max(upper_bytes(run, phase, rows) for phase in PHASES), "test")
        run.memory._budget = lambda: budget

    folder = trained(replace(fp64, name=f"split-{rows}"), prepare)
    first = records(folder, "learn")[0]
    assert first["rows"] == rows and first["reason"].startswith(f"16 -> {rows}: predictions")
    assert_close_outcome(learned(folder), learned(plain), exactness=1e-12)


def test_an_evaluation_has_the_rows_that_fit(fp64: Config, fixed_process, monkeypatch):
    """No two of its prompts are shared, so each row holds all its tokens; what failed twice is not tried."""
    evaluated = RunsOut(planned.score_heldout, times=2)
    monkeypatch.setattr(planned, "score_heldout", evaluated)

    def prepare(run: Run) -> None:
        own = Shape(24, 1, run.longest_prompt + NEW)
        budget = Budget(int(run.memory.footprint("sample", own, 24).upper_bytes) + 1, "test")
        run.memory._budget = lambda: budget
        run.memory.expected_bytes = math.inf

    trained(replace(fp64, name="evaluated", train_rows=1, score_rows=4), prepare)
    assert evaluated.rows == [24, 24, 12, *[12] * STEPS]


@pytest.fixture
def limit_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda limit: monkeypatch.setattr(planning, "make_budget", lambda *_, **__: Budget(limit, "test"))


@pytest.fixture
def auto(fp64: Config, tmp_path: Path, fixed_process) -> Iterator[Config]:
    with untraced(ROW_BYTES):
        yield replace(fp64, batch_size="auto", max_batch_size=27, runs_dir=tmp_path, steps=1, eval_interval=0)


def test_batch_size_auto_is_the_largest_that_needs_no_splitting(auto: Config, limit_to, logged):
    with open_run(auto) as run:
        assert run.config.batch_size == run.config.num_rows == 24
        assert {plan.rows for plan in run.memory.plan.values()} == {24}
        enough = max(upper_bytes(run, phase, 12, batch_size=12) for phase in PHASES)
        too_little = upper_bytes(run, "sample", G, batch_size=G) - 2
    assert any(line.startswith("INFO batch size 24: the largest that needs no splitting") for line in logged)
    for limit, size in ((enough, 12), (enough - 2, 8)):
        limit_to(limit)
        with open_run(auto) as run:
            assert run.config.batch_size == size
    limit_to(too_little)
    with pytest.raises(SettingsError, match=r"batch_size is auto, .* one group of 4 .*--batch-size 4"):
        trained(auto)


def test_batch_size_auto_is_settled_once_and_computes_what_the_number_does(auto: Config, limit_to):
    with open_run(auto) as run:
        limit_to(max(upper_bytes(run, phase, 12, batch_size=12) for phase in PHASES))
    found, given = trained(auto), trained(replace(auto, batch_size=12, name="given"))
    assert_same_outcome(learned(found), learned(given))
    assert read_yaml(found / CONFIG_FILE)["batch_size"] == 12
    assert [line["rows"] for line in records(found, "learn")] == [12]
    limit_to(100 * GB)
    resumed = parse_command_line(["--resume", str(found), "--steps", "2"])
    with open_run(resumed) as run:
        assert run.config.batch_size == run.config.num_rows == run.memory.plan["learn"].rows == 12


@pytest.fixture
def dry(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a dry run prints; no weights are loaded, and nothing is left behind."""
    monkeypatch.setattr(model_module, "AutoModelForCausalLM", None)

    def printed(**changes: Any) -> str:
        dry_run(replace(config, dry_run=True, **changes), Console(file=(file := StringIO()), width=200))
        assert not config.runs_dir.exists()
        return file.getvalue()

    return printed


def cells(table: str, name: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.strip("│ ").startswith(name))
    return [cell.strip() for cell in line.strip("│ ").split("│")][1:]


def test_a_dry_run_knows_a_card_that_is_not_there(dry, logged: list[str]):
    """By a plan that is not made up."""
    table = dry(device_memory="24GB", batch_size="auto", max_batch_size=40)
    assert "budget 19.99 GB (85% of 23.52 GB)" in table
    assert cells(table, "rows at once") == ["40"] * 4
    assert cells(table, "not torch") == ["0.500"] * 4
    assert any(line.startswith("INFO 40 rows of up to") and "10 new tokens" in line for line in logged)
    with pytest.raises(DoesNotFit, match="does not fit: one row needs"):
        dry(device_memory="500MB")


@pytest.mark.usefixtures("made_up_plans")
def test_a_dry_run_prints_the_plan_and_needs_no_hub(dry, monkeypatch, logged: list[str]):
    table = dry()
    assert cells(table, "rows at once") == ["8"] * 4
    assert all(float(cell) > 0 for cell in cells(table, "worst case"))
    assert "budget 2.00 GB (--memory-limit)" in dry(device_memory="24GB", memory_limit="2GB")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grpo.model.hub._answers", lambda name: False)
    assert cells(dry(model="auto", device_memory="24GB"), "rows at once") == ["8"] * 4
    (line,) = (line for line in logged if "the hub was not reached" in line)
    assert line.startswith("INFO") and "built-in shape" in line
    assert any("a token a byte" in line for line in logged)
    with pytest.raises(ValueError, match="could not be fetched"):
        dry(model="nobody/other-model", device_memory="24GB")
