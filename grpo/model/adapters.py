"""Low-rank adapters (LoRA) by peft: put into a model in place, switched off, saved, loaded, merged.

The model keeps its class and its names, so that whatever decides by them (the native decoder, for one)
works as before. Left out on purpose: dropout, as no phase has any; adapters of the output head, whose
weight is read directly (`scoring/head.py`), and of embeddings.
"""

import copy
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo.config.groups import LoraSettings
from grpo.model.four_bits import check_bitsandbytes, compute_in, dequantized, layers_in_4_bits

CONFIG, WEIGHTS, MERGED = "adapter_config.json", "adapter_model.safetensors", "merged"
"""Files of a folder of adapters, and the folder in it where the merged model is."""
ALL_LINEAR = "all-linear"
_NAME = "default"
_PREFIX = "base_model.model."
"""What peft's own wrapper puts before the names in its files."""

Model = TypeVar("Model", bound=nn.Module)


def check_peft(lora: LoraSettings) -> None:
    """ValueError where adapters are wanted and peft is not installed, or bitsandbytes for their base."""
    check_bitsandbytes(lora)
    if lora.uses_lora and importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"lora_rank is {lora.lora_rank}, which needs the package peft: pip install peft, or leave it out."
        )


# ----------------------------------------------------------------------------------- in the model


def add_adapters(
    model: nn.Module, lora: LoraSettings, *, seed: int = 0, base: str | None = None, empty: bool = False
) -> None:
    """Freeze `model` and give it adapters that change nothing yet, in its own dtype.

    base: the model's name, as those find it who load the adapters. empty: on the meta device, without values.
    ValueError for targets that it does not have.
    """
    check_peft(lora)
    from peft import LoraConfig, inject_adapter_in_model

    layers = linear_layers(model)
    targets = lora.lora_targets or _peft_targets(model)
    if not targets:
        raise ValueError(_no_such_target("empty, and peft knows none for this architecture", layers))
    for target in targets:
        if target != ALL_LINEAR and not any(_is_named(name, target) for name in layers):
            raise ValueError(_no_such_target(f"{target!r}, which is none of the model's", layers))
    conv1d = any(type(layer).__name__ == "Conv1D" for layer in layers.values())  # GPT-2's are transposed
    config = LoraConfig(
        r=lora.lora_rank, lora_alpha=_whole(lora.used_alpha), lora_dropout=0.0, fan_in_fan_out=conv1d,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else sorted(targets),
        task_type="CAUSAL_LM", base_model_name_or_path=base,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=empty)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can have adapters, by name: all linear ones but the output head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name != _output_name(model)
    }


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name; the same ones whether they are switched on or off."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


@torch.no_grad()
def store_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep frozen weights in `dtype`, to which no step is ever added, and multiply by those in 4 bits in it.

    Buffers and adapters stay.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    compute_in(model, dtype)


