"""A model, its configuration and its tokenizer, from a hub id, a folder, a run, or the bundled model.

Master weights are fp32 whatever the checkpoint stores: an AdamW step at lr 1e-5 rounds to nothing
in bf16. Dropout is off in every phase. No code from the hub is ever run, no pickle opened.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
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
from grpo.errors import UserError
from grpo.model.activation_checkpointing import recompute_activations
from grpo.model.adapters import merged_copy, merged_with
from grpo.model.four_bits import compute_in, layers_in_4_bits, quantization, quantized_by
from grpo.model.names import LOADING_ERRORS, base_of, check_whole, loading, out_of_reach, source_of
from grpo.model.target import HUB_DEFAULT, Target, make_target

transformers_logging.disable_progress_bar()


class Policy(NamedTuple):
    """A model to train, its tokenizer, and what it runs on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target: Target

    @contextmanager
    def as_it_came(self) -> Iterator[None]:
        """Inside, the model's configuration is the one that it came with, to be saved."""
        came_with = self.target.came_with
        now = {name: getattr(self.model.config, name) for name in came_with}
        vars(self.model.config).update(came_with)
        try:
            yield
        finally:
            vars(self.model.config).update(now)


@dataclass(frozen=True)
class ModelSource:
    """The source of a run's model: its name, or a model that has been loaded already."""

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
        return _ends_texts(self.tokenizer, self.name) if self.tokenizer else load_tokenizer(self.name)

    def load(self, target: Target, *, on_host: bool = False, in_4bit: bool = False) -> Policy:
        """The model's weights; a folder of adapters is merged into its base model. ValueError says what to do
        when they cannot be loaded. A model that is given is trained itself, in the dtype that training wants.

        on_host: leave them on the CPU for now. in_4bit: not on the host, and not of a folder of adapters.
        """
        if self.model is None:
            model = load_model(self.name, target, in_4bit=in_4bit)
            if target.on_cpu:
                recompute_activations(model)
        else:
            model = self.model.eval().to(target.master_dtype).requires_grad_(True)
            model.set_attn_implementation(target.attention)
        if not (on_host or in_4bit):
            model.to(target.device)  # type: ignore[arg-type]
        came_with = _changed_for_training(self.name) if self.model is None else {}
        return Policy(model, self.load_tokenizer(), replace(target, came_with=came_with))

    def load_weights(self, policy: Policy, folder: str, *, on_host: bool = False) -> Policy:
        """A policy with the weights in a checkpoint's folder: the model that is given, or one of its own."""
        stored = ModelSource(folder).load(policy.target, on_host=on_host)
        if self.model is None:
            return stored
        policy.model.load_state_dict(stored.model.state_dict())
        return policy


def load_policy(name: str, device: torch.device, precision: Precision = "auto") -> Policy:
    """Load any Hugging Face causal language model. ValueError says what to do when it cannot be."""
    return ModelSource(name).load(make_target(load_config(name), device, precision))


def load_model(name: str, target: Target, *, in_4bit: bool = False) -> PreTrainedModel:
    """The model alone, on the CPU unless it is in 4 bits; see `ModelSource.load`."""
    if (base := base_of(name)) is not None:
        model = load_model(base, target)
        if layers_in_4_bits(model):  # which would be quantized again after each layer's merging
            model = merged_copy(model)
        try:
            return merged_with(model, Path(source_of(name))).eval()
        except (*LOADING_ERRORS, RuntimeError) as error:  # the latter of shapes of another model
            raise UserError(f"the adapters in {name!r} do not fit their base {base!r}: {error}") from error
    method = quantized_by(target.model_config)
    options: dict[str, Any] = {"device_map": {"": target.device}} if in_4bit else {}
    if in_4bit and method is None:
        options["quantization_config"] = quantization()
    with loading(name, method):
        model, report = AutoModelForCausalLM.from_pretrained(
            **_from(name),
            config=target.model_config,
            dtype=target.master_dtype,
            use_safetensors=True,
            attn_implementation=target.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,  # of which `check_whole` tells
        )
    check_whole(name, report)
    if method is not None:  # what is not comes in the dtype it is stored in, or in that asked for
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
                parameter.data = parameter.data.to(target.master_dtype)
    compute_in(model, target.master_dtype)
    return model.eval()


