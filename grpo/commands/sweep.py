"""Train one model at several batch sizes, each on equally many tokens or samples.

    grpo-lean sweep --data bundled --arch gpt2 --batch-sizes 8 32 128
    grpo-lean sweep --objective grpo --batch-sizes 16 64 256

Finished sizes are kept in the output folder, so a stopped command goes on where it was.
"""

import shlex
import signal
import sys

from loguru import logger
from rich.console import Console

from grpo.commands import DONE, FAILED, INTERRUPTED
from grpo.environment import typed
from grpo.workbench.sweep import open_sweep, run_sweep, size_row
from grpo.workbench.sweep_settings import Sweep
from grpo.workbench.tables import table


def main(asked: Sweep, console: Console) -> int:
    """Check, run what has not ended yet, and tabulate."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end the size's process as well
    settings, folder = open_sweep(asked)
    try:
        sizes = run_sweep(settings, folder)
    except KeyboardInterrupt:
        again = sys.argv[1:] if asked.output else [*sys.argv[1:], "--output", str(folder)]
        logger.error("stopped; finished sizes are kept. Go on with: {} {}", typed("sweep"), shlex.join(again))
        return INTERRUPTED
    what = "loss" if settings.objective == "lm" else "reward"
    title = f"{settings.total:,} {settings.unit} at each size; {what}"
    console.print(table(title, [size_row(size, settings.unit) for size in sizes]))
    logger.info("for the report: {} {}", typed("report"), shlex.quote(str(folder)))
    return FAILED if any(size.status == "failed" for size in sizes) else DONE
