"""The prompts and the models of a run: loaded whole, checked, and models sharded if they are to be."""

from dataclasses import replace
from pathlib import Path

import torch
from loguru import logger
from transformers import PretrainedConfig

from grpo.config import Config, SettingsError
from grpo.data import PromptSource, Room, Tokenizer, check_spec, load_prompts
from grpo.data.load import Rows
from grpo.data.tokens import tokenize
from grpo.distributed import World
from grpo.distributed.shard import shard_model
from grpo.files import shown
from grpo.model.adapters import add_adapters, load_adapters, store_base
from grpo.model.four_bits import BITSANDBYTES, quantized_by
from grpo.model.load import ModelSource, Policy, context_length, load_config, load_tokenizer
from grpo.model.names import BASE_FOLDER, base_of, findable
from grpo.model.target import Target
from grpo.model.weights import Reference, frozen_copy, make_reference
from grpo.prompt import Prompt
from grpo.rollout.decoder import check_decoder
from grpo.run.checkpoint import Checkpoint
from grpo.scoring.model_checks import check_scorer


def check_shard(config: Config, world: World) -> None:
    """SettingsError for what cannot be sharded."""
    if world.size == 1:
        raise SettingsError(
            "shard is on, but there is one process: start several, one a device, with "
            "torchrun --nproc_per_node N train_lean.py --shard, or leave it off."
        )
    if config.uses_lora:
        raise SettingsError(
            f"shard is on, and lora_rank is {config.lora_rank}: adapters cannot be sharded yet; leave "
            "one of the two out."
        )
    if config.optimizer_kind != "adamw":
        raise SettingsError(
            f"shard is on, and optimizer_kind is {config.optimizer_kind}, whose moments cannot be "
            "sharded: give adamw."
        )
    if config.reference_device is not None:
        raise SettingsError(
            f"shard is on, and reference_device is {config.reference_device!r}: the reference is sharded "
            "beside the policy; leave one of the two out."
        )


def check_quantized(config: Config, model: PretrainedConfig) -> Config:
    """The settings for a model that may have been quantized before it was saved.

    SettingsError where its weights themselves are to be trained.
    """
    method = quantized_by(model)
    if method is not None and not config.uses_lora:
        raise SettingsError(
            f"model is {config.model!r}, whose weights are quantized ({method}) and cannot be trained "
            "themselves: give --lora-rank 16, or the model that they were quantized from."
        )
    if method not in (None, BITSANDBYTES) and config.lora_merge:
        raise SettingsError(
            f"lora_merge is True, but the weights of {config.model!r} are quantized ({method}), into which "
            "nothing can be merged here: leave it out."
        )
    if method != BITSANDBYTES or config.load_in_4bit:
        return config
    logger.info("load_in_4bit is on: the weights of {} are quantized already", config.model)
    return replace(config, load_in_4bit=True)


def load_source(config: Config, room: Room | None = None, prompts: str | Rows | None = None) -> PromptSource:
    """The prompts that a run draws from and evaluates: those that its model has room for. Without weights.

    room: for a prompt; None: of config.model, which is a name then, not auto. prompts: None: those that the
    settings name. ValueError for what cannot be read.
    """
    prompts = config.prompts if prompts is None else prompts
    check_spec(prompts)
    room = room or prompt_room(config.model, config.max_new_tokens)
    return load_prompts(
        prompts, seed=config.seed, policy_share=config.policy_share,
        heldout_share=config.heldout_share, heldout_count=config.eval_prompts,
        max_bad_share=config.max_bad_share, settings=config, room=room,
    )  # fmt: skip


def prompt_room(model: str, max_new_tokens: int) -> Room:
    """What is left for a prompt. ValueError for a model that cannot be had, or without any room."""
    return room_in(load_config(model), load_tokenizer(model), max_new_tokens)


def room_in(model: PretrainedConfig, tokenizer: Tokenizer, max_new_tokens: int) -> Room:
    """The same of a model's shape."""
    context = context_length(model)
    if context <= max_new_tokens:
        raise SettingsError(
            f"max_new_tokens is {max_new_tokens}, but the model's context is {context} tokens: give less "
            "than that, to leave room for the prompt."
        )
    return Room(tokenizer, context, max_new_tokens, _tokens_without_row(model, tokenizer))


def _tokens_without_row(model: PretrainedConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Those that were added to a tokenizer and not to its model: a person's texts need not have them.

    SettingsError where others are, or one that is put in front of each text.
    """
    rows = model.get_text_config(decoder=True).vocab_size
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()  # a stand-in's has none
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    beyond = [token for token, number in known.items() if number >= rows]
    if not set(beyond) <= set(added) or max(tokenize([Prompt("", "a", {})], tokenizer)[0]) >= rows:
        raise SettingsError(
            f"the tokenizer has {len(known):,} tokens, but the model has rows for {rows:,}: give the "
            "tokenizer that the model was trained with, or save the model after resize_token_embeddings."
        )
    return tuple(beyond)


def load_models(
    config: Config,
    source: ModelSource,
    checkpoint: Checkpoint | None,
    target: Target,
    reference_device: torch.device,
    folder: Path | None = None,
) -> tuple[Policy, Reference | None]:
    """The policy, as the run began or as the checkpoint has it, and the reference, if the loss needs it.

    folder: the run's, where a base goes that is nowhere as a whole: one that had adapters of its own.
    """
    on_host = config.uses_lora or config.shard  # whole, in fp32, it may not fit the device
    reference_device = torch.device("cpu") if config.shard else reference_device
    is_nowhere = source.model is not None or base_of(source.name) is not None
    in_4bit = config.load_in_4bit
    policy = source.load(target, on_host=on_host, in_4bit=in_4bit and not is_nowhere)
    if config.uses_lora:
        base = findable(source.name)
        if folder is not None and is_nowhere:
            base = str((folder / BASE_FOLDER).resolve())
            policy.model.save_pretrained(base)
            policy.tokenizer.save_pretrained(base)
            if in_4bit:
                target = replace(target, model_config=policy.model.config)  # not quantized any more
                policy = ModelSource(base, tokenizer=policy.tokenizer).load(target, in_4bit=True)
        add_adapters(policy.model, config, seed=config.seed, base=base)
    check_scorer(policy.model, context_length(policy.model.config))
    check_decoder(policy.model)
    if config.uses_lora:  # after the check, which wants to be exact, and not on the device before
        store_base(policy.model, target.dtype)
        policy.model.to(target.device)
    if checkpoint is None:
        return policy, make_reference(policy.model, reference_device) if config.uses_reference else None
    logger.info("going on from {}", shown(checkpoint.folder))
    if config.uses_lora:
        reference = make_reference(policy.model, reference_device)
        load_adapters(policy.model, checkpoint.folder)
    else:
        reference = Reference(
            policy.model.to(reference_device)
            if source.model is None
            else frozen_copy(policy.model, reference_device)
        )
        policy = source.load_weights(policy, str(checkpoint.folder), on_host=config.shard)
    reference.restore(checkpoint.reference())
    return policy, reference if config.uses_reference else None


def shard_models(config: Config, policy: Policy, reference: Reference | None) -> None:
    """Over all processes, to the device they compute on."""
    target = policy.target
    shard_model(policy.model, target.dtype, target.device)
    if reference is not None:
        reference.shard(target.dtype, target.device)
