"""The plan of a run with its weights or without: against brute force, what is auto, refusals and tables."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import ARCHITECTURES
from real_phases import RealPhases, Setting
from rich.table import Table
from test_workload import BF16, VOCABULARY, WITHOUT_KL, G, workload
from torch import nn

from grpo.config import SettingsError
from grpo.config.sizes import parse_size
from grpo.memory import AbsentCard, Budget, DoesNotFit, Fit, Pass, PassSize, largest_rows
from grpo.memory.budget import GB, DeviceMemory
from grpo.memory.device import Peak
from grpo.memory.live import LiveBytes
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.tables import ELSE, Measured, Plan, plan_of, plan_table
from grpo.plan.trace import TracedPhases
from grpo.plan.warm_up import plan_without_weights, warm_up
from grpo.plan.workload import Workload

MIB, PARAMETERS = 2**20, 10_000_000
RESIDENT, GRADIENTS = 16 * PARAMETERS, 4 * PARAMETERS
OUTSIDE = 5 * MIB


class Traced:
    """Stands in for traces: 1 MB a token of each row; halved by checkpointing, and by bf16."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        model = nn.Linear(PARAMETERS, 1, bias=False, device="meta")
        model.get_output_embeddings = lambda: None  # type: ignore[assignment]
        self.phases = PhaseProbe(work, model, model)  # type: ignore[arg-type]

    def added_bytes(self, phase: str, size: PassSize) -> int:
        of_token = MIB * self.work.target.dtype.itemsize / 4
        of_token /= 2 if self.work.checkpointing == "full" else 1
        fixed = GRADIENTS if phase == "learn" else 0
        return int(fixed + size.rows * (size.prompt_tokens + size.completion_tokens) * of_token)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    def stand_in(kind: type) -> None:
        for module in "warm_up", "advice":
            monkeypatch.setattr(f"grpo.plan.{module}.TracedPhases", kind)

    stand_in(Traced)
    return stand_in


def card_of(room: float, **options: float) -> AbsentCard:
    """With so much beside what the process and the model of `Traced` hold."""
    total = int(room) + RESIDENT + OUTSIDE
    card = AbsentCard(DeviceMemory(total, total, 0), **{"utilization": 1.0, **options})  # type: ignore[arg-type]
    card.held_bytes = OUTSIDE
    return card


def rows_of(plan: Plan) -> list[int]:
    return [size.rows for size in plan.sizes.values()]


# ------------------------------------------------------------------- real passes and traced ones


class Counted(AbsentCard):
    """On which passes are made."""

    @contextmanager
    def measure(self, *, exact: bool = False) -> Iterator[Peak]:
        with LiveBytes() as live:
            peak = Peak()
            yield peak
        peak.added_bytes = live.peak_bytes


def test_planned_rows_are_those_of_brute_force_over_traces_and_real_passes_plan_the_same(monkeypatch):
    """On cards of many sizes. What was traced once is remembered for all."""
    config = ARCHITECTURES["gpt2"](VOCABULARY).config
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    setting = Setting("gpt2", config, kl=False, group_size=4)
    work = setting.workload(PassSize(32, 16, 24))
    traced = TracedPhases(work)
    resident = sum(traced.phases.resident().values())
    monkeypatch.setattr("grpo.plan.warm_up.TracedPhases", lambda work: traced)
    real = RealPhases(setting)
    real.work = work

    def most(phase: str, room: int) -> int | None:
        def fits(rows: int) -> bool:
            return traced.added_bytes(phase, work.size(rows, phase)) <= room

        return largest_rows(fits, batch_size=32, group_size=4)

    def planned_by_passes(card: AbsentCard) -> dict[str, int]:
        fit = Fit(card, group_size=4)

        def pass_at(phase: str, size: PassSize) -> bool:
            fit.run(phase, lambda rows: real.run(phase, size._replace(rows=rows)), size, is_warmup=True)
            return True

        warm_up(fit, work, pass_at)
        return fit.planned()

    for rows in (1, 2, 4, 12, 20, 32):
        needed = traced.added_bytes("learn", work.size(rows))
        room = int(1.01 * needed + 0.2 * traced.added_bytes("learn", work.size(1)))
        memory = DeviceMemory(room + resident, 0, room + resident)
        _, plan = plan_without_weights(work, AbsentCard(memory, utilization=1.0))
        for phase, size in plan.sizes.items():
            largest = most(phase, room)
            assert largest is not None and size.rows <= largest, (rows, phase)
            assert math.ceil(32 / size.rows) == math.ceil(32 / largest), (rows, phase)
        card = Counted(memory, utilization=1.0)
        card.held_bytes = resident
        assert planned_by_passes(card) == dict(zip(plan.sizes, rows_of(plan), strict=True))


