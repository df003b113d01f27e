"""From settings to a plan: closed forms by hand, advice, the largest batch against brute force, tables."""

import re
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import ARCHITECTURES
from rich.table import Table
from transformers import GPT2Config

from grpo.config import Config, SettingsError
from grpo.config.groups import LoraSettings, OptimizerSettings, SamplingSettings
from grpo.config.sizes import parse_size
from grpo.data import PromptSource
from grpo.data.source import MemoryLane
from grpo.learning.loss import LossSettings
from grpo.memory import AdaptiveMemory, Budget, DoesNotFit, MemoryMonitor, Shape
from grpo.memory.budget import GB
from grpo.memory.phase import KEPT, Footprint
from grpo.memory.planner import PhasePlan
from grpo.memory.process import NO_SLACK
from grpo.model.target import Target
from grpo.plan import workload as closed_forms
from grpo.plan.advice import advice
from grpo.plan.build import find_batch_size, fits_better, longest_prompt, make_memory, plan_memory
from grpo.plan.tables import measured_table, plan_table
from grpo.plan.trace import PHASES, PhaseSettings
from grpo.plan.workload import SCRATCH_BYTES, Workload
from grpo.types import Prompt

VOCABULARY, G, PARAMETERS = 100, 8, 10_000_000
MONITOR = MemoryMonitor(torch.device("cpu"))


def workload(dtype: torch.dtype = torch.float32, name: str = "gpt2", **settings: object) -> Workload:
    usual = {"batch_size": 64, "group_size": G, "sampling": SamplingSettings(max_new_tokens=20)}
    config = Config(**{**usual, **settings})  # type: ignore[arg-type]
    target = Target(ARCHITECTURES[name](VOCABULARY).config, torch.device("cpu"), dtype, "sdpa")
    return Workload(config, target, 50, reference_here=True)


def on_card(dtype: torch.dtype = torch.float32, *, grows_segments: bool = True, **shape: int) -> Target:
    return Target(GPT2Config(**shape), torch.device("cuda"), dtype, "sdpa", grows_segments)


def memory_of(work: Workload, **process: int) -> AdaptiveMemory:
    return make_memory(work, MONITOR, lambda: Budget(GB, ""), **{"overhead_bytes": 0, **process})


WITHOUT_KL = LossSettings(kl_coef=0.0)


class Tracer:
    """Stands in for traces: 1 MB a token of each row; halved by checkpointing, and by bf16."""

    num_parameters, trained_sizes, frozen_bytes = PARAMETERS, (PARAMETERS,), 0

    def __init__(self, settings: PhaseSettings) -> None:
        self._settings = settings

    def _peak(self, phase: str, shape: Shape) -> float:
        assert phase in PHASES
        per_token = 2**20 * self._settings.target.dtype.itemsize / 4
        per_token /= 2 if self._settings.checkpointing == "full" else 1
        before = 100 * 2**20 if phase == "learn split" else 0
        return before + shape.rows * (shape.prompt_tokens + shape.new_tokens) * per_token

    def peak_bytes(self, phase: str, shape: Shape) -> int:
        return int(self._peak(phase, shape))

    def fit(self, phase: str, longest: Shape):
        return partial(self._peak, phase)

    def rounded(self, phase: str, shape: Shape) -> Shape:
        return shape


def said_of(work: Workload, phase: str, *missing: float) -> str:
    return advice(work, phase, Tracer(work.phase_settings()), *missing)


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.plan.build.PhaseTracer", Tracer)
    monkeypatch.setattr("grpo.plan.advice.PhaseTracer", Tracer)
    monkeypatch.setattr("grpo.plan.build.usual_slack", lambda work, phase: NO_SLACK)


