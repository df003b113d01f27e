"""Traces on fake tensors say what the real phases allocate; their cache is an aid and never in the way."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.real_phases import RealPhases, Setting
from conftest import ARCHITECTURES
from transformers import PretrainedConfig

from grpo.config.groups import LoraSettings, OptimizerSettings, SamplingSettings
from grpo.learning.loss import LossSettings
from grpo.learning.optimizer import make_optimizer
from grpo.memory import Shape, peak_live_bytes
from grpo.memory.fit import PhaseFit
from grpo.memory.live import LiveBytes
from grpo.plan.trace import PHASES, PhaseSettings, PhaseTracer
from grpo.plan.trace.fake import FakePhases
from grpo.plan.trace.quick import PlainFakeMode
from grpo.plan.workload import resident_parts

G, VOCABULARY = 4, 96
SHAPE = Shape(4 * G, 40, 24)
LORA = LoraSettings(lora_rank=8)


def shape_of(name: str) -> PretrainedConfig:
    config = ARCHITECTURES[name](VOCABULARY).config
    for key in vars(config):
        if key.endswith(("_pdrop", "dropout")):
            setattr(config, key, 0.0)
    return config


def settings_of(setting: Setting) -> PhaseSettings:
    return PhaseSettings(
        setting.target, setting.group_size,
        SamplingSettings(max_new_tokens=24), LossSettings(kl_coef=0.02 if setting.kl else 0.0),
        setting.checkpointing, lora=setting.lora,
    )  # fmt: skip


def on(settings: PhaseSettings, device_type: str) -> PhaseSettings:
    """The same on another device; attention is torch's own on all but the CPU."""
    target = replace(settings.target, device=torch.device(device_type), attention="sdpa")
    return replace(settings, target=target)


@pytest.fixture
def tracer(tmp_path: Path) -> Callable[..., PhaseTracer]:
    """tracer("gpt2", checkpointing="full"): with a cache of its own."""

    def made(name: str = "gpt2", **options: object) -> PhaseTracer:
        setting = Setting(name, shape_of(name), group_size=G)
        return PhaseTracer(settings_of(replace(setting, **options)), cache_folder=tmp_path)

    return made


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"checkpointing": "full"}),
        ("gpt2", {"checkpointing": "none"}),
        ("gpt2", {"compute_dtype": torch.bfloat16, "kl": False}),
        ("llama", {}),
        ("gpt2", {"lora": LORA}),
        ("llama", {"lora": LORA, "compute_dtype": torch.bfloat16}),
    ],
)
def test_a_trace_is_what_the_real_phase_allocates(tracer, name: str, options: dict):
    """Counted by the same meter: what differs is that nothing is computed."""
    real = RealPhases(replace(Setting(name, shape_of(name), group_size=G), **options))
    traces = tracer(name, **options)
    for phase in PHASES:
        work = real.prepare(phase, SHAPE)
        traced = traces.peak_bytes(phase, SHAPE)
        assert traced == pytest.approx(peak_live_bytes(work), rel=0.03), phase


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_whole_footprint_with_adapters(tracer, name: str):
    """Weights and moments, counted one by one, and what the phase adds: within 5 % of predicted."""
    setting = Setting(name, shape_of(name), group_size=G, lora=LORA)
    real, traces = RealPhases(setting), tracer(name, lora=LORA)
    optimizer = make_optimizer(real.model, OptimizerSettings())
    moments = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    resident = sum(parameter.nbytes for parameter in real.model.parameters()) + moments
    predicted = sum(
        resident_parts(
            setting.workload(SHAPE), traces.num_parameters, traces.trained_sizes, traces.frozen_bytes
        ).values()
    )
    assert predicted == pytest.approx(resident, rel=0.01)  # steps are counted in numbers of their own
    for phase in PHASES:
        measured = resident + peak_live_bytes(real.prepare(phase, SHAPE))
        assert predicted + traces.peak_bytes(phase, SHAPE) == pytest.approx(measured, rel=0.05), phase
    gradients = sum(each.grad.nbytes for each in real.model.parameters() if each.grad is not None)
    assert gradients == 4 * sum(traces.trained_sizes)


class Counting(PlainFakeMode):
    """With another mode around it that counts."""

    @contextmanager
    def counting(self, live: LiveBytes) -> Iterator[None]:
        with live:
            yield


