"""A model as an engine for any chess program that speaks UCI.

python scripts/play.py --model runs/NAME
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from loguru import logger

from grpo.commands.screen import print_error, screen
from grpo.play.uci import Options, serve
from grpo.run.screen import configure_logging

DONE, WRONG_SETTING, INTERRUPTED = 0, 2, 130
"""Exit statuses."""


@dataclass(frozen=True)
class UciConfig:
    """Play chess over UCI: what a chess program is to start, which may set some of this."""

    model: str = "auto"
    """auto, rook-tiny, a hub id, a model's folder, or a run's: its best checkpoint, else its newest."""
    options: tyro.conf.OmitArgPrefixes[Options] = field(default_factory=Options)
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    log: Path | None = None
    """A file for the log, instead of stderr."""


def main() -> int:
    """Run the command line. It does not return: what libraries' threads are doing is not waited for."""
    try:
        config = tyro.cli(UciConfig)
        if config.log is None:
            configure_logging("INFO", screen(stderr=True))
        else:
            logger.remove()
            logger.add(config.log, level="INFO")
    except (ValueError, OSError) as error:
        print_error(screen(stderr=True), error)
        return WRONG_SETTING
    try:
        serve(config.model, config.device, config.options)
        status = DONE
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stderr.flush()
    os._exit(status)
