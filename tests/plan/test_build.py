"""From settings to a plan: closed forms by hand, advice, the largest batch against brute force, tables."""

import dataclasses
import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from conftest import ARCHITECTURES
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config

from grpo.config import Config, SettingsError
from grpo.config.groups import LoraSettings, OptimizerSettings, SamplingSettings
from grpo.config.sizes import parse_size
from grpo.data import PromptSource
from grpo.data.source import MemoryLane
from grpo.learning.loss import LossSettings
from grpo.memory import Budget, DoesNotFit, MemoryMonitor, Shape
from grpo.memory.budget import GB
from grpo.memory.phase import KEPT, Footprint
from grpo.memory.planner import PhasePlan
from grpo.memory.process import NO_SLACK
from grpo.model.target import Target
from grpo.plan.advice import advice
from grpo.plan.build import (
    LONGEST_TEXTS,
    find_batch_size,
    fits_better,
    longest_prompt,
    make_memory,
    plan_memory,
)
from grpo.plan.tables import measured_table, plan_table
from grpo.plan.trace import PHASES, PhaseSettings
from grpo.plan.workload import (
    SCRATCH_BYTES,
    Workload,
    attention_workspace,
    kv_bytes_per_token,
    resident_parts,
    scratch_bytes,
)
from grpo.types import Prompt

VOCABULARY, G, PARAMETERS = 100, 8, 10_000_000
MONITOR = MemoryMonitor(torch.device("cpu"))


def workload(dtype: torch.dtype = torch.float32, name: str = "gpt2", **settings: object) -> Workload:
    settings = {
        "batch_size": 64,
        "group_size": G,
        "sampling": SamplingSettings(max_new_tokens=20),
        **settings,
    }
    config = Config(**settings)  # type: ignore[arg-type]
    target = Target(ARCHITECTURES[name](VOCABULARY).config, torch.device("cpu"), dtype, "sdpa")
    return Workload(config, target, 50, reference_here=True)


def on_a_card() -> Workload:
    work = workload()
    return replace(work, target=replace(work.target, device=torch.device("cuda")))


WITHOUT_KL = LossSettings(kl_coef=0.0)


class Tracer:
    """Stands in for traces: 1 MB a token of each row; halved by checkpointing, and by bf16."""

    def __init__(self, settings: PhaseSettings) -> None:
        self._settings = settings
        self.num_parameters, self.trained_sizes = PARAMETERS, [PARAMETERS]
        self.frozen_bytes = 0

    def _peak(self, phase: str, shape: Shape) -> float:
        assert phase in PHASES
        per_token = 2**20 * self._settings.target.dtype.itemsize / 4
        per_token /= 2 if self._settings.checkpointing == "full" else 1
        before = 100 * 2**20 if phase == "learn split" else 0
        return before + shape.rows * (shape.prompt_tokens + shape.new_tokens) * per_token

    def peak_bytes(self, phase: str, shape: Shape) -> int:
        return int(self._peak(phase, shape))

    def rounded(self, phase: str, shape: Shape) -> Shape:
        return shape

    def fit(self, phase: str, longest: Shape):
        return lambda shape: self._peak(phase, shape)


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.plan.build.PhaseTracer", Tracer)
    monkeypatch.setattr("grpo.plan.advice.PhaseTracer", Tracer)
    monkeypatch.setattr("grpo.plan.build.usual_slack", lambda work, phase: NO_SLACK)


# ---------------------------------------------------------------------------- bytes in closed form


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        (torch.float32, {}, {"weights": 4, "optimizer": 8, "reference": 4}),
        (torch.float32, {"loss": WITHOUT_KL}, {"weights": 4, "optimizer": 8}),
        (torch.float64, {}, {"weights": 8, "optimizer": 16, "reference": 8}),
        (torch.bfloat16, {}, {"weights": 4, "optimizer": 8, "reference": 4, "sampler's copy": 2}),
    ],
)
def test_what_exists_all_along_in_bytes_a_parameter(dtype, settings, expected):
    work = workload(dtype, **settings)
    bytes_of = {name: 1000 * size for name, size in expected.items()}
    if "sampler's copy" in bytes_of:  # whose head is no longer the embedding
        bytes_of["sampler's copy"] += 2 * work.target.vocab_size * work.target.model_config.hidden_size
    assert resident_parts(work, 1000) == bytes_of


