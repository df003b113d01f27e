"""A model as an engine for any chess program that speaks UCI.

python scripts/play.py --model runs/NAME
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro
from loguru import logger

from grpo.commands.screen import print_error, screen
from grpo.play.requests import MOST_SEED, IllegalMoves, Options
from grpo.run.screen import configure_logging

DONE, WRONG_SETTING, INTERRUPTED = 0, 2, 130
"""Exit statuses."""
_A_POSITION = "8/8/8/4k3/8/4K3/8/4R3 w - - 0 1"


@dataclass(frozen=True)
class UciConfig:
    """Play chess over UCI: what a chess program is to start. Its options change all of this but the model."""

    model: str = "auto"
    """auto, rook-tiny, a hub id, a model's folder, or a run's: its best checkpoint, else its newest."""
    temperature: float = 0.0
    """Of sampling; 0 is greedy."""
    seed: int = 0
    """Of sampling, and of moves at random."""
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    illegal_moves: IllegalMoves = "replace"
    """An illegal answer is replaced by the model's next candidate, by what it says asked again, at last by a
    move at random, or it resigns."""
    log: Path | None = None
    """A file for the log, instead of stderr."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature is {self.temperature}: give 0 (greedy) or more")
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"--seed is {self.seed}: give a whole number from 0 to {MOST_SEED}")


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
        _serve(config)
        status = DONE
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stderr.flush()
    os._exit(status)


def _serve(config: UciConfig) -> None:
    """stdout is UCI's alone: what anything else writes there goes to stderr."""
    import chess

    from grpo.play.thought import Position
    from grpo.play.uci import Engine, Thinker

    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def send(line: str) -> None:
        with suppress(BrokenPipeError):  # the program is gone, and so will its lines be
            lines.write(f"{line}\n")

    def load(device: str) -> Thinker:
        from grpo.play.load import load_player  # takes seconds, which `uci` need not wait for

        player = load_player(config.model, device, rows=1)
        player.think([Position(chess.Board(_A_POSITION), seed=0)], most_answers=1)  # the first takes longest
        return player

    def fail(error: Exception) -> None:
        logger.error("{}", error)
        if not isinstance(error, ValueError):
            logger.opt(exception=error).debug("loading")
        lines.flush()
        os._exit(WRONG_SETTING)

    options = Options(config.temperature, config.seed, config.device, config.illegal_moves)
    engine = Engine(load, send, name=f"grpo-lean {config.model}", options=options, fail=fail)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    engine.run(sys.stdin)
