"""The prompts and the models of a run: checked, loaded whole, and models sharded if they are to be."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import PretrainedConfig, PreTrainedModel

from grpo.config import Config, SettingsError, to_plain
from grpo.config.settings import MemorySettings
from grpo.data import PromptBudget, PromptSource, Tokenizer, check_spec, load_prompts
from grpo.data.load import Rows
from grpo.data.tokens import suffix_tokens, tokenize
from grpo.distributed import World, sum_of_bits
from grpo.distributed.shard import shard_model
from grpo.files import shown
from grpo.model.adapters import add_adapters, load_adapters, store_base
from grpo.model.four_bits import BITSANDBYTES, quantized_by
from grpo.model.load import (
    ModelSource,
    Policy,
    context_length,
    end_names,
    end_tokens,
    is_cut_short,
    load_config,
    load_tokenizer,
)
from grpo.model.names import BASE_FOLDER, base_of, findable
from grpo.model.target import Target
from grpo.model.ways import choose_reading, decoding_of, reading_of
from grpo.model.weights import Reference, frozen_copy, lower_products, make_reference
from grpo.prompt import Prompt
from grpo.rollout.decoder import check_decoder
from grpo.run.checkpoint import Checkpoint
from grpo.scoring.model_checks import check_scorer

_OF_THIS_MACHINE = {
    *("device", "reference_device", "stockfish_path", "num_engines", "runs_dir", "name", "resume"),
    *(item.name for item in fields(MemorySettings)),
}
"""Settings in which the processes of a run may differ."""


def check_shard(config: Config, world: World) -> None:
    """SettingsError for what cannot be sharded."""
    if world.size == 1:
        raise SettingsError(
            "shard is on, but there is one process: start several, one a device, with "
            "torchrun --nproc_per_node N train_lean.py --shard, or leave it off."
        )
    in_the_way = ""
    if config.uses_lora:
        in_the_way = f"lora_rank is {config.lora_rank}: adapters cannot be sharded yet"
    elif config.optimizer_kind != "adamw":
        in_the_way = f"optimizer_kind is {config.optimizer_kind}: give adamw, whose moments can be sharded"
    elif config.reference_device is not None:
        in_the_way = f"reference_device is {config.reference_device!r}: the reference is beside the policy"
    if in_the_way:
        raise SettingsError(f"shard is on, and {in_the_way}; leave one of the two out.")


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


def check_same(
    world: World, config: Config, checkpoint: Checkpoint | None, source: PromptSource, model: PreTrainedModel
) -> None:
    """SettingsError unless all processes train the same model on the same prompts in the same way."""
    if world.size == 1:
        return
    of_this_machine = _OF_THIS_MACHINE - ({"memory_limit"} if config.shard else set())
    mine: dict[str, Any] = {
        **{name: value for name, value in to_plain(config).items() if name not in of_this_machine},
        "the checkpoint to go on from": checkpoint.folder.name if checkpoint else None,
        "the prompts (a digest)": source.state()["rows_digest"],
        "the model (a sum of its bits)": sum(map(sum_of_bits, model.parameters())),
    }
    for rank, theirs in enumerate(world.exchange("the comparison of settings", mine)):
        for what, value in theirs.items():
            if value != mine[what]:
                raise SettingsError(
                    f"process {rank} has {value} for {what}, process {world.rank} {mine[what]}: give all "
                    "machines the same command, files and versions, and --resume a folder that all see."
                )


def load_source(
    config: Config, room: PromptBudget | None = None, prompts: str | Rows | None = None
) -> PromptSource:
    """The prompts that a run draws from and evaluates: those that its model has room for. Without weights.

    room: for a prompt; None: of config.model, which is a name then, not auto. prompts: None: those that the
    settings name. ValueError for what cannot be read.
    """
    prompts = config.prompts if prompts is None else prompts
    check_spec(prompts)
    return load_prompts(
        prompts,
        seed=config.seed,
        policy_share=config.policy_share,
        heldout_share=config.heldout_share,
        heldout_count=config.eval_prompts,
        max_bad_share=config.max_bad_share,
        settings=config,
        room=room or prompt_room(config.model, config.max_new_tokens),
    )


def prompt_room(model: str, max_new_tokens: int) -> PromptBudget:
    """Returns the budget of a prompt. ValueError for a model that cannot be had, or without any room."""
    return room_in(load_config(model), load_tokenizer(model), max_new_tokens)


def room_in(model: PretrainedConfig, tokenizer: Tokenizer, max_new_tokens: int) -> PromptBudget:
    """The same of a model's shape.

    Tokens that were added to a tokenizer and not to its model may stand in nobody's prompt; SettingsError
    where others have no row in the model, or one that is put in front of each text.
    """
    context = context_length(model)
    if is_cut_short(model):
        logger.info(
            "texts have {:,} tokens at most, fewer than the model's positions reach: a longer one would "
            "change the rotary frequencies of all that are on the device with it",
            context,
        )
    if context <= max_new_tokens:
        raise SettingsError(
            f"max_new_tokens is {max_new_tokens}, but the model's context is {context} tokens: give less "
            "than that, to leave room for the prompt."
        )
    num_rows = model.get_text_config(decoder=True).vocab_size
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()  # a stand-in's has none
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    beyond = [token for token, number in vocabulary.items() if number >= num_rows]
    if not set(beyond) <= set(added) or max(tokenize([Prompt("", "a", {})], tokenizer)[0]) >= num_rows:
        raise SettingsError(
            f"the tokenizer has {len(vocabulary):,} tokens, but the model has rows for {num_rows:,}: give "
            "the tokenizer that the model was trained with, or save the model after resize_token_embeddings."
        )
    return PromptBudget(tokenizer, context, max_new_tokens, tuple(beyond))


def say_where_texts_end(policy: Policy, config: Config) -> None:
    """Completions, by which tokens; of these what the model cannot write; and prompts, where that is open."""
    if config.ignore_ends:
        logger.info("completions all have {} tokens: nothing ends them", config.max_new_tokens)
        return
    ends = end_names(policy.model, policy.tokenizer, config.stop_texts)
    logger.info("completions end at {}, or after {} tokens", " or ".join(ends), config.max_new_tokens)
    rows = policy.model.get_output_embeddings().weight.shape[0]
    for token, name in zip(end_tokens(policy.model, policy.tokenizer), ends, strict=False):
        if token >= rows:  # one that only the generation configuration names others do without
            level = "WARNING" if token == policy.tokenizer.eos_token_id else "INFO"
            text = "the model has {} tokens and cannot write {}, which is to end a text"
            logger.log(level, text, rows, name)
    if behind := suffix_tokens(policy.tokenizer):
        names = " ".join(policy.tokenizer.convert_ids_to_tokens(behind))
        logger.info("the tokenizer puts {} behind a text: prompts go without it, as they are to go on", names)


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
    in_4bit, shape = config.load_in_4bit, target.model_config
    policy = source.load(target, on_host=on_host, in_4bit=in_4bit and not is_nowhere)
    if config.uses_lora:
        base = findable(source.name)
        if folder is not None and is_nowhere:
            base = str((folder / BASE_FOLDER).resolve())
            with policy.as_it_came():
                policy.model.save_pretrained(base)
            policy.tokenizer.save_pretrained(base)
            if in_4bit:
                target = replace(target, model_config=policy.model.config)  # not quantized any more
                policy = ModelSource(base, tokenizer=policy.tokenizer).load(target, in_4bit=True)
        add_adapters(policy.model, config, seed=config.seed, base=base)
    check_scorer(policy.model, context_length(policy.model.config), shape, target.model_config)
    if config.uses_lora:  # after the check, which wants to be exact, and not on the device before
        store_base(policy.model, target.dtype)
        policy.model.to(target.device)
    reference_dtype = torch.float32 if config.shard else target.dtype
    if checkpoint is None:
        check_decoder(policy.model, shape, target.model_config)
        if not config.uses_reference:
            return policy, None
        return policy, make_reference(policy.model, reference_device, reference_dtype)
    logger.info("going on from {}", shown(checkpoint.folder))
    if config.uses_lora:
        reference = make_reference(policy.model, reference_device)
        load_adapters(policy.model, checkpoint.folder)
    else:
        first = policy.model
        frozen = first.to(reference_device) if source.model is None else frozen_copy(first, reference_device)
        lower_products(frozen, reference_dtype)
        reference = Reference(frozen)
        policy = source.load_weights(policy, str(checkpoint.folder), on_host=config.shard)
        choose_reading(reading_of(first), policy.model.config)
    reference.restore(checkpoint.reference())
    check_decoder(policy.model, shape, target.model_config)
    return policy, reference if config.uses_reference else None


def shard_models(policy: Policy, reference: Reference | None) -> None:
    """Over all processes, to the device they compute on.

    SettingsError for a model whose passes are as many as a process has texts of different lengths: in each
    pass of a sharded model all processes take part.
    """
    target, config = policy.target, policy.model.config
    ways = {reading_of(policy.model), decoding_of(config)} - {"streams", "a static cache", "padded rows"}
    if ways:
        way = " and ".join(sorted(ways))
        raise SettingsError(
            f"shard is on, but {type(policy.model).__name__} goes through in {way}, in passes that processes "
            "do not have in common: leave out --shard, or give another --model."
        )
    shard_model(policy.model, target.dtype, target.device)
    if reference is not None:
        reference.shard(target.dtype, target.device)