@pytest.mark.parametrize(
    ("dtype", "sync", "expected"),
    [
        (torch.float32, 0, {"weights": 1000 + 4 * 50, "optimizer": 8 * 50}),
        (torch.float64, 0, {"weights": 1000 + 8 * 50, "optimizer": 16 * 50}),
        (torch.bfloat16, 5, {"weights": 1000 + 4 * 50, "optimizer": 8 * 50, "reference": 4 * 50}),
    ],
)
def test_with_adapters_the_base_is_there_once(dtype, sync, expected):
    """1000 bytes of it, and 50 numbers of adapters in two tensors."""
    work = workload(dtype, lora=LoraSettings(lora_rank=2), reference_sync=sync)
    if dtype == torch.bfloat16:  # the sampler has a head of its own
        size = work.target.vocab_size * work.target.model_config.hidden_size
        expected = {**expected, "sampler's copy": 2 * size}
    assert resident_parts(work, 7, [20, 30], 1000) == expected


def test_moments_in_8_bits_are_a_quarter():
    """1000 numbers are too few; 10 000 have 40 blocks of a scale each, and two code books of 256."""
    work = workload(torch.float32, optimizer=OptimizerSettings(optimizer_kind="adamw8bit"))
    parts = resident_parts(work, 11_000, [1000, 10_000])
    assert parts["optimizer"] == 8 * 1000 + 2 * (10_000 + 4 * 40) + 2 * 4 * 256


def test_gradients_are_of_what_is_trained(monkeypatch):
    work = workload(lora=LoraSettings(lora_rank=2))
    monkeypatch.setattr(Tracer, "__init__", _few_trained)
    memory = make_memory(work, MONITOR, lambda: Budget(GB, "test"), overhead_bytes=0)
    for phase in ("learn", "update"):
        assert memory.footprint(phase, Shape(16, 50, 20)).parts["gradients"] == 4 * 300
    said = advice(work, "update", Tracer(work.phase_settings()))
    assert said == "a smaller --model saves more."  # there is no copy to do without


def _few_trained(self, settings: PhaseSettings) -> None:
    self._settings, self.num_parameters, self.trained_sizes = settings, PARAMETERS, [100, 200]
    self.frozen_bytes = 0


def test_a_reference_that_lives_elsewhere_is_no_part_of_it():
    assert "reference" not in resident_parts(replace(workload(), reference_here=False), 1000)


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt2", 2 * 2 * 32 * 4), ("llama", 2 * 2 * 2 * 8 * 4), ("qwen", 2 * 2 * 1 * 16 * 4)],
)
def test_keys_and_values_of_a_token(name: str, size: int):
    """2 · layers · heads that have keys · their width · bytes."""
    assert kv_bytes_per_token(workload(name=name).target.model_config, torch.float32) == size
    assert kv_bytes_per_token(workload(name=name).target.model_config, torch.bfloat16) == size // 2


def test_scratch_space_is_for_bf16_and_for_cards(monkeypatch):
    cpu, card = torch.device("cpu"), torch.device("cuda")

    def scratch(phase: str, dtype: torch.dtype, device: torch.device, width: int = 96) -> int:
        return scratch_bytes(phase, Target(GPT2Config(n_embd=width), device, dtype, "sdpa"))

    assert scratch("learn", torch.float32, cpu) == scratch("learn", torch.float64, cpu) == 0
    assert scratch("learn", torch.float32, card) == SCRATCH_BYTES
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert scratch("sample", torch.bfloat16, cpu) == SCRATCH_BYTES
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert 97_000 < scratch("sample split", torch.bfloat16, cpu) < 300_000  # measured; a group has 314,000
    assert 765_000 < scratch("learn split", torch.bfloat16, cpu) < 1_000_000
    assert scratch("learn", torch.bfloat16, cpu, width=768) == SCRATCH_BYTES


def on_card(dtype: torch.dtype, *, grows_segments: bool = True, **shape: int) -> Target:
    return Target(GPT2Config(**shape), torch.device("cuda"), dtype, "sdpa", grows_segments)


