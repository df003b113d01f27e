"""Is memory growing? Train for some steps and watch: `python monitor_memory.py 200 64`.

    python monitor_memory.py STEPS BATCH_SIZE [flags of train_lean.py]
    python monitor_memory.py --attach RUN

Shows memory by phase as it goes, and ends with a verdict: leak or none, bytes a step, which kind, and
which tensors; of a run that is or was trained elsewhere, by what its files say now. The run folder gets
memory.png and leak.json. Exit status 1 means a leak.
"""

import argparse
import gc
import itertools
import sys
from pathlib import Path

from rich.console import Console

from grpo.config import Config, SettingsError, parse_command_line

NO_LEAK, LEAK = 0, 1
"""Exit statuses."""


def parse_monitor() -> Config | Path:
    """What to train, or the folder of a run to be judged."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [STEPS [BATCH_SIZE]] [--attach RUN] [flags of train]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--attach", type=Path, metavar="RUN", help="judge this run folder instead")
    numbers = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))[:2]
    options, flags = parser.parse_known_args(sys.argv[1 + len(numbers) :])
    if options.attach and flags:
        raise SettingsError(f"attach judges a run as it is: leave out {' '.join(flags)}.")
    steps, batch_size = [*numbers, *("200", "64")[len(numbers) :]]
    quiet = ["--eval-interval", "0", "--checkpoint-interval", "0"]
    config = parse_command_line([*quiet, *flags, "--steps", steps, "--batch-size", batch_size])
    return options.attach or config


def main(settings: Config | Path, console: Console) -> int:
    """Train or attach, and judge."""
    if isinstance(settings, Config):
        print("loading torch and the model", file=sys.stderr)
    from grpo.run.interrupt import stop_on_signal
    from grpo.workbench.memory_watch import PLOT, VERDICT, judge_run, watch_training

    gc.freeze()
    with stop_on_signal() as stop:
        if isinstance(settings, Path):
            verdict, folder = judge_run(settings), settings
        else:
            verdict, folder = watch_training(settings, console, stop)
    console.print(str(verdict), highlight=False)
    console.print(f"{folder / PLOT}\n{folder / VERDICT}", highlight=False)
    return LEAK if verdict.leak else NO_LEAK
