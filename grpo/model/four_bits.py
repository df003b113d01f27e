"""A frozen base in 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes.

The linear layers but the output head: NF4 in blocks of 64 numbers with a scale each, and scales in 8 bits in
blocks of 256. A layer is dequantized whole for every product.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

BITSANDBYTES = "bitsandbytes in 4 bits"


def quantization() -> Any:
    """As transformers wants it, to quantize each weight as it is read."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def quantized_by(model: PretrainedConfig) -> str | None:
    """How a model's weights were quantized before they were saved, such as gptq; None: they were not."""
    settings: Any = getattr(model, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    if settings.get("load_in_4bit"):
        return BITSANDBYTES
    return settings.get("quant_method")


def layers_in_4_bits(model: nn.Module) -> dict[str, Any]:
    """The layers in 4 bits, by name; empty where none is."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return {}
    from bitsandbytes.nn import Linear4bit

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Sets the dtype of the products of layers in 4 bits."""
    for layer in layers_in_4_bits(model).values():
        layer.compute_dtype = dtype
        # A CPU that multiplies in bf16 would order the weights anew at its first pass without gradients, in a
        # way that has no backward pass and that nothing undoes.
        layer.support_avx512bf16_for_cpu = False


def dequantized(layer: Any) -> Tensor:
    """A layer's weight as the model has it: (out, in), or (in, out) of GPT-2's; of one in 4 bits in fp32."""
    if getattr(layer.weight, "quant_state", None) is None:
        plain: Tensor = layer.weight
        return plain
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    return weight.T if issubclass(layer.source_cls, Conv1D) else weight


def outline(model: nn.Module, names: Iterable[str], mode: AbstractContextManager[object]) -> None:
    """For traces: in the place of these linear layers such as are in 4 bits, without values.

    mode: what fakes tensors.
    """
    from bitsandbytes.nn import Linear4bit

    for name in names:
        parent, _, child = name.rpartition(".")
        plain: Any = model.get_submodule(name)
        outer, inner = reversed(plain.weight.shape) if isinstance(plain, Conv1D) else plain.weight.shape
        layer = Linear4bit(inner, outer, bias=False, quant_type="nf4", device="meta")
        with mode:
            packed = torch.empty(_packed_bytes(plain.weight.numel()), dtype=torch.uint8)
            layer.weight = nn.Parameter(packed, requires_grad=False)
        layer.weight.compress_statistics, layer.weight.quant_type = True, "nf4"  # which peft asks for
        layer.bias, layer.forward = plain.bias, partial(_traced_forward, layer)
        setattr(model.get_submodule(parent), child, layer)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _packed_bytes(numbers: int) -> int:
    """Returns the bytes of a layer's weight: half a byte a number, a byte for 64, 4 for 64 * 256, and
    tables."""
    scales = -(-numbers // 64)
    return -(-numbers // 2) + scales + 4 * -(-scales // 256) + 4 * (16 + 256 + 1)


def _traced_forward(layer: Any, values: Tensor) -> Tensor:
    """The weight exists while it is multiplied, in both passes; nothing is computed."""
    made = partial(torch.empty, dtype=layer.compute_dtype)
    bias = None if layer.bias is None else layer.bias.to(layer.compute_dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda weight: weight.shape, made):
        weight = made((layer.out_features, layer.in_features))
        product = F.linear(values.to(layer.compute_dtype), weight, bias)
        del weight
    return product.to(values.dtype)
