"""Feed-forward layers on a CPU: theirs to the last digits, and what an activation makes is not kept."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from grpo.config.groups import LoraSettings
from grpo.model.adapters import add_adapters
from grpo.model.cpu import feed_forward
from grpo.model.cpu.feed_forward import slice_feed_forward

T, D = 13, 8


def gpt2(activation: str = "gelu_pytorch_tanh") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=D, n_layer=2, n_head=2)
    config.activation_function, config.resid_pdrop = activation, 0.0
    return GPT2LMHeadModel(config).eval()


def qwen() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=50, hidden_size=D, intermediate_size=4 * D, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


MADE = {"gpt2": gpt2, "qwen": qwen}
LAYER = {"gpt2": "h.0", "qwen": "layers.0"}
EVERY_KIND = pytest.mark.parametrize("kind", MADE)


def both(dtype: torch.dtype = torch.float32, kind: str = "gpt2") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A layer as Hugging Face computes it, with weights that reach the activation's bends, and ours."""
    model = MADE[kind]()
    plain = model.base_model.get_submodule(LAYER[kind])
    theirs = copy.deepcopy(plain.mlp)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    slice_feed_forward(model)
    plain.mlp.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), plain.mlp.to(dtype)


def learned(layer: torch.nn.Module, dtype: torch.dtype = torch.float32, lower: bool = False):
    """What it makes of some tokens, and gradients of a weighted sum by them and by its parameters."""
    generator = torch.Generator().manual_seed(2)
    x = (2 * torch.randn(3, T, D, generator=generator)).to(dtype).requires_grad_()
    weights = torch.randn(3, T, D, generator=generator).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        result = layer(x)
    grads = torch.autograd.grad((result * weights).sum(), [x, *layer.parameters()])
    return [result.detach(), *grads]


@EVERY_KIND
@pytest.mark.parametrize(("part", "size"), [(1, 1), (5, 7), (1024, 2**17)])
def test_values_and_gradients_are_theirs_in_float64(monkeypatch, part, size, kind):
    monkeypatch.setattr(feed_forward, "_PART", part)
    monkeypatch.setattr(feed_forward, "_SLICE", size)
    theirs, ours = both(torch.float64, kind)
    assert type(ours) is not type(theirs)
    expected = learned(theirs, torch.float64)
    torch.testing.assert_close(learned(ours, torch.float64), expected, rtol=1e-11, atol=1e-12)


@EVERY_KIND
@pytest.mark.parametrize("lower", [False, True], ids=["fp32", "bf16"])
def test_in_training_precisions_it_is_no_farther_from_the_truth(lower, kind):
    truth = learned(both(torch.float64, kind)[0], torch.float64)
    theirs, ours = (learned(layer, lower=lower) for layer in both(kind=kind))
    for one, other, true in zip(ours, theirs, truth, strict=True):
        assert one.dtype == other.dtype
        error, reference = ((each.double() - true).norm() / true.norm() for each in (one, other))
        assert error <= 1.2 * reference + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_and_its_slope_are_right_far_from_zero_too(dtype):
    x = torch.tensor([-1e4, -30.0, -5.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 5.0, 30.0, 1e4], dtype=dtype)
    exact = x.double().requires_grad_()
    value = torch.nn.functional.gelu(exact, approximate="tanh")
    (slope,) = torch.autograd.grad(value.sum(), exact)
    ours, result = torch.ones_like(x), torch.empty_like(x)
    feed_forward._through_gelu(x, ours, result)
    torch.testing.assert_close(result, value.detach().to(dtype))
    torch.testing.assert_close(
        ours, slope.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=3e-6
    )


@pytest.mark.parametrize(("kind", "kept", "kept_by_theirs"), [("gpt2", 1, 2), ("qwen", 2, 4)])
def test_what_an_activation_makes_is_not_kept(kind, kept, kept_by_theirs):
    """Kept are the layer's input, for each of its first products, and what they made of it."""

    def kept_sizes(layer: torch.nn.Module) -> list[int]:
        sizes = []
        parameters = {parameter.data_ptr() for parameter in layer.parameters()}

        def keep(tensor):
            if tensor.data_ptr() not in parameters:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(torch.randn(3, T, D, requires_grad=True))
        return sorted(sizes)

    theirs, ours = (kept_sizes(layer).count(3 * T * 4 * D) for layer in both(kind=kind))
    assert theirs == kept_by_theirs and ours == kept


@EVERY_KIND
def test_one_token_of_each_row_gives_the_same(kind):
    theirs, ours = both(kind=kind)
    x = torch.randn(T, 1, D)
    assert torch.equal(theirs(x), ours(x))


def test_only_what_is_trained_gets_a_gradient():
    _, ours = both()
    ours.c_proj.requires_grad_(False)
    ours(torch.randn(3, T, D)).sum().backward()
    assert ours.c_proj.weight.grad is None and ours.c_proj.bias.grad is None
    assert ours.c_fc.weight.grad.norm() > 0


def test_copies_are_computed_so_too_and_hold_weights_of_their_own():
    model = gpt2()
    slice_feed_forward(model)
    other = copy.deepcopy(model)
    layer, copied = model.transformer.h[1].mlp, other.transformer.h[1].mlp
    assert type(copied) is type(layer)
    x, before = torch.randn(2, 3, D), copied(torch.zeros(2, 3, D))
    torch.nn.init.zeros_(layer.c_proj.weight)
    assert torch.equal(copied(torch.zeros(2, 3, D)), before) and copied(x).abs().max() > 0
    assert set(other.state_dict()) == set(gpt2().state_dict())


@EVERY_KIND
def test_what_adapters_add_is_added(kind):
    """They stand in the last product's place."""
    model = MADE[kind]()
    slice_feed_forward(model)
    add_adapters(model, LoraSettings(2, lora_targets=("all-linear",)))
    layer, x = model.base_model.get_submodule(LAYER[kind]).mlp, torch.randn(1, T, D)
    before = layer(x)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    adapters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    assert (layer(x) - before).abs().max() > 1e-3
    if kind == "gpt2":
        expected = layer.c_proj(layer.act(layer.c_fc(x)))
    else:
        expected = layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x))
    torch.testing.assert_close(layer(x), expected)
    grads = [torch.autograd.grad(each.square().sum(), adapters) for each in (layer(x), expected)]
    torch.testing.assert_close(*grads)


def test_another_activation_function_stays_as_it_is():
    model = gpt2("relu")
    classes = [type(module) for module in model.modules()]
    slice_feed_forward(model)
    assert [type(module) for module in model.modules()] == classes