def test_a_warm_up_asks_for_a_group_twice_as_many_and_four_times_as_many_until_the_batch_is_seen():
    def asked(batch: int = 256, at_most: int = 10**6, **settings: object) -> list[int]:
        fit, seen = Fit(card_of(GB), group_size=G), list[int]()
        work = workload(batch_size=batch, **WITHOUT_KL, **settings)

        def pass_at(phase: str, size: PassSize) -> bool:
            if phase == "learn":
                assert size.completion_tokens == (10 if size.rows in seen else 20)
                seen.append(size.rows)
            fit.see(phase, size, 1000.0 * size.rows)
            return size.rows < at_most

        fit.fixed = work.fixed_rows
        warm_up(fit, work, pass_at)
        return seen

    assert asked() == [8, 16, 64, 256] and asked(batch=8) == [8, 8]  # the second of half the tokens
    assert asked(train_rows=4) == [4, 4] and asked(train_rows=32) == [8, 16, 32]
    assert asked(at_most=16) == [8, 16, 8]  # a larger pass is not to be had


# --------------------------------------------------------------------------------- what is auto


@pytest.mark.usefixtures("made_up")
def test_rows_are_planned_for_the_longest_texts_or_as_the_user_fixed_them():
    """70 MB a row, and 40 million numbers' gradients."""
    for settings, room, rows in (
        ({}, 64.5 * 70 * MIB + GRADIENTS, [64, 64, 64]),
        ({}, 63.8 * 70 * MIB + GRADIENTS, [64, 64, 32]),
        ({"rollout_rows": 32, "score_rows": 16, "train_rows": 4}, 100 * GB, [32, 16, 4]),
        ({"rollout_rows": 64}, 9 * 70 * MIB + GRADIENTS, [8, 8, 8]),
    ):
        work = workload(gradient_checkpointing="none", **settings)
        _, plan = plan_without_weights(work, card_of(room))
        assert [*plan.sizes] == ["sample", "score", "learn"] and rows_of(plan) == rows, settings
        assert {size[1:3] for size in plan.sizes.values()} == {(20, 50)}
    # A host keeps gaps between tensors.
    whole = workload(gradient_checkpointing="none")
    _, plan = plan_without_weights(whole, card_of(64.5 * 70 * MIB + GRADIENTS, slack=0.1))
    assert rows_of(plan) == [32, 32, 32]


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("groups", [0.5, 1.1, 2.1, 5.1, 17.9, 32])
def test_the_batch_that_is_found_is_that_of_brute_force(groups: float):
    work = workload(batch_size="auto", max_batch_size=150, gradient_checkpointing="none")
    room = groups * G * 70 * MIB + GRADIENTS
    traced = Traced(work)
    needed = {size: traced.added_bytes("learn", work.size(size)) for size in range(G, 151, G)}
    expected = max((size for size, most in needed.items() if most <= room), default=0)
    if not expected:
        with pytest.raises(SettingsError, match=r"does not hold one group of 8 at once in .*--batch-size 8"):
            plan_without_weights(work, card_of(room))
        return
    for processes, each in (1, expected), (3, min(expected, 48)):
        found, plan = plan_without_weights(replace(work, processes=processes), card_of(room))
        assert found.config.batch_size == processes * each and set(rows_of(plan)) == {each}


