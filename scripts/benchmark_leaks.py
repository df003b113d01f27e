"""How good is the leak test? On series whose answer is known, and real leaks: docs/measurements.md's figures.

python scripts/benchmark_leaks.py --series 1000 --real --trainer
"""

import sys

import tyro
from benchmarks.verdicts import conclude

from grpo.commands.screen import screen


def main(
    series: int = 1000, real: bool = False, trainer: bool = False, trials: int = 10, quick: bool = False,
    seed: int = 20261120,
) -> int:  # fmt: skip
    """Print the tables; 1 if the test is worse than is promised.

    Args:
        series: Series in each cell, 200 steps each; 0 leaves the tables out.
        real: Also watch a small training loop: five leaks over 200 steps, none over 500.
        trainer: Also run monitor_memory.py over 500 steps of the trainer itself, on a tiny model.
        trials: Runs of each.
        quick: All of it, 200 series and each run once, without looking for the smallest leak that is found.
        seed: Of everything that is drawn.
    """
    if quick:
        series, real, trainer, trials = 200, True, True, 1
    from benchmarks.leak_series import (
        alarms_table,
        false_alarms,
        power,
        power_table,
        promises,
        smallest_leaks,
    )
    from benchmarks.leak_trials import clean_trainer, real_leaks

    console = screen(width=130)  # the tables are for docs/measurements.md, whatever the terminal
    verdicts: dict[str, bool] = {}
    if series:
        alarms, found = false_alarms(series, seed), power(series, seed)
        console.print(alarms_table(alarms, series))
        console.print(power_table(found))
        if not quick:
            console.print(smallest_leaks(seed))
        verdicts |= promises(alarms, found)
    for lines in (clean_trainer(trials, seed) if trainer else (), real_leaks(trials, seed) if real else ()):
        for line, holds in lines:
            console.print(line, highlight=False, markup=False)
            verdicts[line.splitlines()[0]] = holds
    return conclude(verdicts, console)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
