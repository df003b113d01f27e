"""Whether the disk has room for what a run will write, said before the first step."""

import shutil
from pathlib import Path

import torch
from loguru import logger
from transformers import PreTrainedModel

from grpo.config import Config, SettingsError
from grpo.memory.budget import readable
from grpo.model.adapters import has_adapters

_FILES_BYTES = 4 * 2**20
"""Of tokenizer, settings and logs, about."""


def checkpoint_bytes(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """What a checkpoint takes: weights (of adapters alone, where there are any) and the optimizer's state."""
    only_trained = has_adapters(model)
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad or not only_trained)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return weights + sum(state.nbytes for state in states if torch.is_tensor(state)) + _FILES_BYTES


def check_room(config: Config, folder: Path, each_bytes: int, num_there: int) -> None:
    """SettingsError where not one checkpoint fits on the disk of `folder`, a warning where not all will.

    each_bytes: of a checkpoint. num_there: checkpoints that the folder has, of which old ones go.
    """
    free = shutil.disk_usage(folder).free
    # Beside those that stay there are the best one and the one that is being written.
    most = max(1, config.keep_checkpoints + 2 - num_there) * each_bytes
    if free < each_bytes:
        setting, value = ("resume", config.resume) if config.resume else ("runs_dir", config.runs_dir)
        raise SettingsError(
            f"{setting} is {str(value)!r}, on a disk with {readable(free)} free, where a checkpoint takes "
            f"{readable(each_bytes)}: make room, or have the run's folder elsewhere (--runs-dir)."
        )
    if free < most:
        logger.warning(
            "{} are free in {}, and checkpoints will take up to {}: make room, or lower --keep-checkpoints",
            readable(free), folder, readable(most),
        )  # fmt: skip