def test_attention_with_a_mask_has_a_workspace_on_cards_in_bf16():
    """A block of 64 x 64 in fp32 for each 64 queries of each row and head: 16 KB; wider heads have more."""

    def held(target: Target, shape: Shape) -> dict[str, int]:
        return dict(attention_workspace(dataclasses.replace(workload(), target=target), shape))

    shape = Shape(64, 60, 144)  # 143 queries
    assert held(on_card(torch.bfloat16, n_head=12, n_embd=768), shape) == {
        "attention's workspace": 64 * 12 * 3 * 16 * 2**10
    }
    wide = held(on_card(torch.bfloat16, n_head=6, n_embd=768), shape)
    assert wide == {"attention's workspace": 64 * 6 * 3 * 32 * 2**10}
    assert held(on_card(torch.float32), shape) == held(workload(torch.bfloat16).target, shape) == {}
    target = on_card(torch.bfloat16)
    work = dataclasses.replace(workload(), target=target)
    memory = make_memory(work, MONITOR, lambda: Budget(GB, ""), overhead_bytes=0)
    assert memory.footprint("learn", shape).parts["attention's workspace"] == 64 * 12 * 3 * 16 * 2**10


def test_weights_that_stay_gathered_are_part_of_sampling():
    shape = Shape(16, 50, 20)
    layer_by_layer, at_once = (
        make_memory(work, MONITOR, lambda: Budget(GB, ""), overhead_bytes=0).footprint("sample", shape)
        for work in (workload(), dataclasses.replace(workload(), stays_gathered=True))
    )
    assert at_once.parts["gathered weights"] == 4 * PARAMETERS
    assert at_once.peak_bytes == layer_by_layer.peak_bytes + 4 * PARAMETERS


def test_what_cudas_allocator_takes_for_a_tensor():
    mib = 2**20
    growing, fixed = (on_card(torch.float32, grows_segments=grows) for grows in (True, False))
    assert [growing.block_bytes(size) for size in (1, 513, 11 * mib + 1)] == [512, 1024, 11 * mib + 512]
    assert [fixed.block_bytes(size) for size in (1, 513, 9 * mib + 1)] == [512, 1024, 9 * mib + 512]
    assert fixed.block_bytes(11 * mib) == 12 * mib  # the MiB that is left is not cut off
    assert fixed.block_bytes(11 * mib - 512) == 11 * mib - 512
    assert workload().target.block_bytes(513) == 513


def test_what_a_phase_consists_of():
    memory = make_memory(workload(), MONITOR, lambda: Budget(GB, "test"), overhead_bytes=7)
    fixed = {
        "weights": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "reference": 4 * PARAMETERS,
        "not torch": 7,
        KEPT: 0,
    }
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
    few = shape._replace(scored_tokens=100)  # most completions ended early
    assert added("score", few)["logits"] == 100 * VOCABULARY * 8
    gradients = 4 * PARAMETERS
    rest = all_rows + 100 * 2**20 - gradients - logits  # on a CPU gradients are there from the start
    assert added("learn") == {"gradients": gradients, "logits": logits, "activations": rest}
    assert added("update") == {"gradients": gradients, "activations": 0}
    many = Shape(64, 50, 20)  # more tokens than the head takes at once
    assert added("learn", many)["logits"] == 1024 * VOCABULARY * 8


@pytest.mark.parametrize(
    ("settings", "scores"),
    [({}, True), ({"loss": WITHOUT_KL}, False), ({"loss": WITHOUT_KL, "num_iterations": 2}, True)],
)
def test_scoring_is_planned_where_it_is_done(settings: dict, scores: bool):
    memory = make_memory(workload(**settings), MONITOR, lambda: Budget(GB, ""), overhead_bytes=0)
    assert ("score" in memory.phases) == scores


# ------------------------------------------------------------------------------------- planning

RESIDENT = 16 * PARAMETERS


def budget_for(rows: int, extra: int = 0, **settings: object) -> Budget:
    """What `rows` at once need at first, with the stated error."""
    memory = make_memory(workload(**settings), MONITOR, lambda: Budget(GB, ""), overhead_bytes=0)
    needed = memory.footprint("learn", Shape(rows, 50, 20), rows).upper_bytes
    return Budget(int(needed) + 1 + extra, "test")


