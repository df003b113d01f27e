"""Recomputed activations: the same log-probs and gradients, fewer bytes, and nothing left behind."""

import dataclasses
import gc
import math
import weakref
from typing import get_args

import pytest
import torch
from conftest import ARCHITECTURES, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import grpo.model.activation_checkpointing
from grpo.config import Config
from grpo.config.groups import Checkpointing
from grpo.learning.loss import LossSettings, StepCounts, grpo_loss
from grpo.model.cpu.feed_forward import slice_feed_forward
from grpo.model.prefill import pad_prompts
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.scoring.forward import completion_hidden
from grpo.scoring.micro_batches import MicroBatch, micro_batch_logprobs
from grpo.scoring.model_checks import check_recomputation, check_scorer, made_up_batch
from grpo.trainer import Trainer

RECOMPUTED: tuple[Checkpointing, ...] = ("selective", "full")
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)
PROPERTY = settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
COMPLETIONS_OF_PROMPTS = [(7, 3), (1, 1), (12, 2), (4, 4)]


def made_up(groups: list[tuple[int, int]], width: int, seed: int = 0) -> MicroBatch:
    """A micro-batch of (prompt tokens, completions) groups, of random tokens and lengths up to `width`."""
    generator = torch.Generator().manual_seed(seed)
    row_to_prompt = torch.arange(len(groups)).repeat_interleave(torch.tensor([rows for _, rows in groups]))
    rows = len(row_to_prompt)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return MicroBatch(
        rows=torch.arange(rows),
        prompts=pad_prompts(
            [torch.randint(50, (tokens,), generator=generator).tolist() for tokens, _ in groups]
        ),
        row_to_prompt=row_to_prompt[torch.randperm(rows, generator=generator)],
        completion_ids=torch.randint(50, (rows, width), generator=generator),
        scored=places(torch.arange(width) < lengths),
    )


def learn(model, batch: MicroBatch, dtype: torch.dtype, *, checkpointing: Checkpointing):
    """Log-probs, and the gradient by all parameters of some weighted sum of them."""
    model.zero_grad()
    logp, _ = micro_batch_logprobs(model, batch, temperature=0.7, dtype=dtype, checkpointing=checkpointing)
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)).to(logp)
    (logp * weights).sum().backward()
    return logp.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def difference(one: dict, other: dict) -> float:
    """Of two gradients, relative, in global norm."""
    norm = math.hypot(*(gradient.norm().item() for gradient in one.values()))
    assert norm > 1e-3
    return math.hypot(*((one[name] - other[name]).norm().item() for name in one)) / norm


# ------------------------------------------------------------------------------------- exactness


@EVERY_ARCHITECTURE
@PROPERTY
@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=4),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_log_probs_and_gradients_are_the_same_in_float64(load, architecture, groups, width, seed):
    """Whatever the lengths of prompts, the sizes of groups, and the order of rows."""
    policy, batch = load(architecture, "fp64"), made_up(groups, width, seed)
    logp, gradient = learn(policy.model, batch, torch.float64, checkpointing="none")
    for checkpointing in RECOMPUTED:
        again, recomputed = learn(policy.model, batch, torch.float64, checkpointing=checkpointing)
        assert torch.equal(logp, again)
        assert difference(gradient, recomputed) < 1e-10
        for name in gradient:  # not only where the gradient is large
            assert torch.allclose(gradient[name], recomputed[name], rtol=1e-10, atol=1e-12), name


@EVERY_ARCHITECTURE
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_gradients_are_the_same_in_training_precisions(load, architecture, precision, dtype):
    """In bf16 as well: what is recomputed in the backward pass is recomputed in the dtype it had.

    Selective checkpointing casts a weight for prompts and again for completions, so that their gradients
    are added in fp32 and not in bf16.
    """
    policy, batch = load(architecture, precision), made_up(COMPLETIONS_OF_PROMPTS, 9)
    logp, gradient = learn(policy.model, batch, dtype, checkpointing="none")
    for checkpointing in RECOMPUTED:
        again, recomputed = learn(policy.model, batch, dtype, checkpointing=checkpointing)
        assert torch.allclose(logp, again, rtol=1e-6, atol=0)
        rounding = 5e-3 if (checkpointing, dtype) == ("selective", torch.bfloat16) else 1e-6
        assert difference(gradient, recomputed) < rounding


@pytest.mark.parametrize("checkpointing", RECOMPUTED)
def test_gradients_flow_through_the_keys_and_values_of_shared_prompts(load, checkpointing):
    """Token 7 stands in prompts only, and a completion's second token sees those in no other way."""
    model, batch = load("llama", "fp64").model, made_up(COMPLETIONS_OF_PROMPTS, 9)
    batch.prompts.ids[batch.prompts.mask] = 7
    batch.completion_ids[batch.completion_ids == 7] = 9
    hidden = completion_hidden(
        model, batch.prompts, batch.row_to_prompt, batch.completion_ids, checkpointing=checkpointing
    )
    hidden[:, 1:, 0].sum().backward()
    assert model.model.embed_tokens.weight.grad[7].norm() > 1e-3


