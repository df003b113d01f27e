"""How alike gradients of disjoint batches are, by reward and credit: `python scripts/benchmark_signal.py`."""

import tyro


def main(batches: int = 12, rows: int = 256) -> None:
    """About ten minutes on two cores.

    Args:
        batches: Disjoint ones, of each task.
        rows: Completions of each.
    """
    from grpo.environment import set_library_defaults

    set_library_defaults()
    from benchmarks.signal import signal_table, signals

    from grpo.commands.screen import screen

    screen(width=130).print(signal_table(list(signals(batches, rows))))


if __name__ == "__main__":
    tyro.cli(main)
