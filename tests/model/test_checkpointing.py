"""Recomputed activations: the same log-probs and gradients, fewer bytes, and nothing left behind."""

import copy
import dataclasses
import gc
import math
from contextlib import nullcontext
from typing import get_args

import pytest
import torch
from conftest import ARCHITECTURES, examples, learned_logprobs
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from whole_runs import train

from grpo.config.groups import Checkpointing, LoraSettings
from grpo.memory.live import LiveBytes
from grpo.model.activation_checkpointing import recompute_activations
from grpo.model.adapters import add_adapters
from grpo.scoring.logprobs import token_states
from grpo.scoring.model_checks import check_scorer
from grpo.scoring.stream import Stream, make_stream

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
COMPLETIONS_OF_PROMPTS = [(7, 3), (1, 1), (12, 2), (4, 4)]


def made_up(groups: list[tuple[int, int]], width: int, seed: int = 0) -> Stream:
    """The stream of (prompt tokens, completions) groups, of random tokens and lengths up to `width`."""
    generator = torch.Generator().manual_seed(seed)
    prompt_of = torch.arange(len(groups)).repeat_interleave(torch.tensor([rows for _, rows in groups]))
    lengths = torch.randint(1, width + 1, (len(prompt_of),), generator=generator).tolist()
    prompts = [torch.randint(50, (tokens,), generator=generator).tolist() for tokens, _ in groups]
    prompt_of = prompt_of[torch.randperm(len(prompt_of), generator=generator)].tolist()
    rows = [torch.randint(50, (length,), generator=generator).tolist() for length in lengths]
    return make_stream(prompts, prompt_of, rows)


def learn(model, batch: Stream, dtype: torch.dtype, *, checkpointing: Checkpointing):
    """Log-probs, and the gradient by all parameters of some weighted sum of them."""
    model.zero_grad()
    shape = batch.num_rows, batch.layout.longest_row
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    options = {"temperature": 0.7, "dtype": dtype, "checkpointing": checkpointing}
    logp = learned_logprobs(model, batch, weights, **options)
    return logp, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def difference(one: dict, other: dict) -> float:
    """Returns the relative distance of two gradients, in global norm."""
    norm = math.hypot(*(gradient.norm().item() for gradient in one.values()))
    assert norm > 1e-3
    return math.hypot(*((one[name] - other[name]).norm().item() for name in one)) / norm


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_and_gradients_are_the_same_in_float64(load, architecture):
    """Whatever the lengths of prompts, the sizes of groups, and the order of rows."""
    model = load(architecture, "fp64").model
    groups = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=4)

    @examples(10)
    @given(groups, st.integers(1, 9), st.integers(0, 99))
    def holds(groups, width, seed):
        batch = made_up(groups, width, seed)
        logp, gradient = learn(model, batch, torch.float64, checkpointing="none")
        again, recomputed = learn(model, batch, torch.float64, checkpointing="full")
        assert torch.equal(logp, again) and difference(gradient, recomputed) < 1e-10
        torch.testing.assert_close(recomputed, gradient, rtol=1e-10, atol=1e-12)  # not only in norm

    holds()


GROUPS = {"num_key_value_heads": 2}
FAMILY = {
    "gpt2": {},
    "qwen2": GROUPS,
    "mistral": {**GROUPS, "sliding_window": 24},
    "gpt_neox": {},
    "bloom": {},
    "gemma3_text": {**GROUPS, "head_dim": 8, "sliding_window": 24},
}


def made(kind: str, **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings)).eval()


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_families_of_models_can_be_recomputed_in_training_precisions(kind, dtype):
    """Grouped keys, sliding windows, layers that return tuples, positions by bias."""
    model, batch = made(kind, **FAMILY[kind]), made_up(COMPLETIONS_OF_PROMPTS, 9)
    check_scorer(model, 24)
    logp, gradient = learn(model, batch, dtype, checkpointing="none")
    again, recomputed = learn(model, batch, dtype, checkpointing="full")
    assert torch.equal(logp, again) and difference(gradient, recomputed) < 1e-6