# ---------------------------------------------------------------------------- bytes in closed form


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float64, {"loss": WITHOUT_KL}, {"weights": 8, "optimizer": 16}),
        (torch.bfloat16, {}, {"weights": 4, "optimizer": 8, "reference": 4, "sampler's copy": 2}),
    ],
)
def test_what_exists_all_along_in_bytes_a_parameter(dtype, settings, expected):
    work = workload(dtype, **settings)
    head = 2 * work.target.vocab_size * work.target.model_config.hidden_size
    bytes_of = {name: 1000 * size for name, size in expected.items()}
    if "sampler's copy" in bytes_of:  # whose head is no longer the embedding
        bytes_of["sampler's copy"] += head
    assert closed_forms.resident_parts(work, 1000) == bytes_of
    bytes_of.pop("reference", None)
    assert closed_forms.resident_parts(replace(work, reference_here=False), 1000) == bytes_of
    # With adapters the base is there once: 1000 bytes of it, and 50 numbers of adapters in two tensors.
    work = workload(dtype, lora=LoraSettings(lora_rank=2), reference_sync=5 * (dtype == torch.bfloat16))
    size = work.exact_bytes
    adapters = {"weights": 1000 + size * 50, "optimizer": 2 * size * 50}
    if dtype == torch.bfloat16:  # the sampler has a head of its own, a reference that follows its adapters
        adapters |= {"reference": 4 * 50, "sampler's copy": head}
    assert closed_forms.resident_parts(work, 7, [20, 30], 1000) == adapters


def test_moments_in_8_bits_are_a_quarter_and_gradients_are_of_what_is_trained(monkeypatch):
    """1000 numbers are too few; 10 000 have 40 blocks of a scale each, and two code books of 256."""
    work = workload(torch.float32, optimizer=OptimizerSettings(optimizer_kind="adamw8bit"))
    parts = closed_forms.resident_parts(work, 11_000, [1000, 10_000])
    assert parts["optimizer"] == 8 * 1000 + 2 * (10_000 + 4 * 40) + 2 * 4 * 256
    work = workload(lora=LoraSettings(lora_rank=2))
    monkeypatch.setattr(Tracer, "trained_sizes", (100, 200))
    for phase in ("learn", "update"):
        assert memory_of(work).footprint(phase, Shape(16, 50, 20)).parts["gradients"] == 4 * 300
    assert said_of(work, "update") == "a smaller --model saves more."  # there is no copy to do without


def test_keys_and_values_of_a_token():
    """2 · layers · heads that have keys · their width · bytes."""
    for name, heads, width, dtype in ("gpt2", 1, 32, torch.float32), ("qwen", 1, 16, torch.bfloat16):
        model = workload(name=name).target.model_config
        assert closed_forms.kv_bytes_per_token(model, dtype) == 2 * 2 * heads * width * dtype.itemsize


def test_scratch_space_is_for_bf16_and_for_cards(monkeypatch):
    def scratch(phase: str, dtype: torch.dtype, width: int = 96) -> int:
        target = Target(GPT2Config(n_embd=width), torch.device("cpu"), dtype, "sdpa")
        return closed_forms.scratch_bytes(phase, target)

    assert scratch("learn", torch.float64) == 0
    assert closed_forms.scratch_bytes("learn", on_card()) == SCRATCH_BYTES
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert 97_000 < scratch("sample split", torch.bfloat16) < 300_000  # measured; a group has 314,000
    assert scratch("learn", torch.bfloat16, width=768) == SCRATCH_BYTES
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert scratch("sample", torch.bfloat16) == SCRATCH_BYTES


def test_attention_with_a_mask_has_a_workspace_on_cards_in_bf16_and_tensors_have_blocks():
    """A block of 64 x 64 in fp32 for each 64 queries of each row and head: 16 KB; wider heads have more."""

    def held(target: Target) -> int:
        work = replace(workload(), target=target)
        parts = closed_forms.attention_workspace(work, shape)
        assert memory_of(work).footprint("learn", shape).parts.items() >= parts.items()
        return sum(parts.values())

    shape, mib = Shape(64, 60, 144), 2**20  # 143 queries
    assert held(on_card(torch.bfloat16, n_head=12, n_embd=768)) == 64 * 12 * 3 * 16 * 2**10
    assert held(on_card(torch.bfloat16, n_head=6, n_embd=768)) == 64 * 6 * 3 * 32 * 2**10
    assert held(on_card()) == held(workload(torch.bfloat16).target) == 0
    # What CUDA's allocator takes for a tensor.
    growing, fixed = (on_card(grows_segments=grows) for grows in (True, False))
    assert [growing.block_bytes(size) for size in (1, 513, 11 * mib + 1)] == [512, 1024, 11 * mib + 512]
    assert [fixed.block_bytes(size) for size in (1, 513, 9 * mib + 1)] == [512, 1024, 9 * mib + 512]
    assert fixed.block_bytes(11 * mib) == 12 * mib  # the MiB that is left is not cut off
    assert fixed.block_bytes(11 * mib - 512) == 11 * mib - 512
    assert workload().target.block_bytes(513) == 513