def test_the_precision_that_fits_is_found(monkeypatch):
    """bf16 holds half a row's bytes, and its kernels. A group of 8 takes 8 x 70 MB, or half that."""
    monkeypatch.setattr(MemoryMonitor, "in_use_bytes", lambda self: 0)
    monkeypatch.setattr("grpo.plan.workload.STARTED_BYTES", 0)
    exact, lower = workload(), workload(torch.bfloat16)

    def exact_is_better(room: float) -> bool:
        return fits_better(lower, exact, MONITOR, Budget(RESIDENT + int(room * 2**20), "test"))

    monkeypatch.setattr("grpo.plan.workload.KEPT_KERNELS", 32)
    assert not exact_is_better(1000)  # both hold a group
    assert not exact_is_better(500)  # bf16 alone does
    assert exact_is_better(250)  # neither does: parts of a group are slow in bf16
    monkeypatch.setattr("grpo.plan.workload.KEPT_KERNELS", 3000)
    assert exact_is_better(1000)  # fp32 alone does
    assert exact_is_better(1)  # neither holds a row: fp32 needs less
    monkeypatch.setattr("grpo.plan.workload.KEPT_KERNELS", 0)
    assert not exact_is_better(1)  # bf16 needs less


def test_compiled_kernels_are_part_of_it_in_bf16_on_a_cpu():
    def kernels(work: Workload, compiled_bytes: int = 0) -> float | None:
        memory = make_memory(
            work, MONITOR, lambda: Budget(GB, ""), overhead_bytes=0, compiled_bytes=compiled_bytes
        )
        return memory.footprint("update", Shape(8, 0, 0)).parts.get("compiled kernels")

    all_of_them = kernels(workload(torch.bfloat16))
    assert all_of_them is not None and 8 * 2**20 < all_of_them < 64 * 2**20
    assert kernels(workload(torch.bfloat16), 10**6) == all_of_them - 10**6  # part of what is not torch's
    assert kernels(workload(torch.bfloat16), 10**9) == 0
    assert kernels(workload()) is None


def test_rows_are_planned_for_the_longest_prompt_and_full_completions():
    budget = budget_for(64)
    _, memory = plan_memory(workload(), MONITOR, lambda: budget, overhead_bytes=0)
    assert {phase: plan.rows for phase, plan in memory.plan.items()} == dict.fromkeys(
        ("sample", "score", "learn", "update"), 64
    )
    tight = budget_for(64, extra=-10)
    _, memory = plan_memory(workload(), MONITOR, lambda: tight, overhead_bytes=0)
    assert [memory.plan[phase].rows for phase in ("sample", "score", "learn")] == [64, 64, 32]


def test_rows_the_user_fixed_are_kept_phase_by_phase():
    work = workload(rollout_rows=32, score_rows=16, train_rows=4)
    _, memory = plan_memory(work, MONITOR, lambda: Budget(100 * GB, ""), overhead_bytes=0)
    assert [memory.plan[phase].rows for phase in ("sample", "score", "learn")] == [32, 16, 4]


@pytest.mark.parametrize("groups", [1, 2, 5, 11, 32])
@pytest.mark.parametrize("extra", [0, -10])
def test_the_batch_that_is_found_is_that_of_brute_force(groups: int, extra: int):
    budget = budget_for(groups * G, extra)
    work = workload(batch_size="auto", max_batch_size=150)
    memory = make_memory(work, MONITOR, lambda: budget, overhead_bytes=0)

    def whole(size: int) -> bool:
        return all(
            memory.footprint(phase, Shape(size, 50, 20), size).upper_bytes <= budget.usable_bytes
            for phase in memory.phases
        )

    expected = max((size for size in range(G, 151, G) if whole(size)), default=0)
    if expected:
        assert find_batch_size(memory, work, budget) == expected
        found, planned = plan_memory(work, MONITOR, lambda: budget, overhead_bytes=0)
        assert found.config.batch_size == expected
        assert {plan.rows for plan in planned.plan.values()} == {expected}
    else:
        with pytest.raises(SettingsError, match="does not hold one group of 8 at once in"):
            find_batch_size(memory, work, budget)