def other_models() -> list:
    gemma = Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=24)
    return [
        Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
        MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=24)),
        Gemma3ForCausalLM(gemma),
        GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
        BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)),
    ]


def test_many_families_of_models_can_be_recomputed():
    """Grouped keys, sliding windows, layers that return tuples, positions by bias."""
    torch.manual_seed(0)
    for model in other_models():
        check_scorer(model.eval(), 24)
        for checkpointing in RECOMPUTED:
            check_recomputation(model, checkpointing)


# ---------------------------------------------------------------------------------------- memory


def gpt2(num_layers: int, activation: str = "gelu_new") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=num_layers, n_head=4)
    config.activation_function = activation
    return GPT2LMHeadModel(config).eval()


class Kept:
    """A tensor that waits for the backward pass; alive as long as the graph is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output that is kept would else keep itself


def kept_for_backward(kept: "weakref.WeakSet[Kept]") -> torch.autograd.graph.saved_tensors_hooks:
    def keep(tensor: torch.Tensor) -> Kept:
        one = Kept(tensor)
        kept.add(one)
        return one

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor)


def storages() -> dict[int, int]:
    """Bytes of whatever tensors there are, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    all_of_them = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in all_of_them}


def stored_bytes(num_layers: int, *, checkpointing: Checkpointing, sliced: bool = False) -> int:
    """What a forward pass of 10 rows leaves for the backward pass, kept by the graph or by closures."""
    model, batch = gpt2(num_layers, "gelu_pytorch_tanh"), made_up(COMPLETIONS_OF_PROMPTS, 9)
    if sliced:
        slice_feed_forward(model)
    before = storages()
    with kept_for_backward(weakref.WeakSet()):
        hidden = completion_hidden(
            model, batch.prompts, batch.row_to_prompt, batch.completion_ids, checkpointing=checkpointing
        )
    assert hidden.requires_grad
    return sum(size for address, size in storages().items() if address not in before)


def stored_per_layer(*, checkpointing: Checkpointing, sliced: bool) -> float:
    five, two = (stored_bytes(n, checkpointing=checkpointing, sliced=sliced) for n in (5, 2))
    return (five - two) / 3


@pytest.mark.usefixtures("frozen")
def test_a_layer_stores_its_input_and_the_prompts_keys_and_nothing_else():
    """One layer more, in floats: 4 prompts of 12 tokens and 10 rows of 8 have 32 each, and the prompts'
    keys and values are views of a product of 96. They are not repeated to rows."""
    per_layer = stored_per_layer(checkpointing="full", sliced=False)
    assert per_layer == 4 * ((4 * 12 + 10 * 8) * 32 + 4 * 12 * 96)
    assert stored_per_layer(checkpointing="none", sliced=False) > 9 * per_layer


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("sliced", [False, True])
def test_selective_checkpointing_stores_the_products_of_a_layer(sliced):
    """Floats of each of 128 tokens: 32 that come in, 96 and 32 from the attention's linear layers, 32 from
    itself and 1 from each of its 4 heads, 128 and 32 from the MLP. About half of what is kept without."""
    per_layer = stored_per_layer(checkpointing="selective", sliced=sliced)
    assert 0 <= per_layer - 4 * (4 * 12 + 10 * 8) * (32 + 96 + 32 + 32 + 4 + 128 + 32) < 64
    plain = stored_per_layer(checkpointing="none", sliced=sliced)
    assert per_layer < (0.8 if sliced else 0.65) * plain


