"""What faults on the disk and kills do to runs: tried, resumed, and compared bit for bit."""

import sys

import tyro
from benchmarks.faults import fault_table, try_faults

from grpo.commands.screen import screen


def main(trials: int = 40, seed: int = 0) -> int:
    """Print a table of trials by kind of fault; 1 if one of them was not survived.

    Args:
        trials: How many, over all kinds; about two seconds each.
        seed: Of where the faults come.
    """
    found = try_faults(trials, seed)
    screen(width=100).print(fault_table(found))
    return int(any(counts["survived"] < counts["trials"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
