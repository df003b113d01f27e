"""A model's first layers in fp32, to compare computations whose differences bf16 would hide."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_SMALL_VOCABULARY = 256
_PLAIN_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter's numbers are weights: packed bits are not, nor are those of a tensor class."""
    return type(parameter) in (Tensor, nn.Parameter, FakeTensor) and parameter.dtype in _PLAIN_DTYPES


def first_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model of the same kind with as many first layers as there are kinds of them, in fp32.

    It is there to compare two ways of computing the same. Weights are the model's own, without adapters;
    quantized ones are made up in their usual size. device: where it is to be.
    """
    config = _shortened(model.config)
    with torch.device("meta"):
        part: Any = type(model)(config)
    generator = torch.Generator().manual_seed(0)
    for name, empty in [*part.named_parameters(remove_duplicate=False), *part.named_buffers()]:
        owner, _, kind = name.rpartition(".")
        layer: Any = model.get_submodule(owner)
        layer = getattr(layer, "base_layer", getattr(layer, "original_module", layer))  # without adapters
        tensor = getattr(layer, kind)
        if isinstance(empty, nn.Parameter):
            if is_plain(tensor) and tensor.shape == empty.shape:
                values = tensor.detach().to(device).float()
            else:
                values = torch.randn(empty.shape, generator=generator).to(device)
                values *= empty.shape[-1] ** -0.5
            tensor = nn.Parameter(values, requires_grad=False)
        else:
            tensor = tensor.to(device)
        setattr(part.get_submodule(owner), kind, tensor)
    part.tie_weights()
    return part.eval()


def made_up_layers(config: PretrainedConfig) -> PreTrainedModel:
    """Makes a model's first layers, as `first_layers` does, where there are no weights: with random ones, and
    a small vocabulary, on the CPU.
    """
    config = _shortened(config)
    text: Any = config.get_text_config(decoder=True)
    text.vocab_size = min(text.vocab_size, _SMALL_VOCABULARY)
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _shortened(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a model that has the first layers alone, two at least."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    text: Any = config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or [None] * count
    kept = min(count, max(2, *(1 + kinds.index(kind) for kind in set(kinds))))
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == count:  # one entry a layer
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    if "flash" in (config._attn_implementation or ""):  # which knows no fp32
        config._attn_implementation = "sdpa"
    return config
