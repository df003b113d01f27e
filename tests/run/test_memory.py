"""Runs whose memory is short: neither plan nor out of memory changes what is learned (I4). The dry run."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
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
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.memory import Budget, Device, DoesNotFit, Pass, PassSize
from grpo.memory.budget import GB
from grpo.memory.live import LiveBytes
from grpo.memory.rows import smaller_rows
from grpo.model import load as model_module
from grpo.rollout.sample import Rollout
from grpo.run.dry_run import dry_run
from grpo.run.setup import Run, open_run
from grpo.trainer import Trainer

STEPS, G, BATCH, NEW = 2, 4, 16, 10
PHASES = ["sample", "score", "learn"]
ROW_BYTES = 2e6
"""Bytes that a row is said to add: plans are made up."""


@pytest.fixture(scope="module")
def fp64(model_folders: dict[str, Path], data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two steps of four groups in float64, evaluated and saved after each."""
    return Config(
        steps=STEPS,
        batch_size=BATCH,
        group_size=G,
        model=str(model_folders["gpt2"]),
        device="cpu",
        precision="fp64",
        prompts=str(data_file),
        heldout_share=0.2,
        engine="off",
        max_new_tokens=NEW,
        kl_coef=0.05,
        learning_rate=1e-3,
        eval_interval=1,
        eval_prompts=4,
        runs_dir=tmp_path_factory.mktemp("runs"),
        name="plain",
        checkpoint_interval=1,
        trackers=(),
        gradient_checkpointing="full",
    )


def trained(config: Config, prepare: Callable[[Run], object] = lambda run: None, **how: Any) -> Path:
    """The folder of a run by a made-up plan; it leaves no gradients."""
    held: list[Trainer] = []
    with untraced(ROW_BYTES, counted=True):
        folder = train(config, lambda trainer: (held.append(trainer), prepare(trainer.run)), **how)
    assert all(parameter.grad is None for parameter in held[0].model.parameters())
    return folder


@pytest.fixture(scope="module")
def plain(fp64: Config) -> Path:
    return trained(fp64)


def learned(folder: Path) -> dict[str, Any]:
    """Returns all that a run leaves behind, but for what its plan has seen."""
    found = outcome(folder)
    del found["state"]["memory"], found["state"]["cache"]
    return found


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_lines(folder / MEMORY_FILE) if record["phase"] == phase]