def test_the_batch_of_several_processes_is_what_the_one_that_holds_least_does_of_it():
    work = dataclasses.replace(workload(batch_size="auto", max_batch_size=200), processes=3)
    asked = []

    def agree(rows: int) -> int:
        asked.append(rows)
        return 2 * G  # there is one with less room

    found, planned = plan_memory(work, MONITOR, lambda: Budget(100 * GB, ""), overhead_bytes=0, agree=agree)
    assert asked == [8 * G] and found.config.batch_size == 6 * G
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
    for rows in (64, 32, 8, 2, 1):
        enough = budget_for(rows, gradient_checkpointing="none").usable_bytes
        assert checkpointing_of(workload(), enough) == ("none", rows)
    assert not logged
    scarce = RESIDENT + 50 * 2**20  # one row takes 70 MB, or half of that
    assert checkpointing_of(workload(), scarce) == ("full", 1)
    assert "INFO gradient checkpointing is full: not one row would learn otherwise" in logged
    assert checkpointing_of(on_a_card(), scarce)[0] == "full"
    for chosen in ("none", "selective", "full"):
        assert checkpointing_of(workload(gradient_checkpointing=chosen), 2 * enough)[0] == chosen
    with pytest.raises(DoesNotFit, match=r"learn does not fit: one row .*checkpointing full saves"):
        checkpointing_of(workload(), RESIDENT + 20 * 2**20)
    with pytest.raises(DoesNotFit, match="learn does not fit: one row"):
        checkpointing_of(workload(shard=True), scarce)  # other processes may have more
    monkeypatch.setattr("grpo.plan.build.PhaseTracer", WithoutLayers)
    with pytest.raises(DoesNotFit, match="learn does not fit: one row"):
        checkpointing_of(workload(), scarce)


def test_a_wrong_prediction_can_be_asked_for():
    _, memory = plan_memory(workload(), MONITOR, lambda: Budget(100 * GB, ""), overhead_bytes=0, bias=0.6)
    added = memory.plan["score"].footprint.peak_bytes - RESIDENT
    assert added == pytest.approx(0.6 * 64 * 70 * 2**20)


def test_the_longest_prompt_is_the_one_of_most_tokens(tokenizer):
    """Not always the one of most characters, and of all lanes."""
    words, digits = "e" * 90, " ".join("1234567890" * 4)
    lanes = {
        task: MemoryLane([Prompt(f"{task}:{i}", text, {}) for i, text in enumerate(texts)], seed=0, task=task)
        for task, texts in {"policy": [words, "a"], "environment": [digits, "b"]}.items()
    }
    source = PromptSource(dict(lanes), [], seed=0, policy_share=0.5, rows_digest="")
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (words, digits)]
    assert longest_prompt(source, tokenizer, Config()) == max(counts)
    nothing = PromptSource({}, [], seed=0, policy_share=0.5, rows_digest="")
    assert longest_prompt(nothing, tokenizer, Config()) == 144  # nothing is known: as long as completions
    assert LONGEST_TEXTS >= 16


# ------------------------------------------------------------------------------------- advice


def test_advice_says_what_each_setting_would_save():
    """One row of 50 + 20 tokens, 1 MB each; 10 million parameters."""
    work = workload()
    assert advice(work, "learn", Tracer(work.phase_settings())) == (
        "--max-new-tokens 10 saves 10 MB; --gradient-checkpointing full saves 35 MB; "
        "--kl-coef 0 saves 38 MB; --lora-rank 16 saves 0.11 GB; "
        "--precision bf16 saves 35 MB; a smaller --model saves more."
    )
    adapters = LoraSettings(lora_rank=16)
    work = workload(torch.bfloat16, gradient_checkpointing="full", loss=WITHOUT_KL, lora=adapters)
    said = advice(work, "learn", Tracer(work.phase_settings()))
    assert said == "--max-new-tokens 10 saves 2 MB; a smaller --model saves more."
    assert "checkpointing" not in advice(workload(), "sample", Tracer(workload().phase_settings()))
    assert "--kl-coef 0, or --reference-device cpu saves 38 MB" in advice(
        on_a_card(), "update", Tracer(on_a_card().phase_settings())
    )


