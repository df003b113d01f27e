"""What gradients say of themselves, at the weights of the bundled model.

python scripts/benchmark_signal.py cosines     how alike those of disjoint batches are, by reward and credit
python scripts/benchmark_signal.py overhead    what measuring a step's noise costs
python scripts/benchmark_signal.py dull        what leaving out groups of equal rewards saves
"""

import sys

import tyro

from grpo.environment import set_library_defaults

set_library_defaults()

from benchmarks.signal import (  # noqa: E402
    LEAST_BATCHES,
    dull_groups,
    dull_table,
    dull_verdicts,
    overhead_table,
    overhead_verdicts,
    overheads,
    signal_table,
    signal_verdicts,
    signals,
)
from benchmarks.verdicts import conclude  # noqa: E402

from grpo.commands.screen import screen  # noqa: E402


def cosines(batches: int = 12, rows: int = 256, only: str = "") -> int:
    """About ten minutes on two cores.

    Args:
        batches: Disjoint ones, of each task; at least 6, for the noise scale of each half.
        rows: Completions of each.
        only: Rewards whose name holds these words.
    """
    if batches < LEAST_BATCHES:
        raise SystemExit(
            f"--batches {batches} is too few: a noise scale takes 3 of each half; give {LEAST_BATCHES}."
        )
    found = list(signals(batches, rows, only))
    screen(width=130).print(signal_table(found))
    return conclude(signal_verdicts(found), screen(width=130))


def overhead(rows: int = 256, repeats: int = 7) -> int:
    """About three minutes on two cores.

    Args:
        rows: Completions of a step.
        repeats: Pairs of passes of each kind, in turns.
    """
    found = list(overheads(rows, repeats))
    screen(width=130).print(overhead_table(found, rows))
    return conclude(overhead_verdicts(found), screen(width=130))


def dull(rows: int = 256, repeats: int = 5) -> int:
    """About two minutes on two cores.

    Args:
        rows: Completions of a step.
        repeats: Passes of each kind, in turns.
    """
    found = dull_groups(rows, repeats)
    screen(width=130).print(dull_table(found, rows))
    return conclude(dull_verdicts(found), screen(width=130))


if __name__ == "__main__":
    commands = {"cosines": cosines, "overhead": overhead, "dull": dull}
    sys.exit(tyro.extras.subcommand_cli_from_dict(commands))
