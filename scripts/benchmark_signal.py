"""What gradients say of themselves, at the weights of the bundled model.

python scripts/benchmark_signal.py cosines     how alike those of disjoint batches are, by reward and credit
python scripts/benchmark_signal.py overhead    what measuring a step's noise costs
python scripts/benchmark_signal.py dull        what leaving out groups of equal rewards saves
"""

import tyro

from grpo.environment import set_library_defaults

set_library_defaults()

from benchmarks.signal import (  # noqa: E402
    LEAST_BATCHES,
    dull_groups,
    dull_table,
    overhead_table,
    overheads,
    signal_table,
    signals,
)

from grpo.commands.screen import screen  # noqa: E402


def cosines(batches: int = 12, rows: int = 256) -> None:
    """About ten minutes on two cores.

    Args:
        batches: Disjoint ones, of each task; at least 6, for the noise scale of each half.
        rows: Completions of each.
    """
    if batches < LEAST_BATCHES:
        raise SystemExit(
            f"--batches {batches} is too few: a noise scale takes 3 of each half; give {LEAST_BATCHES}."
        )
    screen(width=130).print(signal_table(list(signals(batches, rows))))


def overhead(rows: int = 256, repeats: int = 7) -> None:
    """About three minutes on two cores.

    Args:
        rows: Completions of a step.
        repeats: Pairs of passes of each kind, in turns.
    """
    screen(width=130).print(overhead_table(list(overheads(rows, repeats)), rows))


def dull(rows: int = 256, repeats: int = 5) -> None:
    """About two minutes on two cores.

    Args:
        rows: Completions of a step.
        repeats: Passes of each kind, in turns.
    """
    screen(width=130).print(dull_table(dull_groups(rows, repeats), rows))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"cosines": cosines, "overhead": overhead, "dull": dull})