def _from(name: str) -> dict[str, Any]:
    """Returns the arguments that every `from_pretrained` is given."""
    source = source_of(name)
    options = {"trust_remote_code": False, "local_files_only": out_of_reach(source)}
    return {"pretrained_model_name_or_path": source, **options}


def load_config(name: str) -> PretrainedConfig:
    """The model's shape, dropout off. ValueError says what to do when it cannot be had."""
    return _as_trained(_stored_config(name))


def _stored_config(name: str) -> PretrainedConfig:
    """The configuration as it is stored; that of adapters is their base's."""
    if (base := base_of(name)) is not None:
        return _stored_config(base)
    with loading(name):
        return AutoConfig.from_pretrained(**_from(name))


def _changed_for_training(name: str) -> dict[str, Any]:
    """The settings of a stored configuration that `_as_trained` changes, as they are stored."""
    stored = _stored_config(name)
    trained = _as_trained(copy.deepcopy(stored))
    return {key: value for key, value in vars(stored).items() if getattr(trained, key) != value}


def shape_of(name: str) -> PretrainedConfig:
    """Returns the configuration of `load_config`; of HUB_DEFAULT also if the hub is out of reach, which is
    said."""
    try:
        return load_config(name)
    except ValueError:
        if not is_default_out_of_reach(name):
            raise
    logger.info("the hub was not reached: this is for the built-in shape of {} (GPT-2 124 M)", name)
    return _as_trained(GPT2Config())


def is_default_out_of_reach(name: str) -> bool:
    """Whether there have to be stand-ins for what a plan wants of HUB_DEFAULT."""
    return name == HUB_DEFAULT and out_of_reach(name)


def _as_trained(config: PretrainedConfig) -> PretrainedConfig:
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same formula in one kernel
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # RWKV would divide its weights where they stand, and be saved so
    return _without_dropout(config)


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    for key in vars(config):
        if key.endswith(("_pdrop", "dropout")):
            setattr(config, key, 0.0)
    return config


def context_length(config: PretrainedConfig) -> int:
    """The most tokens that a text may have.

    The model's positions reach so far, or its attention, where it goes by chunks, or its rotary frequencies
    as they are for short texts, see `rotary_limit`.
    """
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "attention_chunk_size")]
    return min((limit for limit in (*limits, rotary_limit(config)) if limit and limit > 0), default=2**20)


def rotary_limit(config: PretrainedConfig) -> int | None:
    """Tokens beyond which rotary frequencies change for all texts of a pass; None where they never do.

    longrope (Phi-3, Phi-4-mini) and dynamic NTK choose them by the longest text on the device at once
    (transformers' `dynamic_rope_update`), so that what a text says would depend on those beside it.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
    limits = [
        each.get("original_max_position_embeddings") or text.max_position_embeddings
        for each in by_layer
        if each.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


def is_cut_short(config: PretrainedConfig) -> bool:
    """Whether the model's positions reach further than its `rotary_limit`."""
    limit, text = rotary_limit(config), config.get_text_config(decoder=True)
    return limit is not None and limit < text.max_position_embeddings


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a token to pad with. ValueError where it cannot end a text."""
    base = base_of(name)
    if base is not None and not (Path(source_of(name)) / "tokenizer_config.json").is_file():
        return load_tokenizer(base)
    with loading(name, is_tokenizer=True):
        tokenizer = AutoTokenizer.from_pretrained(**_from(name))
        if not tokenizer("text")["input_ids"]:  # transformers makes an empty one where there are no files
            raise UserError("there is no tokenizer in it")
    return _ends_texts(tokenizer, name)


def _ends_texts(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise UserError(f"model {name!r} has a tokenizer without an end-of-text token: give it one.")
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