@pytest.mark.parametrize(
    ("name", "options"), [("gpt2", {"compute_dtype": torch.bfloat16, "lora": LORA}), ("llama", {})]
)
def test_what_is_remembered_of_operations_is_what_torch_says(name: str, options: dict):
    """Each operation and the bytes held: with torch's own mode, and twice with ours, so that it remembers."""
    settings = settings_of(replace(Setting(name, shape_of(name), group_size=G), **options))
    quick, plain = FakePhases(settings), FakePhases(settings, Counting())
    for phase in ("sample split", "learn split"):
        expected = plain.trace(phase, SHAPE)
        assert quick.trace(phase, SHAPE) == expected and quick.trace(phase, SHAPE) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_formula_of_sampling_in_parts_is_the_trace(tracer, name: str):
    """At shapes that it was not fitted to, with one group joining, with eight, and longer texts."""
    traces = tracer(name)
    fit = traces.fit("sample split", Shape(G, 60, 120))
    for groups, prompt, new in ((2, 30, 20), (7, 40, 100), (20, 17, 40), (64, 100, 150)):
        shape = traces.rounded("sample split", Shape(groups * G, prompt, new))
        assert shape.joining_groups == max(1, groups // 8)
        assert fit(shape) == pytest.approx(traces.peak_bytes("sample split", shape), rel=0.002), shape


def test_part_of_a_group_is_traced_as_it_is_done(tracer):
    shape = SHAPE._replace(rows=2)
    work = RealPhases(Setting("gpt2", shape_of("gpt2"), group_size=G)).prepare("score", shape)
    assert tracer().peak_bytes("score", shape) == pytest.approx(peak_live_bytes(work), rel=0.02)


def test_what_costs_memory_shows(tracer, tmp_path: Path):
    plain, leaner = tracer(), tracer(checkpointing="full")
    peak = {phase: plain.peak_bytes(phase, SHAPE) for phase in PHASES}
    gradients = 4 * plain.num_parameters
    assert peak["sample"] <= peak["sample split"] < 1.2 * peak["sample"]
    assert peak["score"] < peak["learn"] - gradients / 2
    assert peak["learn split"] == peak["learn"]  # on a CPU gradients are there first
    settings = settings_of(Setting("gpt2", shape_of("gpt2"), group_size=G))
    card = PhaseTracer(on(settings, "cuda"), cache_folder=tmp_path)
    assert 0 < card.peak_bytes("learn split", SHAPE) - card.peak_bytes("learn", SHAPE) <= gradients
    assert leaner.peak_bytes("learn", SHAPE) < 0.8 * peak["learn"]
    longer = SHAPE._replace(new_tokens=72)
    assert plain.peak_bytes("sample", longer) > 1.05 * peak["sample"]


def test_a_recorded_token_holds_room_to_run_in():
    """As much as it takes to run, for as long as there are rows; other devices have no recorder."""
    settings = settings_of(Setting("gpt2", shape_of("gpt2"), group_size=G))
    shape = Shape(G, 64, 120)  # one group, so that none leaves; as wide as prompts are made for recordings

    def log(device_type: str) -> list[tuple[str, int]]:
        return FakePhases(on(settings, device_type)).trace("sample", shape)

    recorded, plain = log("cuda"), log("xpu")
    assert recorded[:-1] == plain and recorded[-1][0] == "aten.empty.memory_format"
    attention = next(place for place, (name, _) in enumerate(reversed(plain)) if "softmax" in name)
    assert recorded[-1][1] >= max(held for _, held in plain[-attention:])


def test_cuda_holds_more_of_norms_where_the_base_is_in_bf16(tmp_path: Path):
    """Its autocast takes them in fp32: with adapters, whose base is in bf16, that is more than comes in."""
    setting = Setting("gpt2", shape_of("gpt2"), torch.bfloat16, group_size=G, lora=LoraSettings(lora_rank=2))
    settings = settings_of(setting)
    values = SHAPE.rows * SHAPE.new_tokens * 32  # of one activation

    def peak(device_type: str) -> int:
        tracer = PhaseTracer(on(settings, device_type), cache_folder=tmp_path)
        return tracer.peak_bytes("learn", SHAPE)

    assert peak("cuda") - peak("xpu") > 5 * 2 * values


def test_an_unknown_phase_is_an_error(tracer):
    with pytest.raises(KeyError, match="dream"):
        tracer().trace("dream", SHAPE)


def test_the_fit_says_what_a_trace_says_of_shapes_it_never_saw(tracer):
    traces = tracer()
    fit = traces.fit("score", Shape(G, 60, 24))
    for shape in (Shape(6 * G, 45, 17), Shape(40 * G, 33, 24), Shape(G, 60, 24)):
        assert fit(shape) == pytest.approx(traces.peak_bytes("score", shape), rel=0.02)


# ---------------------------------------------------------------------------------------- the cache


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Shape]]]:
    """Stands in for the traces themselves, which take seconds; holds what was traced."""
    asked: list[tuple[str, Shape]] = []

    def trace(_: FakePhases, phase: str, shape: Shape) -> list[tuple[str, int]]:
        asked.append((phase, shape))
        return [("aten.mm.default", 1000 + 10 * shape.rows)]

    monkeypatch.setattr(FakePhases, "trace", trace)
    return asked


