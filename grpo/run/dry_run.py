"""The memory plan of a run before anything runs, for this device or for a card that is not there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from loguru import logger
from rich.console import Console
from transformers import PretrainedConfig

from grpo.config import Config
from grpo.config.sizes import parse_size
from grpo.data import Tokenizer
from grpo.environment import launched_processes
from grpo.memory import MemoryMonitor
from grpo.memory.budget import card_memory
from grpo.model.adapters import check_peft
from grpo.model.load import is_default_out_of_reach, load_tokenizer, shape_of
from grpo.model.target import choose_device, choose_model, make_target
from grpo.plan.build import longest_prompt, plan_memory
from grpo.plan.tables import plan_table
from grpo.plan.workload import Workload, bytes_at_start
from grpo.run.loading import check_quantized, load_source, room_in
from grpo.run.planning import budget_within


def dry_run(config: Config, console: Console) -> None:
    """Print the plan for the longest prompt and completions of full length. No weights are loaded.

    ValueError for what a user can mend, DoesNotFit among it.
    """
    absent = parse_size(config.device_memory) if config.device_memory else None
    device = torch.device("cuda") if absent else choose_device(config.device)
    config = replace(config, model=choose_model(config.model, device, absent=config.device_memory))
    check_peft(config.lora)
    model, tokenizer = _shape_and_tokenizer(config.model)
    config = check_quantized(config, model)
    precision = "bf16" if absent and config.precision == "auto" else config.precision
    target = make_target(model, device, precision)
    source = load_source(config, room_in(model, tokenizer, config.sampling.max_new_tokens))
    work = Workload(
        config, target, longest_prompt(source, tokenizer, config),
        reference_here=config.reference_device in (None, device.type), processes=launched_processes()[1],
    )  # fmt: skip
    monitor = MemoryMonitor(torch.device("cpu") if absent else device)
    memory = card_memory(absent) if absent else monitor.memory()
    budget = budget_within(config, memory)
    overhead = bytes_at_start(device.type, monitor)
    work, planned = plan_memory(work, monitor, lambda: budget, overhead_bytes=overhead)
    logger.info(
        "{} rows of up to {} prompt and {} new tokens, {}",
        work.config.num_rows, work.longest_prompt, work.new_tokens, str(target.dtype).removeprefix("torch."),
    )  # fmt: skip
    console.print(plan_table(planned.plan, budget, planned.worst()))


def _shape_and_tokenizer(name: str) -> tuple[PretrainedConfig, Tokenizer]:
    """The model's; of the default model there are stand-ins, as a plan wants neither weights nor tokens."""
    shape = shape_of(name)
    try:
        return shape, load_tokenizer(name)
    except ValueError:
        if not is_default_out_of_reach(name):
            raise
    logger.info("prompts are counted as a token a byte, the most there can be")
    return shape, _token_a_byte


def _token_a_byte(text: str | list[str], **options: bool) -> Mapping[str, Any]:
    return {"input_ids": text.encode() if isinstance(text, str) else [one.encode() for one in text]}
