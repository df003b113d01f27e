"""How good is the leak test? On series whose answer is known, and on real leaks: results/README.md's figures.

python scripts/benchmark_leaks.py --series 1000 --real --trainer
"""

import tyro

from grpo.commands.screen import screen


def main(
    series: int = 1000, real: bool = False, trainer: bool = False, trials: int = 10, seed: int = 20261120
) -> None:
    """Print the tables.

    Args:
        series: Series in each cell, 200 steps each; 0 leaves the tables out.
        real: Also watch a small training loop: five leaks over 200 steps, none over 500.
        trainer: Also run monitor_memory.py over 500 steps of the trainer itself, on a tiny model.
        trials: Runs of each.
        seed: Of everything that is drawn.
    """
    from benchmarks.leak_series import false_alarms, power, smallest_leaks
    from benchmarks.leak_trials import clean_trainer, real_leaks

    console = screen(width=130)  # the tables are for results/README.md, whatever the terminal
    if series:
        for table in (false_alarms(series, seed), power(series, seed), smallest_leaks(seed)):
            console.print(table)
    if trainer:
        for line in clean_trainer(trials, seed):
            console.print(line, highlight=False, markup=False)
    if real:
        for line in real_leaks(trials, seed):
            console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    tyro.cli(main)