def fit_peak(fit: PhaseFit) -> float:
    return round(fit(Shape(7 * G, 33, 11)))


def test_each_shape_is_traced_once_by_run_and_by_machine(tracer, traced, tmp_path: Path):
    first = tracer()
    for _ in range(2):
        assert fit_peak(first.fit("learn", SHAPE)) == 1000 + 10 * 7 * G
    assert len(traced) == len(set(traced)) == 11
    (file,) = tmp_path.glob("*.json")
    assert fit_peak(tracer().fit("learn", SHAPE)) == 1000 + 10 * 7 * G
    assert len(traced) == 11
    tracer().fit("score", SHAPE)  # is not known yet, and joins what is
    assert len(traced) == 22 and len(json.loads(file.read_text())) == 22
    tracer().fit("learn", SHAPE._replace(new_tokens=48))
    assert len(traced) > 22
    assert not list(tmp_path.glob("*.tmp"))


def test_what_takes_a_while_is_said_beforehand_and_once(tracer, traced, logged: list[str]):
    first = tracer()
    first.fit("learn", SHAPE)
    first.fit("score", SHAPE)
    assert logged == ["INFO tracing memory for this shape, once: some seconds"]
    known = tracer()
    known.fit("learn", SHAPE)
    known.fit("score", SHAPE)
    known.peak_bytes("learn", SHAPE._replace(rows=2))  # a single trace takes no time
    assert len(logged) == 1


@pytest.mark.parametrize("content", ["", '{"learn 8 6 3": {"aten.m', "[1, 2]", "\0\0", "null"])
def test_a_damaged_file_is_ignored_and_replaced(tracer, traced, tmp_path: Path, content: str):
    tracer().fit("learn", SHAPE)
    (file,) = tmp_path.glob("*.json")
    good = file.read_text()
    file.write_text(content)
    assert fit_peak(tracer().fit("learn", SHAPE)) == 1000 + 10 * 7 * G
    assert len(traced) == 22 and file.read_text() == good


def test_what_two_trace_at_the_same_time_is_all_kept(tracer, traced, tmp_path: Path):
    one, other = tracer(), tracer()
    one.fit("learn", SHAPE)
    other.fit("score", SHAPE)
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())) == len(traced) == 22
    other.fit("learn", SHAPE)
    assert len(traced) == 22


def test_where_nothing_can_be_written_it_is_traced_again(tracer, traced, tmp_path: Path, logged: list[str]):
    settings = settings_of(Setting("gpt2", shape_of("gpt2"), group_size=G))
    (tmp_path / "file").write_text("")
    for _ in range(2):
        nowhere = PhaseTracer(settings, cache_folder=tmp_path / "file" / "traces")
        assert fit_peak(nowhere.fit("learn", SHAPE)) == 1000 + 10 * 7 * G
    assert len(traced) == 22
    assert any("traces are not kept" in line for line in logged)


def test_other_settings_and_other_code_have_traces_of_their_own(tracer, traced, tmp_path: Path, monkeypatch):
    made = [
        tracer(), tracer(checkpointing="full"), tracer(compute_dtype=torch.bfloat16), tracer(kl=False),
        tracer(group_size=8), tracer("llama"), tracer(lora=LORA),
    ]  # fmt: skip
    for each in made:
        each.fit("score", SHAPE)
    assert len(list(tmp_path.glob("*.json"))) == 7
    monkeypatch.setattr(torch, "__version__", "99.0")
    tracer().fit("score", SHAPE)
    assert len(list(tmp_path.glob("*.json"))) == 8


def test_settings_that_differ_in_numbers_only_share_their_traces(traced, tmp_path: Path):
    base = settings_of(Setting("gpt2", shape_of("gpt2"), group_size=G))
    for sampling, loss in (
        (SamplingSettings(max_new_tokens=24), LossSettings(kl_coef=0.02)),
        (SamplingSettings(max_new_tokens=48, temperature=0.7), LossSettings(kl_coef=0.1, clip_range=0.3)),
        (SamplingSettings(temperature=0.9), LossSettings(kl_coef=0.02)),
        (SamplingSettings(top_p=0.9), LossSettings(kl_coef=0.02)),  # sorts
        (SamplingSettings(), LossSettings(kl_coef=0.02, dual_clip=3.0)),  # clips once more
    ):
        PhaseTracer(replace(base, sampling=sampling, loss=loss), cache_folder=tmp_path).fit("learn", SHAPE)
    assert len(list(tmp_path.glob("*.json"))) == 4 and len(traced) == 4 * 11


def test_without_a_folder_it_is_the_users_cache(traced, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    PhaseTracer(settings_of(Setting("gpt2", shape_of("gpt2"), group_size=G))).fit("score", SHAPE)
    assert len(list((tmp_path / "grpo-lean" / "traces").glob("*.json"))) == 1
