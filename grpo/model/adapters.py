"""Low-rank adapters (LoRA) by peft: put into a model in place, switched off, saved, loaded, merged.

The model keeps its class and names, by which the native decoder is chosen. Transformers' own `add_adapter`
and `get_adapter_state_dict` do not serve: they overwrite the base's name, need values, and ask the hub about
the base's vocabulary. Left out on purpose: dropout, as no phase has any; adapters of the output head, whose
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
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.config.groups import LoraSettings
from grpo.errors import UserError
from grpo.model.four_bits import compute_in, dequantized, layers_in_4_bits
from grpo.model.names import ADAPTER_CONFIG

WEIGHTS, MERGED = "adapter_model.safetensors", "merged"
"""In a folder of adapters: their file, and the folder of the merged model."""
ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."
"""The prefix that peft's own wrapper puts before the names in its files."""

Model = TypeVar("Model", bound=nn.Module)


def check_peft(lora: LoraSettings) -> None:
    """ValueError where adapters are wanted and peft is not installed, or bitsandbytes for their base."""
    for package, is_wanted, setting in (
        ("bitsandbytes", lora.load_in_4bit, "load_in_4bit is True"),
        ("peft", lora.uses_lora, f"lora_rank is {lora.lora_rank}"),
    ):
        if is_wanted and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{setting}, which needs the package {package}: pip install {package}, or leave it out."
            )


