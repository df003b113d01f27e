"""Policy, frozen reference and tokenizer, from a hub id, a folder, or the bundled model.

Master weights are fp32 whatever the checkpoint stores: an AdamW step at lr 1e-5 rounds to nothing
in bf16. Dropout is off in every phase. No code from the hub is ever run, no pickle opened.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from grpo.config.groups import Precision
from grpo.memory import is_out_of_memory
from grpo.model.activation_checkpointing import recompute_activations
from grpo.model.adapters import has_adapters, merged_weights, with_merged
from grpo.model.four_bits import compute_in, layers_in_4_bits, quantization, quantized_by
from grpo.model.head import centred_head
from grpo.model.hub import out_of_reach
from grpo.model.loading_errors import LOADING_ERRORS, cannot_load, check_whole
from grpo.model.names import base_of, source_of
from grpo.model.target import HUB_DEFAULT, Target, make_target

transformers_logging.disable_progress_bar()


class Policy(NamedTuple):
    """A model to train, its tokenizer, and what it runs on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target: Target


def load_policy(name: str, device: torch.device, precision: Precision = "auto") -> Policy:
    """Load any Hugging Face causal language model. ValueError says what to do when it cannot."""
    return load_for(make_target(load_config(name), device, precision), name)


def load_for(target: Target, name: str, *, on_host: bool = False, in_4bit: bool = False) -> Policy:
    """Load a model's weights; a folder of adapters is merged into its base model.

    on_host: leave them on the CPU for now. in_4bit: not on the host, and not of a folder of adapters.
    ValueError says what to do when it cannot.
    """
    model = load_model(name, target, in_4bit=in_4bit)
    if target.on_cpu:
        recompute_activations(model)
    return Policy(model if on_host or in_4bit else model.to(target.device), load_tokenizer(name), target)


@dataclass(frozen=True)
class ModelSource:
    """Where a run's model comes from: its name, or what has been loaded already."""

    name: str
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def load_config(self) -> PretrainedConfig:
        """The model's shape, dropout off. ValueError says what to do when it cannot be had."""
        if self.model is None:
            return load_config(self.name)
        return _without_dropout(copy.deepcopy(self.model.config))

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """With a token to pad with. ValueError where it cannot end a text."""
        if self.tokenizer is not None:
            return _that_ends(self.tokenizer, self.name)
        return load_tokenizer(self.name)

    def load(self, target: Target, *, on_host: bool = False, in_4bit: bool = False) -> Policy:
        """What `load_for` does; a model that is given is trained itself, in the dtype that training wants."""
        if self.model is None:
            policy = load_for(target, self.name, on_host=on_host, in_4bit=in_4bit)
            return policy._replace(tokenizer=self.load_tokenizer())
        model = self.model.eval().to(target.exact_dtype).requires_grad_(True)
        model.set_attn_implementation(target.attention)
        placed = model if on_host else model.to(target.device)  # type: ignore[arg-type]
        return Policy(placed, self.load_tokenizer(), target)

    def load_weights(self, policy: Policy, folder: str, *, on_host: bool = False) -> Policy:
        """A policy with the weights in a checkpoint's folder: the model that is given, or one of its own."""
        stored = load_for(policy.target, folder, on_host=on_host)
        if self.model is None:
            return stored
        policy.model.load_state_dict(stored.model.state_dict())
        return policy


def load_model(name: str, target: Target, *, in_4bit: bool = False) -> PreTrainedModel:
    """The model alone, as `load_for` loads it, on the CPU unless it is in 4 bits."""
    if (base := base_of(name)) is not None:
        model = load_model(base, target)
        if layers_in_4_bits(model):  # which would be quantized again after each layer's merging
            model = _whole(model)
        try:
            return with_merged(model, Path(source_of(name))).eval()
        except (*LOADING_ERRORS, RuntimeError) as error:  # shapes of another model
            raise ValueError(f"the adapters in {name!r} do not fit their base {base!r}: {error}") from error
    options: dict[str, Any] = {"device_map": {"": target.device}} if in_4bit else {}
    method = quantized_by(target.model_config)
    if in_4bit and method is None:
        options["quantization_config"] = quantization()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            source_of(name),
            config=target.model_config,
            dtype=target.exact_dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=out_of_reach(source_of(name)),
            attn_implementation=target.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error of ours
            **options,
        )
    except LOADING_ERRORS as error:
        raise ValueError(cannot_load(name, error, method)) from error
    except RuntimeError as error:  # as those raise that quantize, where a card or a package is missing
        if method is None or is_out_of_memory(error):
            raise
        raise ValueError(cannot_load(name, error, method)) from error
    check_whole(name, found)
    if method is not None:  # what is not comes in the dtype it is stored in, or in that asked for
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
                parameter.data = parameter.data.to(target.exact_dtype)
    compute_in(model, target.exact_dtype)
    return model.eval()


def load_config(name: str) -> PretrainedConfig:
    """The model's shape, dropout off. ValueError says what to do when it cannot be had."""
    if (base := base_of(name)) is not None:
        return load_config(base)
    try:
        config = AutoConfig.from_pretrained(
            source_of(name), trust_remote_code=False, local_files_only=out_of_reach(source_of(name))
        )
    except LOADING_ERRORS as error:
        raise ValueError(cannot_load(name, error)) from error
    return _as_trained(config)