class WithoutLayers(Traced):
    """Plans for a model that cannot be recomputed layer by layer."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        if work.checkpointing == "full":
            raise ValueError("does not say which of its layers can be recomputed")


def test_layers_are_recomputed_where_few_rows_would_learn_otherwise(made_up, logged):
    def settled(room: float, **settings: object) -> tuple[str, int]:
        work, plan = plan_without_weights(workload(**{**WITHOUT_KL, **settings}), card_of(room))
        return work.config.gradient_checkpointing, plan.sizes["learn"].rows

    made_up(type("Learning", (Traced,), {"added_bytes": only_learning}))
    assert settled(GRADIENTS + 64.3 * 70 * MIB) == ("none", 64)
    long = {"max_new_tokens": 1000}  # of which a row makes a full pass
    assert settled(GRADIENTS + 1.3 * 1050 * MIB, **long) == ("none", 1)
    assert settled(GRADIENTS + 2.3 * 70 * MIB, train_rows=2) == ("none", 2)  # as many as are wanted
    assert not [line for line in logged if "checkpointing" in line]
    for rows in 2, 1:
        assert settled(GRADIENTS + (rows + 0.3) * 70 * MIB) == ("full", 2 * rows)
    assert "INFO gradient checkpointing is full: 4 rows learn at once, instead of 2" in logged
    made_up(type("NoLess", (Traced,), {"added_bytes": no_less_recomputed}))
    assert settled(GRADIENTS + 2.3 * 70 * MIB) == ("none", 2)
    made_up(type("Learning", (Traced,), {"added_bytes": only_learning}))
    auto = {"batch_size": "auto", "max_batch_size": 64}
    assert settled(GRADIENTS + 8.3 * 70 * MIB, **auto) == ("none", 8)
    assert settled(GRADIENTS + 4.3 * 70 * MIB, **auto) == ("full", 8)
    made_up(type("Learning", (WithoutLayers,), {"added_bytes": only_learning}))
    assert settled(GRADIENTS + 1.3 * 70 * MIB) == ("none", 1)
    scarce = GRADIENTS + 50 * MIB - 4 * PARAMETERS  # there is no reference
    made_up(type("Learning", (Traced,), {"added_bytes": only_learning}))
    assert settled(scarce) == ("full", 1)  # one row takes 70 MB, or half of that
    assert "INFO gradient checkpointing is full: 1 rows learn at once, instead of 0" in logged
    assert settled(GB, gradient_checkpointing="full")[0] == "full"
    with pytest.raises(DoesNotFit, match=r"learn does not fit: one row .*checkpointing full saves"):
        settled(scarce - 30 * MIB)
    made_up(type("Learning", (WithoutLayers,), {"added_bytes": only_learning}))
    with pytest.raises(DoesNotFit, match="learn does not fit: one row"):
        settled(scarce)


def no_less_recomputed(traced: Traced, phase: str, size: PassSize) -> int:
    plain = Traced(traced.work.with_settings(gradient_checkpointing="none"))
    return only_learning(plain, phase, size)


def only_learning(traced: Traced, phase: str, size: PassSize) -> int:
    """Other phases take nothing to speak of."""
    return Traced.added_bytes(traced, phase, size) if phase == "learn" else MIB


# ------------------------------------------------------------------------------------- refusals


def refusal(work: Workload, room: float, **options: float) -> str:
    with pytest.raises(DoesNotFit) as error:
        plan_without_weights(work, card_of(room, **options))
    return str(error.value)


def savings(said: str) -> dict[str, str]:
    return dict(re.findall(r"(--[^;.]+?) saves ([^;]+);", said))


@pytest.mark.usefixtures("made_up")
def test_a_refusal_names_phase_needs_and_remedies_and_with_the_least_that_it_says_there_is_a_plan():
    """One row of 50 + 20 tokens, 1 MB each; 10 million parameters."""
    exact = {"gradient_checkpointing": "none"}
    said = refusal(workload(**exact), 50 * MIB)
    assert re.match(r"learn does not fit: one row needs 0.11 GB .*gradients 38 MB.* beside the 0.15 GB", said)
    assert savings(said) == {
        "--max-new-tokens 10": "10 MB",
        "--gradient-checkpointing full": "most of the activations",
        "--kl-coef 0": "38 MB",
        "--lora-rank 16": "0.11 GB",
        "--precision bf16": "half of the activations",
    }
    (least,) = re.findall(r"As it is, ([\d.]+) GB have to be there\.$", said)
    for enough in (True, False):
        total = int(float(least) * GB) - (0 if enough else 80 * MIB)
        card = AbsentCard(DeviceMemory(total, total, 0), utilization=1.0)
        card.held_bytes = OUTSIDE
        if enough:
            assert rows_of(plan_without_weights(workload(**exact), card)[1])[2] == 2
        else:
            with pytest.raises(DoesNotFit):
                plan_without_weights(workload(**exact), card)
    said = refusal(workload(**exact), GB, limit_bytes=200 * MIB)
    (limit,) = re.findall(r"--memory-limit has to be at least ([\d.]+GB)\.$", said)
    plan_without_weights(workload(**exact), card_of(GB, limit_bytes=parse_size(limit)))
    assert "of which 50% are used (--memory-utilization)" in refusal(
        workload(**exact), 200 * MIB, utilization=0.5
    )


@pytest.mark.usefixtures("made_up")
def test_only_what_can_be_done_is_advised():
    adapters = {"lora_rank": 16, **WITHOUT_KL}
    said = refusal(workload(BF16, gradient_checkpointing="full", **adapters), 5 * MIB)
    assert savings(said) == {"--max-new-tokens 10": "2 MB", "--load-in-4bit": "most of 38 MB"}
    work = workload(gradient_checkpointing="none")
    card = replace(work, target=replace(work.target, device=torch.device("cuda")))
    assert "--kl-coef 0, or --reference-device cpu" in savings(refusal(card, 50 * MIB))
    assert "alone take 0.15 GB" in refusal(work, 0)  # nothing but a smaller model helps


# ------------------------------------------------------------------------------------- tables


def printed(table: Table) -> dict[str, list[str]]:
    """Cells by the first one of their row."""
    cells = ([column.header, *column.cells] for column in table.columns)
    return {str(first): rest for first, *rest in zip(*cells, strict=True)}


def test_the_table_of_the_plan():
    parts = {
        "sample": {"weights": 0.5 * GB, ELSE: 0.25 * GB, "KV cache": GB},
        "learn": {"weights": 0.5 * GB, "activations": 2 * GB, ELSE: 0.25 * GB},
    }
    plan = Plan({"sample": PassSize(64), "learn": PassSize(16)}, parts, Budget(4 * GB, "85% of 4.70 GB"))
    table = plan_table(plan)
    rows = printed(table)
    assert table.title == "Memory planned; budget 4.00 GB (85% of 4.70 GB)"
    assert rows == {
        "in GB": ["sample", "learn"],
        "rows at once": ["64", "16"],
        "weights": ["0.500", "0.500"],
        "KV cache": ["1.000", ""],
        "activations": ["", "2.000"],
        ELSE: ["0.250", "0.250"],
        "peak": ["1.750", "2.750"],
        "budget": ["4.000", "4.000"],
        "headroom": ["2.25, 56%", "1.25, 31%"],
    }
    assert list(rows).index(ELSE) > list(rows).index("activations")


@pytest.mark.usefixtures("made_up")
def test_a_plan_says_what_a_phase_consists_of_and_no_part_is_more_than_the_whole():
    _, plan = plan_without_weights(workload(), card_of(100 * GB))
    for phase, parts in plan.parts.items():
        added = Traced(workload()).added_bytes(phase, PassSize(64, 20, 50))
        assert sum(parts.values()) == pytest.approx(RESIDENT + OUTSIDE + added, rel=0.01)
        assert parts["weights"] == parts["reference"] == 4 * PARAMETERS and parts[ELSE] == OUTSIDE
    assert plan.parts["learn"]["gradients"] == GRADIENTS and plan.parts["sample"]["KV cache"] > 0
    fit = Fit(card_of(GB), group_size=G)
    fit.see("learn", PassSize(64, 20, 50), GRADIENTS / 2)  # closed forms are upper bounds
    fit.plan("learn", PassSize(64, 20, 50))
    parts = plan_of(fit, Traced(workload()).phases).parts["learn"]
    assert parts["gradients"] < GRADIENTS / 2 and parts["activations"] < 10


def test_what_was_said_before_a_run_is_compared_with_what_was_measured():
    measured = Measured()

    def made(phase: str, rows: int, gb: float, reason: str | None = None, retries: int = 0) -> Pass:
        predicted = None if phase == "evaluate" else int(0.64 * GB)
        return Pass(phase, rows, 20, predicted, int(gb * GB), 3 * GB, 1.5, retries, reason, [])

    measured.note([made("sample", 64, 0.8), made("learn", 64, 0.5, retries=2)])
    measured.note([made("learn", 32, 0.4, "64 -> 32: memory ran out", 1), made("evaluate", 5, 0.1)])
    table = measured.table(Budget(4 * GB, "test"))
    rows = printed(table)
    assert rows["phase"] == ["rows", "predicted", "measured", "off by", "process", "s", "retries"]
    assert rows["sample"] == ["64", "0.640", "0.800", "-20.0%", "3.00", "1.50", "0"]
    assert rows["learn"] == ["64", "0.640", "0.500", "+28.0%", "3.00", "1.50", "3"]
    assert rows["evaluate"] == ["5", "", "0.100", "", "3.00", "1.50", "0"]
    assert "learn 64 -> 32: memory ran out" in str(table.caption) and "4.00 GB (test)" in str(table.title)
    assert Measured().table(Budget(GB, "")).row_count == 0