def add_adapters(
    model: nn.Module, lora: LoraSettings, *, seed: int = 0, base: str | None = None, empty: bool = False
) -> None:
    """Freeze `model` and give it adapters that change nothing yet, in its own dtype.

    base: the model's name, as those find it who load the adapters. empty: on the meta device, without values.
    ValueError for targets that it does not have.
    """
    check_peft(lora)
    from peft import LoraConfig, inject_adapter_in_model

    layers, alpha = linear_layers(model), lora.used_alpha
    config = LoraConfig(
        r=lora.lora_rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),  # GPT-2's are transposed
        target_modules=_target_modules(model, layers, lora.lora_targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, low_cpu_mem_usage=empty)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _target_modules(model: Any, layers: Mapping[str, nn.Module], wanted: tuple[str, ...]) -> str | list[str]:
    """Returns the layers that get adapters, as peft takes them; where none are named, its choice."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS_CHOICE

    choice = PEFTS_CHOICE.get(model.config.model_type, ())
    targets = wanted or (() if isinstance(choice, str) else tuple(choice))
    fault = "" if targets else "empty, and peft knows none for this architecture"
    for target in targets:
        if target != ALL_LINEAR and not any(f".{name}".endswith(f".{target}") for name in layers):
            fault = f"{target!r}, which is none of the model's"
    if fault:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise UserError(f"lora_targets is {fault}: give some of {', '.join(ends)}, or {ALL_LINEAR}.")
    return ALL_LINEAR if ALL_LINEAR in targets else sorted(targets)


def linear_layers(model: Any) -> dict[str, Any]:
    """The layers that can have adapters, by name: all linear ones but the output head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, by name; the same ones whether they are switched on or off."""
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
def adapters_off(model: Model, instead: Mapping[str, Tensor] | None = None) -> Iterator[Model]:
    """Inside, the model is what it was without adapters, exactly, or has others.

    instead: those, by the names of `adapter_parameters`.
    """
    from peft.tuners.lora import LoraLayer

    parameters, others = adapter_parameters(model), instead or {}
    layers = [] if others else [module for module in model.modules() if isinstance(module, LoraLayer)]
    before = [parameter.data for parameter in parameters.values()]
    for layer in layers:
        layer.enable_adapters(False)
    for name, tensor in others.items():
        parameters[name].data = tensor
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, tensor in zip(parameters.values(), before, strict=True):
            parameter.data = tensor


def save_adapters(model: Any, folder: Path) -> None:
    """Write what peft's `PeftModel.from_pretrained(base, folder)` loads."""
    tensors = {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in _state(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _state(model: nn.Module) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return state


def check_resumed(lora: LoraSettings, folder: Path) -> None:
    """ValueError unless a checkpoint has adapters of this kind, or none where none are trained."""
    file = folder / ADAPTER_CONFIG
    stored = (
        json.loads(file.read_text(encoding="utf-8"))
        if file.is_file()
        else {"r": 0, "lora_alpha": lora.used_alpha}
    )
    for name, now, then in (
        ("lora_rank", lora.lora_rank, stored["r"]),
        ("lora_alpha", lora.used_alpha, stored["lora_alpha"]),
    ):
        if now != then:
            raise UserError(f"{name} is {now:g}, but {str(folder)!r} has {then:g}: go on with that.")


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Copy a checkpoint's adapters into the model's. ValueError unless they are of the same layers."""
    from peft import set_peft_model_state_dict

    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    if tensors.keys() != _state(model).keys():
        targets = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["target_modules"]
        raise UserError(f"lora_targets are others than {str(folder)!r} has: {', '.join(sorted(targets))}.")
    set_peft_model_state_dict(model, tensors)


def merged_with(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`model` with a folder's adapters added to its weights. ValueError where some are not in it."""
    check_peft(LoraSettings(lora_rank=1))
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = None  # which may be elsewhere now
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = ends[0] is not None and ends[0].weight is ends[1].weight
    adapted: Any = get_peft_model(model, config)
    if is_tied and (model.get_output_embeddings(), model.get_input_embeddings()) != ends:
        # Adapters of one end are not the other's: merged into a weight that both have they would be.
        ends[0].weight = nn.Parameter(ends[0].weight.detach().clone())
    report = set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    missing = [name for name in report.missing_keys if ".lora_" in name]
    if missing or report.unexpected_keys:
        raise UserError(
            f"{WEIGHTS} lacks {len(missing)} of their weights and has {len(report.unexpected_keys)} besides, "
            f"such as {min([*missing, *report.unexpected_keys])}"
        )
    merged: PreTrainedModel = adapted.merge_and_unload()
    if is_tied and merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight:
        for shape in (merged.config, merged.config.get_text_config(decoder=True)):
            shape.tie_word_embeddings = False
    return merged.requires_grad_(True)  # peft leaves the base as it trained: not at all


@torch.no_grad()
def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same on the CPU with any adapters added to its weights, and no layer in 4 bits.

    In the adapters' dtype: what was learned may be too small to show in a base of bf16.
    """
    dtype = next((parameter.dtype for parameter in adapter_parameters(model).values()), torch.float32)
    config = copy.deepcopy(model.config)
    if layers_in_4_bits(model):
        del config.quantization_config
    with torch.device("meta"):
        merged = type(model)(config)
    for name, empty in [*merged.named_parameters(remove_duplicate=False), *merged.named_buffers()]:
        owner, _, kind = name.rpartition(".")
        layer: Any = model.get_submodule(owner)
        plain = getattr(layer, "base_layer", layer)
        tensor = (dequantized(plain) if kind == "weight" else getattr(plain, kind)).detach().cpu()
        if isinstance(empty, nn.Parameter):
            tensor = nn.Parameter(tensor.to(dtype))
        if kind == "weight" and plain is not layer:
            delta = layer.get_delta_weight("default").cpu()
            turned = getattr(plain, "source_cls", None) is Conv1D  # in 4 bits, which peft does not know
            tensor = nn.Parameter(tensor + (delta.T if turned else delta))
        setattr(merged.get_submodule(owner), kind, tensor)
    merged.tie_weights()
    merged.generation_config = model.generation_config
    return merged


def save_merged(model: PreTrainedModel, folder: Path) -> None:
    """Write a model with its adapters merged in, as `AutoModelForCausalLM.from_pretrained` loads it."""
    merged_copy(model).save_pretrained(folder)