def shape_of(name: str) -> PretrainedConfig:
    """What `load_config` gives; of HUB_DEFAULT also where the hub is out of reach, which is said."""
    try:
        return load_config(name)
    except ValueError:
        if not is_default_out_of_reach(name):
            raise
    logger.info("the hub was not reached: this is for the built-in shape of {} (GPT-2 124 M)", name)
    return default_shape()


def is_default_out_of_reach(name: str) -> bool:
    """Whether there have to be stand-ins for what a plan wants of HUB_DEFAULT."""
    return name == HUB_DEFAULT and out_of_reach(name)


def default_shape() -> PretrainedConfig:
    """That of HUB_DEFAULT, GPT-2 with 124 M parameters."""
    return _as_trained(GPT2Config(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12))


def _as_trained(config: PretrainedConfig) -> PretrainedConfig:
    _without_dropout(config)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same formula in one kernel
    return config


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    for key in vars(config):
        if key.endswith(("_pdrop", "dropout")):
            setattr(config, key, 0.0)
    return config


def context_length(config: PretrainedConfig) -> int:
    """Tokens the model's positions reach, or its attention, where it goes by chunks."""
    config = config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "attention_chunk_size"))
    return min((limit for limit in limits if limit), default=2**20)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a token to pad with. ValueError where it cannot end a text."""
    base = base_of(name)
    if base is not None and not (Path(source_of(name)) / "tokenizer_config.json").is_file():
        return load_tokenizer(base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source_of(name), trust_remote_code=False, local_files_only=out_of_reach(source_of(name))
        )
        if not tokenizer("text")["input_ids"]:  # transformers makes an empty one where there are no files
            raise ValueError("there is no tokenizer in it")
    except (
        *LOADING_ERRORS,
        RuntimeError,
    ) as error:  # the latter of sentencepiece
        raise ValueError(cannot_load(name, error)) from error
    return _that_ends(tokenizer, name)


def _that_ends(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model {name!r} has a tokenizer without an end-of-text token: give it one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All that end a text: the tokenizer's end of text, and those of the model's generation configuration.

    A chat model has several, such as <|im_end|> and <|endoftext|>.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    more = [] if named is None else [named] if isinstance(named, int) else named
    return tuple(sorted({tokenizer.eos_token_id, *more}))


def end_names(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stops: Iterable[str] = ()
) -> list[str]:
    """The same as texts, for people, with the stop texts that end one, too."""
    ids = end_tokens(model, tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(ids))
    ends = [name or f"token {number}" for number, name in zip(ids, names, strict=True)]
    return [*ends, *map(repr, stops)]


def frozen_copy(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """The reference: the same weights in the same dtype, so that the KL starts at zero."""
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    return reference.to(device) if device is not None else reference


def save_merged(model: PreTrainedModel, folder: Path) -> None:
    """Write a model with its adapters merged in, as `AutoModelForCausalLM.from_pretrained` loads it."""
    _whole(model).save_pretrained(folder)


def _whole(model: PreTrainedModel) -> PreTrainedModel:
    """The same with its adapters merged in, and no layer in 4 bits."""
    weights = merged_weights(model)
    config = copy.deepcopy(model.config)
    if layers_in_4_bits(model):
        del config.quantization_config
    with torch.device("meta"):
        merged = type(model)(config)
    merged.load_state_dict(weights, strict=False, assign=True)
    merged.tie_weights()
    merged.generation_config = model.generation_config
    return merged


class RolloutModel:
    """The policy as the sampler runs it: itself, or a copy in the compute dtype, kept in step.

    In lower precision its head is its own and centred, as the scorer's is (`centred_head`). A base with
    adapters is in that precision already, and its head is frozen: all but the head is the policy's itself.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._source = model
        self.model = model
        if model.dtype != dtype:
            self.model = frozen_copy(model)
            for parameter in self.model.parameters():  # not the buffers: rotary frequencies stay fp32
                parameter.data = torch.empty_like(parameter.data, dtype=dtype)
            head = self.model.get_output_embeddings()
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
            self.refresh()
        elif dtype.itemsize < 4 and has_adapters(model):
            self.model = _with_centred_head(model, dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights over in place, after the optimizer has moved them."""
        if self.model is self._source or has_adapters(self._source):
            return
        sources = dict(self._source.named_parameters(remove_duplicate=False))
        head = self.model.get_output_embeddings()
        for name, target in self.model.named_parameters():
            centred = target is head.weight or target is head.bias
            target.copy_(centred_head(sources[name], target.dtype) if centred else sources[name])


@torch.no_grad()
def _with_centred_head(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same modules but for the head."""
    twin, head = copy.copy(model), copy.copy(model.get_output_embeddings())
    twin._modules = dict(model._modules)
    head._parameters = {
        name: each if each is None else nn.Parameter(centred_head(each, dtype), requires_grad=False)
        for name, each in head._parameters.items()
    }
    twin.set_output_embeddings(head)
    return twin
