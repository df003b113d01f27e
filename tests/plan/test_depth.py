"""Traces of deep models that are told by shallow ones: byte for byte those of the whole model."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from grpo.config.groups import LoraSettings, LossSettings, SamplingSettings
from grpo.memory.shape import Shape
from grpo.model.target import make_target
from grpo.plan.trace import PHASES, PhaseSettings, PhaseTracer
from grpo.plan.trace.depth import extend, has_equal_layers
from grpo.plan.trace.fake import FakePhases

LAYERS = 6
SHAPES = Shape(16, 10, 7), Shape(64, 30, 20)


def config_of(name: str) -> PretrainedConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    width = {"hidden_size": 64, "intermediate_size": 96, **heads}
    made = {
        "gpt2": GPT2Config(
            n_embd=64, n_head=4, activation_function="gelu_pytorch_tanh",
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        ),
        "llama": LlamaConfig(**width),
        "qwen": Qwen3Config(**width, head_dim=32),
    }[name]  # fmt: skip
    made.vocab_size, made.num_hidden_layers = 200, LAYERS
    if getattr(made, "layer_types", None):
        made.layer_types = ["full_attention"] * LAYERS
    return made


def settings_of(name: str, device: str, dtype: torch.dtype, **options: object) -> PhaseSettings:
    target = make_target(config_of(name), torch.device(device), dtype)
    settings = PhaseSettings(target, 8, SamplingSettings(max_new_tokens=20), LossSettings())
    return replace(settings, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "device", "dtype", "options"),
    [
        ("gpt2", "cpu", torch.float32, {}),
        ("gpt2", "cpu", torch.bfloat16, {"checkpointing": "selective"}),
        ("gpt2", "cuda", torch.bfloat16, {"checkpointing": "full"}),
        ("llama", "cpu", torch.bfloat16, {"lora": LoraSettings(lora_rank=4)}),
        ("llama", "cuda", torch.bfloat16, {}),
        ("qwen", "cpu", torch.float32, {"checkpointing": "full"}),
    ],
)
def test_a_deep_model_is_told_by_two_shallow_ones(tmp_path, name, device, dtype, options):
    settings = settings_of(name, device, dtype, **options)
    whole, tracer = FakePhases(settings), PhaseTracer(settings, cache_folder=tmp_path)
    for phase in PHASES:
        for shape in SHAPES if phase in ("sample", "learn") else SHAPES[1:]:
            true = whole.trace(phase, shape)
            assert tracer.peak_bytes(phase, shape) == max(held for _, held in true), (phase, shape)
            assert len(tracer.trace(phase, shape)) < len(true)  # by a trace that was not made whole


def test_layers_that_differ_are_traced_one_by_one(tmp_path):
    settings = settings_of("qwen", "cpu", torch.float32)
    assert FakePhases(settings).has_equal_layers
    kinds = ["sliding_attention", "full_attention"] * LAYERS
    settings.target.model_config.layer_types = kinds[:LAYERS]
    settings.target.model_config.sliding_window = 8
    whole = FakePhases(settings)
    assert not whole.has_equal_layers
    tracer = PhaseTracer(settings, cache_folder=tmp_path)
    assert tracer.trace("learn", SHAPES[0]) == whole.trace("learn", SHAPES[0])
    assert has_equal_layers(whole.policy) is False


def test_logs_that_do_not_differ_by_a_copy_of_each_loop_are_not_extended():
    shorter = [("start", 1), ("layer", 3), ("layer", 5), ("end", 2)]
    longer = [("start", 1), ("layer", 3), ("layer", 5), ("layer", 7), ("end", 2)]
    assert extend(shorter, longer, layers=10) == [("start", 1), ("layer", 3), ("layer", 21), ("end", 2)]
    assert extend(shorter, [*longer, ("more", 9)], layers=10) is None
    assert extend(shorter, longer[1:], layers=10) is None
