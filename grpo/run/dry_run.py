"""The memory plan of a run before anything runs, for this device or for a card that is not there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from loguru import logger
from rich.console import Console
from transformers import PretrainedConfig

from grpo.config import Config, SettingsError
from grpo.config.sizes import parse_size
from grpo.data import Tokenizer
from grpo.data.reward_files import resolve_max_new_tokens
from grpo.environment import launched_processes
from grpo.model.adapters import check_peft
from grpo.model.first_layers import made_up_layers
from grpo.model.load import context_length, is_default_out_of_reach, load_tokenizer, shape_of
from grpo.model.target import choose_device, choose_model, is_same_device, make_target
from grpo.model.ways import kind_of, why_not_fastest
from grpo.plan.warm_up import card_to_plan_for, plan_without_weights, show_plan
from grpo.plan.workload import Workload, longest_prompt
from grpo.rollout.decoder import check_decoder
from grpo.run.loading import check_quantized, load_source, room_in
from grpo.scoring.model_checks import check_scorer


def dry_run(config: Config, console: Console) -> None:
    """Print the plan for the longest prompt and completions of full length. No weights are loaded.

    ValueError for what a user can mend, DoesNotFit among it.
    """
    if config.shard:
        raise SettingsError(
            "dry_run and shard are on: how much room a shard takes only its first passes tell; leave out "
            "--dry-run, and the table of the run itself comes before its first step."
        )
    absent = parse_size(config.device_memory) if config.device_memory else None
    device = torch.device("cuda") if absent else choose_device(config.device)
    work = workload(config, device, absent=config.device_memory)
    card = card_to_plan_for(
        device,
        absent,
        utilization=config.memory_utilization,
        limit_bytes=parse_size(config.memory_limit) if config.memory_limit else None,
    )
    work, plan = plan_without_weights(work, card)
    show_plan(work, plan, console)


def workload(config: Config, device: torch.device, *, absent: str | None = None) -> Workload:
    """Returns the workload of a run with these settings on `device`, or on a card that is not there.

    absent: how that card is called; precision auto is bf16 on it. ValueError for what a user can mend.
    """
    config = replace(config, model=choose_model(config.model, device, absent=absent))
    check_peft(config)
    shape, tokenizer = shape_of(config.model), _tokenizer_of(config.model)
    config = resolve_max_new_tokens(check_quantized(config, shape), context_length(shape))
    precision = "bf16" if absent and config.precision == "auto" else config.precision
    source = load_source(config, room_in(shape, tokenizer, config.max_new_tokens))
    target = make_target(shape, device, precision)
    _choose_ways(target.model_config)
    return Workload(
        config,
        target,
        longest_prompt(source, tokenizer),
        reference_here=is_same_device(config.reference_device, device),
        processes=launched_processes()[1],
    )


def _choose_ways(shape: PretrainedConfig) -> None:
    """Chooses how a model of this shape is scored and sampled from, without its weights.

    Where its kind alone does not say so, made-up weights of its first layers do. ValueError for a model that
    cannot be trained.
    """
    kind = kind_of(shape)
    if kind is not None and why_not_fastest(kind, shape) is not None:
        model = made_up_layers(shape)
        check_scorer(model, context_length(shape), shape)
        check_decoder(model, shape)


def _tokenizer_of(name: str) -> Tokenizer:
    """The model's; the default model's has a stand-in, as a plan only wants to know how many tokens."""
    try:
        return load_tokenizer(name)
    except ValueError:
        if not is_default_out_of_reach(name):
            raise
    logger.info("prompts are counted as a token a byte, the most there can be")

    def token_a_byte(text: str | list[str], **options: bool) -> Mapping[str, Any]:
        return {"input_ids": text.encode() if isinstance(text, str) else [line.encode() for line in text]}

    return token_a_byte
