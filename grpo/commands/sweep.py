"""Train one model at several batch sizes, each on equally many tokens or samples.

    python scripts/sweep_batch_sizes.py --data bundled --arch gpt2 --batch-sizes 8 32 128
    python scripts/sweep_batch_sizes.py --objective grpo --batch-sizes 16 64 256

Finished sizes are kept in the output folder, so a stopped command goes on where it was.
"""

import shlex
import signal
import sys

from loguru import logger

from grpo.commands.screen import print_error, screen
from grpo.environment import typed

DONE, FAILED, WRONG_SETTING, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


def main() -> int:
    """Run the command line."""
    from grpo.run.screen import configure_logging
    from grpo.workbench.sweep.command_line import parse_sweep

    console = screen(stderr=True)
    configure_logging("INFO", console)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end the worker as well
    try:
        settings = parse_sweep()
        # These load torch: a wrong flag need not wait for it.
        from grpo.workbench.sweep.display import SweepProgress, sweep_table
        from grpo.workbench.sweep.opening import open_sweep

        sweep = open_sweep(settings)
    except ValueError as error:
        print_error(console, error)
        return WRONG_SETTING
    folder = sweep.folder.path
    progress = SweepProgress(console, sweep.settings)
    try:
        rows = sweep.run(progress)
    except KeyboardInterrupt:
        again = sys.argv[1:] if sweep.settings.output else [*sys.argv[1:], "--output", str(folder)]
        logger.error("stopped; finished sizes are kept. Go on with: {} {}", typed("sweep"), shlex.join(again))
        return INTERRUPTED
    finally:
        progress.close()
    screen(width=130 if not console.is_terminal else None).print(sweep_table(rows, sweep.settings))
    logger.info("for the report: {} {}", typed("report"), shlex.quote(str(folder)))
    return FAILED if any(row["status"] == "failed" for row in rows) else DONE