def test_every_phase_of_every_step_leaves_a_record(plain: Path):
    """An evaluation before it, too. GPT-2's cache is static: 2 layers of 32 wide keys and values in 8 bytes,
    for prompts and 48 more."""
    lines = read_lines(plain / MEMORY_FILE)
    steps = [*product((1, 2), [*PHASES, "evaluate"])]
    assert [(line["step"], line["phase"]) for line in lines] == [(0, "evaluate"), *steps]
    names = {field.name for field in fields(Pass)} - {"shared", "computed"} | {"step"}
    for line in lines:
        assert line.keys() == names and line["retries"] == 0 and line["reason"] is None
        counted = line["step"] == (0 if line["phase"] == "evaluate" else 1)  # the first time
        assert (line["added_bytes"] is not None) == counted and line["seconds"] > 0
        assert line["process_bytes"] > (line["added_bytes"] or 1) > 0
        assert line["rows"] == (4 if line["phase"] == "evaluate" else BATCH)
        assert line["predicted_bytes"] > 0
        if line["phase"] != "sample":
            assert line["kv_growth"] == []
            continue
        tokens = [count for count, _ in line["kv_growth"]]
        assert tokens[0] == 1 and tokens == sorted(set(tokens)) and tokens[-1] <= NEW
        prompt, per_token = line["tokens"] - NEW, 2 * 2 * 32 * 8
        assert line["kv_growth"][0][1] == (BATCH * 16 + BATCH // G * prompt) * per_token


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
            if isinstance(result, Rollout):
                result.finish()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result


PLACES = {
    "sample": "begin_rollout",
    "score": "score",
    "learn": "accumulate_grpo",
    "evaluate": "answer_heldout",
}


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
    for phase in PHASES:
        tries = [(line["retries"], line["rows"]) for line in records(folder, phase)]
        assert tries == [(1, BATCH), (0, BATCH)]


def test_i4_with_fewer_rows_the_same_is_learned(fp64: Config, plain: Path, monkeypatch):
    """To 1e-12, in float64; each plan keeps the smaller size."""
    places = run_out_everywhere(monkeypatch, times=3)
    folder = trained(replace(fp64, name="thrice"))
    for place, runs_out in places.items():
        most = 4 if place == "evaluate" else BATCH
        smaller = smaller_rows(most, G)
        smallest = smaller_rows(smaller, G)
        assert runs_out.fired == 3 and runs_out.rows[:5] == [most, most, smaller, smallest, smallest]
    assert_close_outcome(learned(folder), learned(plain), exactness=1e-12)
    for phase in PHASES:
        first, second = records(folder, phase)
        assert (first["rows"], first["retries"], second["rows"], second["retries"]) == (4, 3, 4, 0)
        assert first["reason"] is None and second["reason"].startswith("16 -> 4: memory ran out (OutOfMem")


def test_a_checkpoint_that_never_fits_is_a_warning_and_training_goes_on(fp64: Config, logged: list[str]):
    def prepare(run: Run) -> None:
        run.checkpoints.save = RunsOut(lambda *args, **options: True, times=99)  # type: ignore[method-assign]

    folder = trained(replace(fp64, name="no-checkpoint", eval_interval=0), prepare)
    assert len(records(folder, "learn")) == STEPS
    assert sum(line.startswith("WARNING no checkpoint of step") for line in logged) == STEPS


def said_to_add(run: Run, phase: str, rows: int) -> int:
    """Bytes of `rows` of a phase, the longest prompts' and full completions."""
    return int(run.fit.predict(phase, PassSize(rows, NEW, run.longest_prompt))) + 1


def leave_room(run: Run, room: int) -> None:
    """So many bytes for what phases add; no tensor is counted: plans follow from what is made up alone.

    Nor is what the process holds, which is never as much as it is said to.
    """
    run.device.slack, run.device.used_bytes = 0.0, lambda: 1000 * GB
    run.device.budget, run.device.room_bytes = lambda: Budget(1000 * GB + room, "test"), lambda: room
    run.fit._counts = lambda *_: False  # type: ignore[method-assign]


@pytest.mark.parametrize("rows", [8, 1])
def test_a_budget_that_forces_splits_changes_nothing(fp64: Config, plain: Path, rows: int, logged):
    folder = trained(
        replace(fp64, name=f"split-{rows}"),
        lambda run: leave_room(run, max(said_to_add(run, phase, rows) for phase in PHASES)),
    )
    first, second = records(folder, "learn")
    assert first["rows"] == second["rows"] == rows
    why = f"{rows}: longer texts, or less room, of"
    assert first["reason"].startswith(f"16 -> {why}") and second["reason"] is None
    assert any(
        line.startswith(f"INFO plan: learn 16 -> {rows} rows at once: longer texts") for line in logged
    )
    assert_close_outcome(learned(folder), learned(plain), exactness=1e-12)


def test_an_evaluation_has_the_rows_that_fit(fp64: Config, monkeypatch):
    """No two of its prompts are shared, so each row holds all its tokens; it begins with sampling's bytes."""
    evaluated = RunsOut(planned.answer_heldout, times=0)
    monkeypatch.setattr(planned, "answer_heldout", evaluated)

    def prepare(run: Run) -> None:
        leave_room(run, int(1.5 * run.fit.predict("sample", PassSize(4, run.longest_prompt + NEW))))

    trained(replace(fp64, name="evaluated", eval_prompts=8, train_rows=1, score_rows=1), prepare)
    assert evaluated.rows == [4] * (1 + STEPS)


@pytest.fixture
def limit_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many bytes may be held, of which no process takes any."""
    monkeypatch.setattr("grpo.memory.device.FIRST_SLACK", 0.0)
    monkeypatch.setattr(Device, "used_bytes", lambda self: 0)
    monkeypatch.setattr(Device, "capped", lambda self: nullcontext("not enforced"))
    return lambda limit: monkeypatch.setattr(Device, "budget", lambda self: Budget(limit, "test"))


@pytest.fixture
def auto(fp64: Config, tmp_path: Path, limit_to) -> Iterator[Config]:
    limit_to(100 * GB)
    with untraced(ROW_BYTES):
        yield replace(fp64, batch_size="auto", max_batch_size=27, runs_dir=tmp_path, steps=1, eval_interval=0)


def test_batch_size_auto_is_the_largest_that_needs_no_splitting(auto: Config, limit_to, logged):
    with open_run(auto) as run:
        assert run.config.batch_size == run.config.num_rows == 24
        assert run.fit.planned() == dict.fromkeys(PHASES, 24)
        enough = max(said_to_add(run, phase, 12) for phase in PHASES)
        too_little = said_to_add(run, "sample", G) - 2
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
        limit_to(max(said_to_add(run, phase, 12) for phase in PHASES))
    found, given = trained(auto), trained(replace(auto, batch_size=12, name="given"))
    assert_same_outcome(learned(found), learned(given))
    assert read_yaml(found / CONFIG_FILE)["batch_size"] == 12
    assert [line["rows"] for line in records(found, "learn")] == [12]
    limit_to(100 * GB)
    resumed = parse_command_line(["--resume", str(found), "--steps", "2"])
    with open_run(resumed) as run:
        assert run.config.batch_size == run.config.num_rows == run.fit.planned()["learn"] == 12


@pytest.fixture
def dry(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns what a dry run prints; no weights are loaded, and nothing is left behind."""
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
    table = dry(device_memory="24GB", batch_size="auto", max_batch_size=40)
    assert "budget 19.99 GB (85% of 23.52 GB)" in table
    assert cells(table, "rows at once") == ["40"] * 3
    assert cells(table, "everything else") == ["0.500"] * 3
    assert any(line.startswith("INFO 40 rows of up to") and "10 new tokens" in line for line in logged)
    with pytest.raises(DoesNotFit, match="does not fit: one row needs"):
        dry(device_memory="500MB")


def test_a_dry_run_prints_the_plan_and_needs_no_hub(dry, monkeypatch, logged: list[str]):
    table = dry()
    assert cells(table, "rows at once") == ["8"] * 3
    assert all(float(cell) > 0 for cell in cells(table, "peak"))
    assert "budget 2.00 GB (--memory-limit)" in dry(device_memory="24GB", memory_limit="2GB")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grpo.model.names._answers", lambda name: False)
    assert cells(dry(model="auto", device_memory="24GB"), "rows at once") == ["8"] * 3
    (line,) = (line for line in logged if "the hub was not reached" in line)
    assert line.startswith("INFO") and "built-in shape" in line
    assert any("a token a byte" in line for line in logged)
    with pytest.raises(ValueError, match="could not be fetched"):
        dry(model="nobody/other-model", device_memory="24GB")


@pytest.mark.parametrize(
    "kind", [{}, {"lora_rank": 4}, {"kl_coef": 0.0}], ids=["full", "lora", "no reference"]
)
def test_a_run_that_goes_on_holds_no_more_than_it_did_before(config, kind):
    """The moments of its checkpoint are read one by one, into those that the optimizer has anyway."""
    config = replace(config, **kind)
    folder = train(config)
    held = []
    for each in (replace(config, name="fresh"), replace(config, resume=folder, name=None, steps=9)):
        with LiveBytes() as live, untraced(), open_run(each) as run:
            largest = max(p.nbytes for p in run.policy.model.parameters())
            Trainer(run)
            held.append((live.live_bytes, live.peak_bytes))
    (fresh, fresh_peak), (resumed, peak) = held
    assert resumed <= fresh + 2**16 and peak <= fresh_peak + largest + 2**16


def test_texts_that_turn_out_long_are_sampled_all_the_same_and_planned_for_from_then_on(
    fp64: Config, logged: list[str], monkeypatch
):
    """Rows are given up, the step is the same step, and a run that is resumed knows what texts took."""
    monkeypatch.setattr("grpo.rollout.static_cache.PAGE", 8)
    config = replace(fp64, steps=3, max_new_tokens=40, ignore_ends=True, eval_interval=0)
    whole = trained(replace(config, name="all-may-be-long"))
    folder = trained(replace(config, name="short", typical_tokens=8))
    shares = [line["memory/tokens_twice"] for line in read_lines(folder / METRICS_FILE)]
    assert 0.05 < shares[0] < 1 and shares[1:] == [0, 0]
    assert_close_outcome(learned(folder), learned(whole), exactness=1e-12)
    assert sum("of tokens were sampled twice: texts are longer" in line for line in logged) == 1
    cut = trained(replace(config, name="cut", typical_tokens=8), stop_after=1)
    resumed = trained(replace(config, name="cut", typical_tokens=8, resume=cut))
    assert [line["memory/tokens_twice"] for line in read_lines(resumed / METRICS_FILE)] == shares
    assert_same_outcome(outcome(resumed), {**outcome(folder)})


def test_rows_are_more_at_once_when_texts_have_turned_out_short(fp64: Config, logged: list[str], monkeypatch):
    """Room for few rows of 40 tokens, prompts among them, and texts of less than a page."""
    monkeypatch.setattr("grpo.rollout.static_cache.PAGE", 8)

    def prepare(run: Run) -> None:
        leave_room(run, 10**9)
        del run.fit._phases["sample"]  # what was made up
        for rows, tokens in ((4, 40), (8, 40), (8, 8)):
            run.fit.see("sample", PassSize(rows, tokens), 0.98e9 * rows / 8 * tokens / 40)

    folder = trained(replace(fp64, name="room-for-8", steps=3, max_new_tokens=40, eval_interval=0), prepare)
    assert [line["rows"] for line in records(folder, "sample")] == [4, 8, 8]
    changes = [line for line in logged if line.startswith("INFO plan: sample 4 -> 8")]
    assert len(changes) == 1 and "tokens of the cache a row, and not 40" in changes[0]