def test_what_a_phase_consists_of():
    memory = memory_of(workload(), overhead_bytes=7)
    fixed = {"weights": 4 * PARAMETERS, "optimizer": 8 * PARAMETERS, "reference": 4 * PARAMETERS}
    fixed |= {"not torch": 7, KEPT: 0}
    shape = Shape(16, 50, 20)

    def added(phase: str, shape: Shape = shape) -> dict[str, float]:
        parts = memory.footprint(phase, shape).parts
        assert fixed.items() <= parts.items()
        return {name: size for name, size in parts.items() if name not in fixed}

    all_rows = 16 * 70 * 2**20
    cache, logits = (2 * 50 + 16 * 48) * 512, 16 * VOCABULARY * 8
    rest = all_rows - cache - logits  # the cache has whole blocks of 48 tokens
    assert added("sample") == {"KV cache": cache, "logits": logits, "activations": rest}
    logits = 16 * 20 * VOCABULARY * 8
    assert added("score") == {"logits": logits, "activations": all_rows - logits}
    assert added("score", shape._replace(scored_tokens=100))["logits"] == 100 * VOCABULARY * 8  # most ended
    gradients = 4 * PARAMETERS
    rest = all_rows + 100 * 2**20 - gradients - logits  # on a CPU gradients are there from the start
    assert added("learn") == {"gradients": gradients, "logits": logits, "activations": rest}
    assert added("update") == {"gradients": gradients, "activations": 0}
    # More tokens than the head takes at once.
    assert added("learn", Shape(64, 50, 20))["logits"] == 1024 * VOCABULARY * 8
    gathered = memory_of(replace(workload(), stays_gathered=True)).footprint("sample", shape)
    assert gathered.parts["gathered weights"] == 4 * PARAMETERS
    assert gathered.peak_bytes == 4 * PARAMETERS + memory_of(workload()).footprint("sample", shape).peak_bytes
    # Scoring is planned where it is done.
    assert "score" in memory_of(workload(loss=WITHOUT_KL, num_iterations=2)).phases
    assert "score" not in memory_of(workload(loss=WITHOUT_KL)).phases


# ------------------------------------------------------------------------------------- planning

RESIDENT = 16 * PARAMETERS


def budget_for(rows: int, extra: int = 0, **settings: object) -> Budget:
    """What `rows` at once need at first, with the stated error."""
    needed = memory_of(workload(**settings)).footprint("learn", Shape(rows, 50, 20), rows).upper_bytes
    return Budget(int(needed) + 1 + extra, "test")


