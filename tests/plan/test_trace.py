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

from grpo.config.groups import LoraSettings, OptimizerSettings, SamplingSettings
from grpo.learning.loss import LossSettings
from grpo.learning.optimizer import make_optimizer
from grpo.memory import Shape, peak_live_bytes
from grpo.memory.live import LiveBytes
from grpo.plan.trace import PHASES, PhaseSettings, PhaseTracer
from grpo.plan.trace.depth import extend
from grpo.plan.trace.fake import FakePhases
from grpo.plan.trace.quick import PlainFakeMode
from grpo.plan.workload import resident_parts

G, VOCABULARY, LAYERS = 4, 96, 6
SHAPE = Shape(4 * G, 40, 24)
LORA = LoraSettings(lora_rank=8)


def setting_of(name: str = "gpt2", layers: int = 2, **options: object) -> Setting:
    config = ARCHITECTURES[name](VOCABULARY).config
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    for key in vars(config):
        if key.endswith(("_pdrop", "dropout")):
            setattr(config, key, 0.0)
    return replace(Setting(name, config, group_size=G), **options)  # type: ignore[arg-type]


def settings_of(name: str = "gpt2", device_type: str = "cpu", **options: object) -> PhaseSettings:
    """On another device than the CPU attention is torch's own."""
    setting = setting_of(name, **options)
    target = setting.target
    if device_type != "cpu":
        target = replace(target, device=torch.device(device_type), attention="sdpa")
    return PhaseSettings(
        target, setting.group_size,
        SamplingSettings(max_new_tokens=24), LossSettings(kl_coef=0.02 if setting.kl else 0.0),
        setting.checkpointing, lora=setting.lora,
    )  # fmt: skip


@pytest.fixture
def tracer(tmp_path: Path) -> Callable[..., PhaseTracer]:
    """tracer("gpt2", checkpointing="full"): with a cache of its own."""
    return lambda *words, **options: PhaseTracer(settings_of(*words, **options), cache_folder=tmp_path)


# ----------------------------------------------------------------------- what real phases allocate


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"checkpointing": "full"}),
        ("gpt2", {"compute_dtype": torch.bfloat16, "kl": False}),
        ("llama", {"lora": LORA, "compute_dtype": torch.bfloat16}),
    ],
)
def test_a_trace_is_what_the_real_phase_allocates(tracer, name: str, options: dict):
    """Counted by the same meter: what differs is that nothing is computed."""
    real, traces = RealPhases(setting_of(name, **options)), tracer(name, **options)
    for phase in PHASES:
        work = real.prepare(phase, SHAPE)
        assert traces.peak_bytes(phase, SHAPE) == pytest.approx(peak_live_bytes(work), rel=0.03), phase
    if not options:  # part of a group is traced as it is done
        shape = SHAPE._replace(rows=2)
        measured = peak_live_bytes(real.prepare("score", shape))
        assert traces.peak_bytes("score", shape) == pytest.approx(measured, rel=0.02)
    if "lora" not in options:
        return
    # What exists between phases, with adapters: weights, moments and gradients, counted one by one.
    optimizer = make_optimizer(real.model, OptimizerSettings())
    moments = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    resident = sum(parameter.nbytes for parameter in real.model.parameters()) + moments
    sizes = traces.num_parameters, traces.trained_sizes, traces.frozen_bytes
    predicted = resident_parts(setting_of(name, **options).workload(SHAPE), *sizes)
    assert predicted.pop("sampler's copy") == 2 * VOCABULARY * 32  # its head is no parameter of the model
    assert sum(predicted.values()) == pytest.approx(resident, rel=0.01)  # steps have numbers of their own
    gradients = sum(each.grad.nbytes for each in real.model.parameters() if each.grad is not None)
    assert gradients == 4 * sum(traces.trained_sizes)


class Counting(PlainFakeMode):
    """With another mode around it that counts."""

    @contextmanager
    def counting(self, live: LiveBytes) -> Iterator[None]:
        with live:
            yield