@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
@pytest.mark.parametrize("ends", ["in a prompt's last layer", "in a completion's last layer", "never"])
def test_a_graph_without_its_backward_pass_is_freed(checkpointing, ends):
    """As after running out of memory in the forward pass: else that memory would be gone for good."""
    model, batch = gpt2(2), made_up(COMPLETIONS_OF_PROMPTS, 9)
    last_call = {"in a prompt's last layer": 1, "in a completion's last layer": 2, "never": 3}[ends]
    calls = []

    def run_out_of_memory(*_):
        calls.append(1)
        if len(calls) == last_call:
            raise torch.OutOfMemoryError

    model.transformer.h[1].mlp.register_forward_pre_hook(run_out_of_memory)
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()
    hidden = None
    try:
        with kept_for_backward(kept):
            hidden = completion_hidden(
                model,
                batch.prompts,
                batch.row_to_prompt,
                batch.completion_ids,
                checkpointing=checkpointing,
            )
            assert kept
    except torch.OutOfMemoryError:
        pass
    assert (hidden is not None) == (ends == "never") and len(calls) == min(last_call, 2)
    del hidden
    gc.collect()
    assert not kept
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    """As accelerate's hooks and tests put it there."""
    model, batch = gpt2(2), made_up(COMPLETIONS_OF_PROMPTS, 9)
    layer, calls = model.transformer.h[0], []
    original = layer.forward

    def own(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = own
    learn(model, batch, torch.float32, checkpointing="full")
    assert layer.forward is own and len(calls) == 4  # prompts and completions, forward and again


# ---------------------------------------------------------------------------------- fake tensors


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_learning_can_be_traced_with_fake_tensors(load, architecture, checkpointing, dtype, attention):
    """Prompts to gradients, shapes only: what a prediction of memory traces."""
    config = load(architecture).model.config
    rows, tokens = 6, 5
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        batch = MicroBatch(
            torch.arange(rows), pad_prompts([[0] * 9, [0] * 4]), torch.arange(rows) // 3,
            torch.zeros(rows, tokens, dtype=torch.long),
        )  # fmt: skip
        logp, entropy = micro_batch_logprobs(
            model, batch, temperature=1.0, dtype=dtype, entropy=True, checkpointing=checkpointing
        )
        loss, metrics = grpo_loss(
            logp, None, logp.detach(), torch.ones(rows), torch.ones(rows, tokens, dtype=torch.bool),
            counts=StepCounts(rows, rows * tokens, tokens), settings=LossSettings(),
        )  # fmt: skip
        loss.backward()
    assert logp.shape == entropy.shape == (rows, tokens)
    assert all(isinstance(metric, FakeTensor) for metric in metrics.values())
    assert all(isinstance(p.grad, FakeTensor) and p.grad.shape == p.shape for p in model.parameters())


# --------------------------------------------------------------------------------------- setting


def test_a_model_that_does_not_name_its_layers_is_refused_with_the_settings_name():
    torch.manual_seed(0)
    model = CTRLLMHeadModel(CTRLConfig(vocab_size=50, n_positions=64, n_embd=32, dff=64, n_layer=2, n_head=4))
    check_scorer(model.eval(), 24)
    check_recomputation(model, "selective")
    learn(model, made_up_batch(model, 24), torch.float32, checkpointing="selective")
    message = r"gradient_checkpointing is full, but CTRLLMHeadModel .* give none"
    with pytest.raises(ValueError, match=message):
        check_recomputation(model, "full")


@pytest.mark.parametrize("checkpointing", RECOMPUTED)
@pytest.mark.parametrize("changes", ["values", "shapes"])
def test_a_model_whose_layers_do_not_repeat_themselves_is_refused(monkeypatch, changes, checkpointing):
    """What a layer computes the second time would be silently wrong, or fail in the first backward pass."""
    model, calls = gpt2(2), []
    mlp = model.transformer.h[1].mlp
    original = mlp.forward

    def changing(hidden):
        calls.append(1)
        if changes == "shapes":
            return original(hidden) + original(hidden) if len(calls) % 2 else original(hidden)
        return original(hidden * (1 + len(calls)))

    monkeypatch.setattr(mlp, "forward", changing)
    monkeypatch.setattr("grpo.scoring.model_checks.micro_batch_logprobs", unshaken(calls))
    with pytest.raises(
        ValueError, match=f"gradient_checkpointing is {checkpointing}, but GPT2LMHeadModel cann"
    ):
        check_recomputation(model, checkpointing, made_up([(5, 2)], 4))


def test_a_kept_product_that_is_written_to_is_refused():
    """It would be wrong when it is used again."""
    model = gpt2(2)
    projection = model.transformer.h[1].attn.c_proj
    original = projection.forward
    projection.forward = lambda hidden: original(hidden).mul_(2)
    check_recomputation(model, "full")
    with pytest.raises(ValueError, match=r"gradient_checkpointing is selective, but .* give none"):
        check_recomputation(model, "selective")


def unshaken(calls: list):
    """micro_batch_logprobs whose forward passes all begin at the same count."""

    def logprobs(*args, **kwargs):
        calls.clear()
        return micro_batch_logprobs(*args, **kwargs)

    return logprobs


@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
@pytest.mark.usefixtures("made_up_plans")
def test_the_setting_reaches_learning_and_only_learning(config: Config, monkeypatch, checkpointing):
    calls = []  # whether gradients were on

    def recompute(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return original(*args, **kwargs)

    original = grpo.model.activation_checkpointing.checkpoint
    config = dataclasses.replace(config, steps=1, eval_interval=0, gradient_checkpointing=checkpointing)
    with open_run(config) as run:
        monkeypatch.setattr("grpo.model.activation_checkpointing.checkpoint", recompute)
        Trainer(run, Console(quiet=True)).train(StopRequest())
    expected = 0 if checkpointing == "none" else 2 * 2  # prompts and completions, two layers
    assert calls == [True] * expected