def test_the_precision_that_fits_is_found_with_the_kernels_that_bf16_compiles_on_a_cpu(monkeypatch):
    """bf16 holds half a row's bytes, and its kernels. A group of 8 takes 8 x 70 MB, or half that."""

    def compiled(work: Workload, compiled_bytes: int = 0) -> float | None:
        memory = memory_of(work, compiled_bytes=compiled_bytes)
        return memory.footprint("update", Shape(8, 0, 0)).parts.get("compiled kernels")

    low = workload(torch.bfloat16)
    all_of_them = compiled(low)
    assert all_of_them is not None and 8 * 2**20 < all_of_them < 64 * 2**20
    assert compiled(low, 10**6) == all_of_them - 10**6  # part of what is not torch's
    assert compiled(low, 10**9) == 0 and compiled(workload()) is None
    monkeypatch.setattr(MemoryMonitor, "in_use_bytes", lambda self: 0)
    monkeypatch.setattr("grpo.plan.workload.STARTED_BYTES", 0)
    for kernels, room, exact_is_better in (
        (32, 1000, False), (32, 500, False),  # both hold a group; bf16 alone does
        (32, 250, True), (3000, 1000, True),  # neither does: parts of one are slow in bf16; fp32 alone does
        (3000, 1, True), (0, 1, False),  # neither holds a row: what needs less
    ):  # fmt: skip
        monkeypatch.setattr("grpo.plan.workload.KEPT_KERNELS", kernels)
        budget = Budget(RESIDENT + room * 2**20, "test")
        assert fits_better(low, workload(), MONITOR, budget) == exact_is_better, (kernels, room)


def test_rows_are_planned_for_the_longest_prompt_and_full_completions_or_as_the_user_fixed_them(tokenizer):
    def planned(work: Workload, budget: Budget) -> list[int]:
        _, memory = plan_memory(work, MONITOR, lambda: budget, overhead_bytes=0)
        assert [*memory.plan] == ["sample", "score", "learn", "update"]
        return [plan.rows for plan in memory.plan.values()]

    assert planned(workload(), budget_for(64)) == [64, 64, 64, 64]
    assert planned(workload(), budget_for(64, extra=-10))[:3] == [64, 64, 32]
    fixed = workload(rollout_rows=32, score_rows=16, train_rows=4)
    assert planned(fixed, Budget(100 * GB, ""))[:3] == [32, 16, 4]
    # The longest prompt is the one of most tokens of all lanes, not always the one of most characters.
    words, digits = "e" * 90, " ".join("1234567890" * 4)
    lanes = {
        task: MemoryLane([Prompt(f"{task}:{i}", text, {}) for i, text in enumerate(texts)], seed=0, task=task)
        for task, texts in {"policy": [words, "a"], "environment": [digits, "b"]}.items()
    }
    source = partial(PromptSource, heldout=[], seed=0, policy_share=0.5, rows_digest="")
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (words, digits)]
    assert longest_prompt(source(lanes), tokenizer, Config()) == max(counts)
    assert longest_prompt(source({}), tokenizer, Config()) == 144  # unknown: as long as completions


@pytest.mark.parametrize(("groups", "extra"), [(1, 0), (1, -10), (2, -10), (5, 0), (32, 0)])
def test_the_batch_that_is_found_is_that_of_brute_force(groups: int, extra: int):
    budget = budget_for(groups * G, extra)
    work = workload(batch_size="auto", max_batch_size=150)
    memory = memory_of(work)
    needed = {
        size: max(memory.footprint(phase, Shape(size, 50, 20), size).upper_bytes for phase in memory.phases)
        for size in range(G, 151, G)
    }
    expected = max((size for size, most in needed.items() if most <= budget.usable_bytes), default=0)
    if expected:
        found, planned = plan_memory(work, MONITOR, lambda: budget, overhead_bytes=0)
        assert found.config.batch_size == expected
        assert {plan.rows for plan in planned.plan.values()} == {expected}
    else:
        with pytest.raises(SettingsError, match=r"does not hold one group of 8 at once in .*--batch-size 8"):
            find_batch_size(memory, work, budget)
    # Of several processes it is what the one that holds least does of it.
    work = replace(workload(batch_size="auto", max_batch_size=200), processes=3)
    agree = mock.Mock(return_value=2 * G)  # there is one with less room
    found, planned = plan_memory(work, MONITOR, lambda: Budget(100 * GB, ""), overhead_bytes=0, agree=agree)
    agree.assert_called_once_with(8 * G)
    assert found.config.batch_size == 6 * G
    assert {plan.rows for plan in planned.plan.values()} == {2 * G}


class Learning(Tracer):
    """Phases but learning take nothing to speak of; learning in parts no more than whole."""

    def _peak(self, phase: str, shape: Shape) -> float:
        return super()._peak("learn", shape) if phase.startswith("learn") else 0.0


