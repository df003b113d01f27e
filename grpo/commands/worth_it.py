"""Which batch is worth it: how noisy gradients are, and how long batches take, before training.

    python scripts/worth_it.py --batch-size 256 [flags of train_lean.py] [--batches 16] [--rows 64]

Prints the noise scale, and for each batch how much a step gets on with and how long it takes; the same as
a picture and as JSON into --output.
"""

import argparse
import sys
from pathlib import Path

DONE, WRONG_SETTING = 0, 2
"""Exit statuses."""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags of train] [--batches N] [--rows N] [--output FOLDER]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--batches", type=int, default=16, help="batches a gradient is taken of (16)")
    parser.add_argument("--rows", type=int, default=64, help="completions of each (64)")
    parser.add_argument("--output", type=Path, default=Path("runs/worth-it"), help="folder (runs/worth-it)")
    given, flags = parser.parse_known_args(sys.argv[1:])

    from loguru import logger

    from grpo.commands.screen import print_error, screen
    from grpo.config import SettingsError, parse_command_line
    from grpo.run.screen import configure_logging

    console = screen(width=None if sys.stdout.isatty() else 110)
    configure_logging("INFO", console)
    try:
        config = parse_command_line(flags)
    except SettingsError as error:
        print_error(console, error)
        return WRONG_SETTING

    from grpo.workbench.worth_it import in_words, measure, save, worth_table

    try:
        worth = measure(config, console, batches=given.batches, rows=given.rows)
    except ValueError as error:
        logger.error("{}", error)
        return WRONG_SETTING
    console.print(worth_table(worth))
    for line in (*in_words(worth), *map(str, save(worth, given.output))):
        console.print(line, highlight=False)
    return DONE