def test_what_is_remembered_of_operations_is_what_torch_says():
    """Each operation and the bytes held: with torch's own mode, and twice with ours, so that it remembers."""
    settings = settings_of(compute_dtype=torch.bfloat16, lora=LORA)
    quick, plain = FakePhases(settings), FakePhases(settings, Counting())
    for phase in ("sample split", "learn split"):
        expected = plain.trace(phase, SHAPE)
        assert quick.trace(phase, SHAPE) == expected and quick.trace(phase, SHAPE) == expected


def test_a_formula_is_the_trace_at_shapes_that_it_was_not_fitted_to(tracer):
    """Decoding with one group joining, with eight, and longer texts; learning of few and of many rows."""
    traces = tracer()
    fit = traces.fit("sample split", Shape(G, 60, 120))
    for groups, prompt, new in ((2, 30, 20), (7, 40, 100), (20, 17, 40), (64, 100, 150)):
        shape = traces.rounded("sample split", Shape(groups * G, prompt, new))
        assert shape.joining_groups == max(1, groups // 8)
        assert fit(shape) == pytest.approx(traces.peak_bytes("sample split", shape), rel=0.002), shape
    for phase in "score", "learn":
        fit = traces.fit(phase, Shape(G, 60, 24))
        for shape in (Shape(6 * G, 45, 17), Shape(40 * G, 33, 24), Shape(G, 60, 24)):
            assert fit(shape) == pytest.approx(traces.peak_bytes(phase, shape), rel=1e-6), (phase, shape)


def test_what_costs_memory_on_cards_shows(tracer):
    split, whole = ([tracer("gpt2", of).peak_bytes(phase, SHAPE) for of in ("cpu", "cuda")]
                    for phase in ("learn split", "learn"))  # fmt: skip
    assert split[0] == whole[0]  # on a CPU gradients are there first
    assert 0 < split[1] - whole[1] <= 4 * tracer().num_parameters
    # Autocast takes norms in fp32: with adapters, whose base is in bf16, that is more than comes in.
    lower = {"compute_dtype": torch.bfloat16, "lora": LoraSettings(lora_rank=2)}
    more, less = (tracer("gpt2", device, **lower).peak_bytes("learn", SHAPE) for device in ("cuda", "xpu"))
    activation = SHAPE.rows * SHAPE.new_tokens * 32
    assert more - less > 5 * 2 * activation
    # A recorded token holds as much as it takes to run, for as long as there are rows.
    shape = Shape(G, 64, 120)  # one group, so that none leaves; as wide as prompts are made for recordings
    recorded, plain = (FakePhases(settings_of("gpt2", of)).trace("sample", shape) for of in ("cuda", "xpu"))
    assert recorded[:-1] == plain and recorded[-1][0] == "aten.empty.memory_format"
    attention = next(place for place, (name, _) in enumerate(reversed(plain)) if "softmax" in name)
    assert recorded[-1][1] >= max(held for _, held in plain[-attention:])


# --------------------------------------------------------- deep models that are told by shallow ones


@pytest.mark.parametrize(
    ("phases", "name", "device", "options"),
    [
        (["learn"], "gpt2", "cpu", {"checkpointing": "selective", "compute_dtype": torch.bfloat16}),
        (PHASES, "llama", "cuda", {"lora": LORA, "compute_dtype": torch.bfloat16}),
        (["learn"], "qwen", "cpu", {"checkpointing": "full"}),
    ],
)
def test_a_deep_model_is_told_by_two_shallow_ones(tmp_path, phases, name, device, options):
    settings = settings_of(name, device, layers=LAYERS, **options)
    whole, tracer = FakePhases(settings), PhaseTracer(settings, cache_folder=tmp_path)
    shape = Shape(32, 20, 9)
    for phase in phases:
        true = whole.trace(phase, shape)
        assert tracer.peak_bytes(phase, shape) == max(held for _, held in true), phase
        assert len(tracer.trace(phase, shape)) < len(true)  # by a trace that was not made whole


def test_layers_that_differ_are_traced_one_by_one(tmp_path):
    settings = settings_of("qwen", layers=LAYERS)
    assert FakePhases(settings).has_equal_layers
    settings.target.model_config.layer_types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    settings.target.model_config.sliding_window = 8
    whole = FakePhases(settings)
    assert not whole.has_equal_layers
    tracer, shape = PhaseTracer(settings, cache_folder=tmp_path), Shape(16, 10, 7)
    assert tracer.trace("learn", shape) == whole.trace("learn", shape)
    assert extend([("layer", 3)], [("layer", 3), ("more", 9)], layers=10) is None  # nor logs that differ so


# ---------------------------------------------------------------------------------------- the cache

MADE_UP = 1000 + 10 * 7 * G
"""What `learns` says of the traces that stand in for real ones."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Shape]]:
    """Stands in for the traces themselves, which take seconds; holds what was traced."""
    asked: list[tuple[str, Shape]] = []

    def trace(_: FakePhases, *what) -> list[tuple[str, int]]:
        asked.append(what)
        return [("aten.mm.default", 1000 + 10 * what[1].rows)]

    monkeypatch.setattr(FakePhases, "trace", trace)
    return asked


def learns(tracer: PhaseTracer) -> float:
    return round(tracer.fit("learn", SHAPE)(Shape(7 * G, 33, 11)))


def test_each_shape_is_traced_once_by_run_and_by_machine_which_is_said_beforehand(
    tracer, traced, tmp_path: Path, logged: list[str]
):
    """What is damaged is ignored; where nothing can be written it is traced again."""
    first, other = tracer(), tracer()
    assert learns(first) == learns(first) == MADE_UP
    assert len(traced) == len(set(traced)) == 11
    (file,) = tmp_path.glob("*.json")
    assert learns(tracer()) == MADE_UP and len(traced) == 11
    other.fit("score", SHAPE)  # began before that was known, and joins what is
    assert len(traced) == 22 and len(json.loads(file.read_text())) == 22
    assert logged == ["INFO tracing memory for this shape, once: some seconds"] * 2
    known = tracer()
    learns(known)
    known.fit("score", SHAPE)
    known.peak_bytes("learn", SHAPE._replace(rows=2))  # a single trace takes no time
    assert len(logged) == 2 and len(traced) == 23
    known.fit("learn", SHAPE._replace(new_tokens=48))
    assert len(traced) > 23 and not list(tmp_path.glob("*.tmp"))
    for content in "", '{"learn 8 6 3": {"aten.m', "[1, 2]", "\0\0", "null":
        traced.clear()
        file.write_text(content)
        assert learns(tracer()) == learns(tracer()) == MADE_UP and len(traced) == 11
    for _ in range(2):
        assert learns(PhaseTracer(settings_of(), cache_folder=file / "traces")) == MADE_UP
    assert len(traced) == 33 and any("traces are not kept" in line for line in logged)


def test_other_settings_and_other_code_have_traces_of_their_own_but_not_other_numbers(
    tracer, traced, tmp_path: Path, monkeypatch
):
    made = [
        tracer(), tracer(checkpointing="full"), tracer(compute_dtype=torch.bfloat16), tracer(kl=False),
        tracer(group_size=8), tracer("llama"), tracer(lora=LORA),
    ]  # fmt: skip
    for sampling, loss in (
        (SamplingSettings(max_new_tokens=48), LossSettings(kl_coef=0.1, clip_range=0.3)),  # as the first
        (SamplingSettings(temperature=0.9), LossSettings(kl_coef=0.02)),
        (SamplingSettings(temperature=0.7), LossSettings(kl_coef=0.02)),  # as the one before
        (SamplingSettings(top_p=0.9), LossSettings(kl_coef=0.02)),  # sorts
        (SamplingSettings(), LossSettings(kl_coef=0.02, dual_clip=3.0)),  # clips once more
    ):
        made.append(PhaseTracer(replace(settings_of(), sampling=sampling, loss=loss), cache_folder=tmp_path))
    for each in made:
        each.fit("score", SHAPE)
    assert len(list(tmp_path.glob("*.json"))) == 10
    monkeypatch.setattr(torch, "__version__", "99.0")
    tracer().fit("score", SHAPE)
    assert len(list(tmp_path.glob("*.json"))) == 11
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a folder it is the user's cache
    PhaseTracer(settings_of()).fit("score", SHAPE)
    assert len(list((tmp_path / "grpo-lean" / "traces").glob("*.json"))) == 1