@contextmanager
def adapters_off(model: Model) -> Iterator[Model]:
    """Inside, the model is what it was without adapters, exactly."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def other_adapters(model: Model, tensors: Mapping[str, Tensor]) -> Iterator[Model]:
    """Inside, the model has these adapters, by the names of `adapter_parameters`."""
    own = {name: parameter.data for name, parameter in adapter_parameters(model).items()}
    parameters = adapter_parameters(model)
    for name, parameter in parameters.items():
        parameter.data = tensors[name]
    try:
        yield model
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


# ----------------------------------------------------------------------------------------- on disk


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Write what peft's `PeftModel.from_pretrained(base, folder)` loads."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    save_file(
        {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS, metadata={"format": "pt"},
    )  # fmt: skip
    config = copy.copy(_peft_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))


def check_resumed(lora: LoraSettings, folder: Path) -> None:
    """ValueError unless a checkpoint has adapters of this kind, or none where none are trained."""
    file = folder / CONFIG
    stored = json.loads(file.read_text()) if file.is_file() else {"r": 0, "lora_alpha": lora.used_alpha}
    for name, now, then in (
        ("lora_rank", lora.lora_rank, stored["r"]),
        ("lora_alpha", lora.used_alpha, stored["lora_alpha"]),
    ):
        if now != then:
            raise ValueError(f"{name} is {now}, but {str(folder)!r} has {then}: go on with that.")


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Copy a checkpoint's adapters into the model's. ValueError unless they are of the same layers."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    if tensors.keys() != get_peft_model_state_dict(model, save_embedding_layers=False).keys():
        targets = json.loads((folder / CONFIG).read_text())["target_modules"]
        raise ValueError(f"lora_targets are others than {str(folder)!r} has: {', '.join(sorted(targets))}.")
    set_peft_model_state_dict(model, tensors, adapter_name=_NAME)


def base_named_in(name: str) -> str | None:
    """The base model's name where `name` is a folder of adapters; the shape of their base may be beside them.

    ValueError if it does not say of which model, or where a whole model is in the same folder.
    """
    file = Path(name) / CONFIG
    if not file.is_file():
        return None
    if whole := [path.name for path in Path(name).glob("model*.safetensors")]:
        raise ValueError(
            f"model {name!r} holds adapters ({CONFIG}) and a whole model ({whole[0]}): move one of the two "
            "into a folder of its own, and name the one that is meant."
        )
    base = json.loads(file.read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"model {name!r} holds adapters, but {CONFIG} does not say of which model: add it.")
    return str(base)


def with_merged(model: Model, folder: Path) -> Model:
    """`model` with a folder's adapters added to its weights."""
    check_peft(LoraSettings(lora_rank=1))
    from peft import PeftModel, set_peft_model_state_dict

    merged: Any = PeftModel.from_pretrained(model, str(folder))
    found = set_peft_model_state_dict(merged, load_file(folder / WEIGHTS))  # again, to be told what was there
    missing = [name for name in found.missing_keys if ".lora_" in name]
    if missing or found.unexpected_keys:
        raise ValueError(
            f"{WEIGHTS} lacks {len(missing)} of their weights and has {len(found.unexpected_keys)} besides, "
            f"such as {min([*missing, *found.unexpected_keys])}"
        )
    model = merged.merge_and_unload()
    return model.requires_grad_(True)  # peft leaves the base as it trained: not at all


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights with any adapters added, by the names they have without adapters, on the CPU.

    In the adapters' dtype: what was learned may be too small to show in a base of bf16.
    """
    dtype = next((each.dtype for each in adapter_parameters(model).values()), torch.float32)
    quantized = layers_in_4_bits(model)
    packed = tuple(f"{name}.weight" for name in quantized)
    weights = {
        name: tensor.detach().cpu().to(dtype)
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and not name.startswith(packed)
    }
    for name, layer in quantized.items():
        weights[f"{name}.weight"] = dequantized(layer).cpu().to(dtype)
    weights = {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}
    for name, layer in _adapted(model).items():
        weight, delta = weights[f"{name}.weight"], layer.get_delta_weight(_NAME).cpu()
        turned = getattr(layer.base_layer, "source_cls", None) is Conv1D  # peft does not know
        weights[f"{name}.weight"] = weight + (delta.T if turned else delta)
    return weights


# ----------------------------------------------------------------------------------------- details


def _adapted(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _peft_config(model: Any) -> Any:
    return model.peft_config[_NAME]


def _peft_targets(model: Any) -> tuple[str, ...]:
    """Peft's choice for this architecture: the attention's projections of queries and values, mostly."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    known = KNOWN.get(model.config.model_type, ())
    return () if isinstance(known, str) else tuple(known)


def _output_name(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _no_such_target(what: str, layers: Mapping[str, nn.Module]) -> str:
    ends = sorted({name.rpartition(".")[2] for name in layers})
    return f"lora_targets is {what}: give some of {', '.join(ends)}, or {ALL_LINEAR}."


def _whole(number: float) -> Any:
    return int(number) if number == int(number) else number