class WithoutLayers(Learning):
    """Of a model that cannot be recomputed layer by layer."""

    def _peak(self, phase: str, shape: Shape) -> float:
        if self._settings.checkpointing == "full":
            raise ValueError("does not say which of its layers can be recomputed")
        return super()._peak(phase, shape)


def checkpointing_of(work: Workload, usable_bytes: float) -> tuple[str, int]:
    """What is settled on, and the rows that then learn at once."""
    budget = Budget(int(usable_bytes), "test")
    settled, memory = plan_memory(work, MONITOR, lambda: budget, overhead_bytes=0)
    return settled.config.gradient_checkpointing, memory.plan["learn"].rows


def test_layers_are_recomputed_only_where_not_one_row_would_learn_otherwise(monkeypatch, logged):
    monkeypatch.setattr("grpo.plan.build.PhaseTracer", Learning)
    monkeypatch.setattr("grpo.plan.advice.PhaseTracer", Learning)
    for rows in (64, 2, 1):
        enough = budget_for(rows, gradient_checkpointing="none").usable_bytes
        assert checkpointing_of(workload(), enough) == ("none", rows)
    assert not logged
    scarce = RESIDENT + 50 * 2**20  # one row takes 70 MB, or half of that
    assert checkpointing_of(workload(), scarce) == ("full", 1)
    assert "INFO gradient checkpointing is full: not one row would learn otherwise" in logged
    assert checkpointing_of(replace(workload(), target=on_card()), scarce)[0] == "full"
    assert checkpointing_of(workload(gradient_checkpointing="selective"), 2 * enough)[0] == "selective"
    with pytest.raises(DoesNotFit, match=r"learn does not fit: one row .*checkpointing full saves"):
        checkpointing_of(workload(), RESIDENT + 20 * 2**20)
    with pytest.raises(DoesNotFit, match="learn does not fit: one row"):
        checkpointing_of(workload(shard=True), scarce)  # other processes may have more
    monkeypatch.setattr("grpo.plan.build.PhaseTracer", WithoutLayers)
    with pytest.raises(DoesNotFit, match="learn does not fit: one row"):
        checkpointing_of(workload(), scarce)


# ------------------------------------------------------------------------------------- advice


def test_advice_says_what_each_setting_would_save_and_where_all_of_it_is_not_enough(monkeypatch):
    """One row of 50 + 20 tokens, 1 MB each; 10 million parameters."""
    assert said_of(workload(), "learn") == (
        "--max-new-tokens 10 saves 10 MB; --gradient-checkpointing full saves 35 MB; "
        "--kl-coef 0 saves 38 MB; --lora-rank 16 saves 0.11 GB; "
        "--precision bf16 saves 35 MB; a smaller --model saves more."
    )
    adapters = LoraSettings(lora_rank=16)
    work = workload(torch.bfloat16, gradient_checkpointing="full", loss=WITHOUT_KL, lora=adapters)
    assert said_of(work, "learn") == "--max-new-tokens 10 saves 2 MB; a smaller --model saves more."
    assert "checkpointing" not in said_of(workload(), "sample")
    card = replace(workload(), target=on_card())
    assert "--kl-coef 0, or --reference-device cpu saves 38 MB" in said_of(card, "update")
    # The optimizer's step minds no row: only what exists all along can be less.
    assert said_of(workload(), "update").startswith("--kl-coef 0 saves 38 MB; --lora-rank 16 saves 0.11 GB")
    work = workload(loss=WITHOUT_KL, lora=adapters)  # 10 MB by shorter texts, 35 by checkpointing, 35 by bf16
    assert said_of(work, "learn", 79 * 2**20).endswith("a smaller --model saves more.")
    assert said_of(work, "learn", 81 * 2**20).endswith("it is not enough: 81 MB are missing.")
    monkeypatch.setattr("grpo.plan.advice.PhaseTracer", WithoutLayers)  # what cannot be done is not advised
    assert said_of(workload(), "learn").startswith("--max-new-tokens 10 saves 10 MB; --kl-coef 0 saves 38 MB")
    # When one row does not fit, phase, needs and advice are named.
    with pytest.raises(DoesNotFit, match=r"^sample does not fit: one row needs 0.2") as error:
        plan_memory(workload(), MONITOR, lambda: Budget(RESIDENT, "--memory-limit"), overhead_bytes=2**20)
    said = str(error.value)
    assert "(--memory-limit)" in said and "--max-new-tokens 10 saves 10 MB; --kl-coef 0" in said
    (least,) = re.findall(r"--memory-limit has to be at least ([\d.]+GB)\.$", said)
    plan_memory(workload(), MONITOR, lambda: Budget(parse_size(least), ""), overhead_bytes=2**20)