def test_what_a_model_cannot_do_is_not_advised(monkeypatch):
    def peak(tracer: Tracer, phase: str, shape: Shape) -> float:
        if tracer._settings.checkpointing == "full":
            raise ValueError("CTRLLMHeadModel does not say which of its layers can be recomputed")
        return 2**20 * shape.rows * (shape.prompt_tokens + shape.new_tokens)

    monkeypatch.setattr(Tracer, "_peak", peak)
    said = advice(workload(), "learn", Tracer(workload().phase_settings()))
    assert said.startswith("--max-new-tokens 10 saves 10 MB; --kl-coef 0 saves 38 MB; ")


def test_advice_says_where_all_of_it_is_not_enough():
    work = workload(loss=WITHOUT_KL, lora=LoraSettings(lora_rank=16))
    tracer = Tracer(work.phase_settings())  # 10 MB by shorter texts, 35 by checkpointing, 35 by bf16
    assert advice(work, "learn", tracer, 79 * 2**20).endswith("a smaller --model saves more.")
    assert advice(work, "learn", tracer, 81 * 2**20).endswith("it is not enough: 81 MB are missing.")


def test_what_nothing_of_a_rows_length_helps_has_advice_too():
    """The optimizer's step: only what exists all along can be less."""
    work = workload()
    said = advice(work, "update", Tracer(work.phase_settings()))
    assert said == ("--kl-coef 0 saves 38 MB; --lora-rank 16 saves 0.11 GB; a smaller --model saves more.")


def test_when_one_row_does_not_fit_phase_needs_and_advice_are_named():
    with pytest.raises(DoesNotFit) as error:
        plan_memory(workload(), MONITOR, lambda: Budget(RESIDENT, "--memory-limit"), overhead_bytes=2**20)
    said = str(error.value)
    assert said.startswith("sample does not fit: one row needs 0.2")
    assert "(--memory-limit)" in said and "--max-new-tokens 10 saves 10 MB; --kl-coef 0" in said
    least = re.search(r"--memory-limit has to be at least ([\d.]+GB)\.$", said)
    assert least is not None
    enough = Budget(parse_size(least[1]), "--memory-limit")
    plan_memory(workload(), MONITOR, lambda: enough, overhead_bytes=2**20)


# ------------------------------------------------------------------------------------- tables


def printed(table: Table) -> dict[str, list[str]]:
    """Cells by the first one of their row; the title, without a name."""
    console = Console(file=StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, StringIO)
    title, _, table_lines = console.file.getvalue().partition("┏")
    lines = table_lines.replace("┃", "│").splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return {"": [" ".join(title.split())], **{row[0]: row[1:] for row in rows if len(row) > 1}}


def test_the_table_of_the_plan():
    sampling = Footprint({"weights": 0.5 * GB, "not torch": 0.25 * GB, "KV cache": GB}, 0.1 * GB)
    learning = Footprint({"weights": 0.5 * GB, "activations": 2 * GB, "not torch": 0.25 * GB})
    plans = {"sample": PhasePlan(64, sampling), "learn": PhasePlan(16, learning)}
    worst = {phase: plan.footprint for phase, plan in plans.items()}
    expected = {"sample": Footprint({"weights": GB}, GB / 4), "learn": Footprint({"weights": GB / 2}, 0)}
    rows = printed(plan_table(plans, Budget(4 * GB, "85% of 4.70 GB"), worst, expected))
    assert rows[""] == ["Memory planned; budget 4.00 GB (85% of 4.70 GB)"]
    assert rows["in GB"] == ["sample", "learn"] and rows["rows at once"] == ["64", "16"]
    assert rows["weights"] == ["0.500", "0.500"]
    assert rows["KV cache"] == ["1.000", ""] and rows["activations"] == ["", "2.000"]
    assert list(rows).index("not torch") > list(rows).index("activations")
    assert rows["worst case"] == ["1.750", "2.750"] and rows["expected"] == ["1.000", "0.500"]
    assert rows["give or take"] == ["0.250", "0.000"]
    assert printed(plan_table(plans, Budget(GB, ""), worst))["give or take"] == ["0.100", "0.000"]
    assert rows["headroom"] == ["2.25, 56%", "1.25, 31%"]


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
    assert printed(measured_table([], Budget(GB, ""))).keys() == {"", "peak of"}
