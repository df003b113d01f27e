"""What is wrong with settings, and what to give instead."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.config.limits import SettingsError, check_limits
from grpo.config.sizes import SizeError, parse_size

if TYPE_CHECKING:
    from grpo.config.settings import Config


LARGEST, LARGEST_COUNT, LONGEST_NAME = 1e30, 2**31, 255
"""Of a setting: what single precision has room for with some to spare, a count, a file's name in bytes."""


def check(config: "Config") -> None:
    """SettingsError for the first setting that cannot be."""
    check_limits(config)
    for part in (config, config.asking, config.loss, config.optimizer, config.sampling, config.lora):
        _check_size(part)
    for each in (_check_batch, _check_memory, _check_rewards, _check_credit, _check_reference, _check_name):
        each(config)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise SettingsError(message)


def _check_size(part: Any) -> None:
    """Of numbers, and of names that no disk takes."""
    for name, value in vars(part).items():
        if isinstance(value, float) and math.isfinite(value):
            _need(abs(value) < LARGEST, f"{name} is {value}: give a number below {LARGEST:g}.")
        elif isinstance(value, int) and name != "seed":
            _need(abs(value) < LARGEST_COUNT, f"{name} is {value}: give a number below 2^31.")
        elif isinstance(value, str | Path):
            longest = max((len(each.encode(errors="replace")) for each in Path(value).parts), default=0)
            _need(
                longest <= LONGEST_NAME,
                f"{name} is {str(value)!r}, with a part of {longest} letters: give one that a disk takes, "
                f"up to {LONGEST_NAME}.",
            )


def _check_batch(config: "Config") -> None:
    if config.batch_size != "auto":
        _need(
            config.batch_size % config.group_size == 0,
            _not_a_multiple("batch_size", config.batch_size, config.group_size),
        )
    for name in ("rollout_rows", "score_rows", "train_rows"):
        if rows := getattr(config, name):
            _need(
                rows % config.group_size == 0 or config.group_size % rows == 0,
                _not_whole_passes(name, rows, config.group_size),
            )
    _need(
        config.max_batch_size >= config.group_size,
        f"max_batch_size is {config.max_batch_size}, less than one group of {config.group_size}: give more.",
    )


def _check_memory(config: "Config") -> None:
    for name in ("memory_limit", "device_memory"):
        value = getattr(config, name)
        try:
            if value is not None:
                parse_size(value)
        except SizeError:
            raise SettingsError(
                f"{name} is {value!r}, which is no size: write it like 24GB or 512MB."
            ) from None
    _need(
        config.device_memory is None or config.dry_run,
        f"device_memory is {config.device_memory}, which is for a card that is not there: add --dry-run.",
    )


def _check_rewards(config: "Config") -> None:
    """What tells the completions of a group apart."""
    _need(
        config.sampling.temperature > 0,
        "temperature is 0: a group of equal completions teaches nothing; give more than 0 (usual: 1.0).",
    )
    _need(len(config.reward) > 0, "reward is empty: give at least one, such as policy.")
    names = [spec.rpartition(":")[2] for spec in config.reward]
    _need(len(set(names)) == len(names), f"reward names {', '.join(names)} are not distinct: rename one.")
    _need(
        all(map(math.isfinite, config.reward_weights)),
        f"reward_weights is {list(config.reward_weights)}: give finite numbers.",
    )
    _need(
        not config.reward_weights or any(config.reward_weights),
        f"reward_weights is {list(config.reward_weights)}: nothing would count; give one that is not 0.",
    )


def _check_credit(config: "Config") -> None:
    _need(
        config.credit == "whole" or config.loss.importance_level == "token",
        "credit is field, but importance_level is sequence, where a completion's tokens share one ratio: "
        "give token, or credit whole.",
    )


def _check_reference(config: "Config") -> None:
    _need(
        not config.kl_in_reward or config.loss.kl_coef > 0,
        "kl_in_reward is on, but kl_coef is 0: give kl_coef more than 0 (usual: 0.02).",
    )
    _need(
        config.kl_target is None or config.loss.kl_coef > 0,
        "kl_target needs a coefficient to start from: give kl_coef more than 0 (usual: 0.02).",
    )
    _need(
        not config.reference_sync or config.uses_reference,
        f"reference_sync is {config.reference_sync}, but kl_coef is 0, so there is no reference: "
        "give kl_coef more than 0 (usual: 0.02), or leave it out.",
    )
    _need(
        config.reference_device is None or not config.lora.on,
        f"reference_device is {config.reference_device}, but with lora_rank the reference is the policy "
        "itself without its adapters: leave it out.",
    )
    _need(
        not config.lora.load_in_4bit or config.precision != "fp64",
        "precision is fp64, but load_in_4bit is on, which has products in fp32 at most: give bf16 or fp32.",
    )


def _check_name(config: "Config") -> None:
    name = config.name
    _need(
        name is None or (name not in ("", ".", "..") and not set(name) & set("/\\\0")),
        f"name is {name!r}, which is no name of one folder: give one without / and \\, and --runs-dir for "
        "where it is made.",
    )
    _need(
        name is None or name.isprintable(),
        f"name is {name!r}, which cannot be printed: give one without line breaks and control characters.",
    )


def _not_a_multiple(name: str, rows: int, group_size: int) -> str:
    below, above = rows // group_size * group_size, -(-rows // group_size) * group_size
    if not below:
        return (
            f"{name} is {rows}, less than one group of {group_size}: "
            f"give {above} or a multiple of it, or a smaller group_size."
        )
    return (
        f"{name} is {rows}, which is not a multiple of group_size {group_size}: "
        f"groups stay whole. {below} and {above} are the nearest multiples."
    )


def _not_whole_passes(name: str, rows: int, group_size: int) -> str:
    if rows > group_size:
        return _not_a_multiple(name, rows, group_size)
    parts = [str(part) for part in range(1, group_size) if group_size % part == 0]
    return (
        f"{name} is {rows}, in which a group of {group_size} does not go evenly: "
        f"give {', '.join(parts)}, or a multiple of {group_size}."
    )