# ------------------------------------------------------------------------------------- tables


def printed(table: Table) -> dict[str, list[str]]:
    """Cells by the first one of their row."""
    cells = ([column.header, *column.cells] for column in table.columns)
    return {str(first): rest for first, *rest in zip(*cells, strict=True)}


def test_the_table_of_the_plan():
    sampling = Footprint({"weights": 0.5 * GB, "not torch": 0.25 * GB, "KV cache": GB}, 0.1 * GB)
    learning = Footprint({"weights": 0.5 * GB, "activations": 2 * GB, "not torch": 0.25 * GB})
    plans = {"sample": PhasePlan(64, sampling), "learn": PhasePlan(16, learning)}
    worst = {phase: plan.footprint for phase, plan in plans.items()}
    expected = {"sample": Footprint({"weights": GB}, GB / 4), "learn": Footprint({"weights": GB / 2}, 0)}
    table = plan_table(plans, Budget(4 * GB, "85% of 4.70 GB"), worst, expected)
    rows = printed(table)
    assert table.title == "Memory planned; budget 4.00 GB (85% of 4.70 GB)"
    assert rows == {
        "in GB": ["sample", "learn"], "rows at once": ["64", "16"], "weights": ["0.500", "0.500"],
        "KV cache": ["1.000", ""], "activations": ["", "2.000"], "not torch": ["0.250", "0.250"],
        "worst case": ["1.750", "2.750"], "expected": ["1.000", "0.500"], "give or take": ["0.250", "0.000"],
        "headroom": ["2.25, 56%", "1.25, 31%"],
    }  # fmt: skip
    assert list(rows).index("not torch") > list(rows).index("activations")
    assert printed(plan_table(plans, Budget(GB, ""), worst))["give or take"] == ["0.100", "0.000"]


def test_the_table_of_what_was_measured_shows_each_phases_highest_peak():
    def line(phase: str, rows: int, expected: float, used: float, retries: int = 0) -> dict:
        return {
            "phase": phase, "rows": rows, "worst_bytes": 3 * GB, "expected_bytes": expected * GB,
            "expected_error_bytes": GB / 4, "predicted_bytes": 1.75 * GB, "device_used_bytes": used * GB,
            "retries": retries,
        }  # fmt: skip

    old = {"phase": "update", "rows": 8, "retries": 0, "predicted_bytes": GB, "device_used_bytes": GB}
    lines = [line("sample", 64, 1.0, 1.1), line("learn", 64, 2.0, 2.5, 2), line("learn", 32, 1.5, 1.4, 1)]
    rows = printed(measured_table([*lines, line("score", 64, 2.0, 1.5), old], Budget(4 * GB, "test")))
    assert rows["peak of"] == ["rows", "at most", "expected", "measured", "within", "refined", "retries"]
    assert rows["sample"] == ["64", "3.00", "1.00±0.25", "1.10", "yes", "1.75", "0"]
    assert rows["learn"] == ["64", "3.00", "2.00±0.25", "2.50", "more", "1.75", "3"]
    assert rows["score"][4] == "less"
    assert rows["update"] == ["8", "", "", "1.00", "", "1.00", "0"]  # by a version before this one
    assert printed(measured_table([], Budget(GB, ""))).keys() == {"peak of"}