@pytest.mark.parametrize(("kind", "adapted"), [("gpt2", False), ("qwen2", False), ("qwen2", True)])
@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
def test_activations_that_are_computed_again_change_nothing(kind, adapted, checkpointing):
    """Not with adapters in the products' place either; and a copy has weights of its own."""
    models = [made(kind, **FAMILY.get(kind, {})) for _ in range(2)]
    recompute_activations(models[1])
    names, batch, results = set(models[0].state_dict()), made_up(COMPLETIONS_OF_PROMPTS, 9), []
    for model in models:
        if adapted:
            add_adapters(model, LoraSettings(lora_rank=2, lora_targets=("all-linear",)))
        results.append(learn(model, batch, torch.float32, checkpointing=checkpointing))
    (logp, gradient), (again, recomputed) = results
    assert torch.equal(logp, again) and difference(gradient, recomputed) < 1e-6
    copied = copy.deepcopy(models[1])
    torch.nn.init.zeros_(next(p for name, p in models[1].named_parameters() if "proj" in name and p.ndim > 1))
    copied_logp, _ = learn(copied, batch, torch.float32, checkpointing=checkpointing)
    assert torch.equal(copied_logp, logp) and (adapted or set(copied.state_dict()) == names)


def gpt2(num_layers: int = 2) -> PreTrainedModel:
    return made("gpt2", num_hidden_layers=num_layers, activation_function="gelu_pytorch_tanh")


def stored_per_layer(*, checkpointing: Checkpointing, recomputed: bool = False) -> float:
    """Returns the bytes that one layer more leaves for the backward pass of 10 rows, by the graph or
    closures."""
    stored = []
    for num_layers in (2, 5):
        model, batch = gpt2(num_layers), made_up(COMPLETIONS_OF_PROMPTS, 9)
        if recomputed:
            recompute_activations(model)
        with LiveBytes() as live:
            hidden = token_states(model, batch, checkpointing=checkpointing)
            assert hidden.requires_grad
            stored.append(live.live_bytes)
    return (stored[1] - stored[0]) / 3


def test_a_layer_stores_its_input_alone_and_attention_no_copies():
    """The stream has 32 floats a token. What a layer's activation function makes of 128 is a fifth of what it
    stores else; of attention it stores queries, keys, values and what comes out, each once."""
    plain, full = (stored_per_layer(checkpointing=name) for name in ("none", "full"))
    tokens = len(made_up(COMPLETIONS_OF_PROMPTS, 9))
    assert full == 4 * tokens * 32 and plain > 9 * full
    assert plain - stored_per_layer(checkpointing="none", recomputed=True) >= 4 * tokens * 128


@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
@pytest.mark.parametrize("last_call", [1, None])
def test_a_graph_without_its_backward_pass_is_freed(checkpointing, last_call):
    """As after running out of memory in the last layer: else that is lost."""
    model, batch, calls = gpt2(), made_up(COMPLETIONS_OF_PROMPTS, 9), []

    def run_out_of_memory(*_):
        calls.append(live.live_bytes)
        if len(calls) == last_call:
            raise torch.OutOfMemoryError

    model.transformer.h[1].mlp.register_forward_pre_hook(run_out_of_memory)
    with LiveBytes() as live:
        with pytest.raises(torch.OutOfMemoryError) if last_call else nullcontext():
            token_states(model, batch, checkpointing=checkpointing)
        assert len(calls) == 1 and min(calls) > 0
        gc.collect()
        assert live.live_bytes == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    """As accelerate's hooks and tests put it there."""
    model, calls = gpt2(), []
    layer = model.transformer.h[0]
    original = layer.forward
    own = layer.forward = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    learn(model, made_up(COMPLETIONS_OF_PROMPTS, 9), torch.float32, checkpointing="full")
    assert layer.forward is own and len(calls) == 2  # prompts and completions, forward and again


def test_a_model_that_does_not_name_its_layers_is_refused():
    with pytest.raises(ValueError, match=r"full, but CTRLLMHeadModel does not say .* give none"):
        learn(made("ctrl", dff=64), made_up([(5, 2)], 4), torch.float32, checkpointing="full")


@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
@pytest.mark.usefixtures("made_up_plans")
def test_the_setting_reaches_learning_and_only_learning(config, monkeypatch, checkpointing):
    calls, place = [], "grpo.model.activation_checkpointing._recompute"

    def recompute(function, *args, **kwargs):
        if kwargs:  # a layer's, not those of an activation
            calls.append(torch.is_grad_enabled())
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    config = dataclasses.replace(config, steps=1, gradient_checkpointing=checkpointing)
    train(config, lambda trainer: monkeypatch.setattr(place, recompute))
    assert calls == [True] * (0 if checkpointing == "none" else 2)  # layers
