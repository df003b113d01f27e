"""A model as an engine for any chess program that speaks UCI.

grpo-lean uci --model runs/NAME
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from loguru import logger
from rich.console import Console

from grpo.commands import DONE, INTERRUPTED
from grpo.config.groups import Precision
from grpo.errors import UserError
from grpo.play.uci import Options, serve


@dataclass(frozen=True)
class UciConfig:
    """Play chess over UCI: what a chess program is to start, which may set some of this."""

    model: str = "auto"
    """auto, rook-tiny, a hub id, a model's folder, or a run's, which plays by its model/."""
    options: tyro.conf.OmitArgPrefixes[Options] = field(default_factory=Options)
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    precision: Precision | None = None
    """Dtype of matrix products; auto is bf16 where the device has it; None: a run's, or auto."""
    log: Path | None = None
    """A file for the log, instead of stderr."""


def main(config: UciConfig, _: Console) -> None:
    """Serve; it does not return, as what libraries' threads are doing is not waited for."""
    if config.log is not None:
        logger.remove()
        try:
            logger.add(config.log, level="INFO")
        except OSError as error:
            raise UserError(
                f"--log {config.log} cannot be written ({error.strerror}): give another file"
            ) from error
    try:
        serve(config.model, config.device, config.options, config.precision)
        status = DONE
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stderr.flush()
    os._exit(status)
