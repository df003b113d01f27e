"""How well the memory of a sharded model is foreseen.

torchrun --nproc_per_node 2 scripts/benchmark_shard.py [--quick]
"""

import os
import sys
import warnings

from benchmarks.sharding import table, trials
from loguru import logger
from torch import distributed as dist

from grpo.commands.screen import screen

PROMISED = 0.015
"""Largest error; docs/measurements.md has 1 %."""
START = "torchrun --nproc_per_node 2 scripts/benchmark_shard.py"


def main() -> None:
    if sys.argv[1:] not in ([], ["--quick"]) or "WORLD_SIZE" not in os.environ:
        sys.exit(f"error: it takes several processes and at most --quick; start it with: {START}")
    warnings.filterwarnings("ignore")
    logger.remove()
    dist.init_process_group("gloo")
    found = list(trials(quick=len(sys.argv) > 1))
    if dist.get_rank() == 0:
        screen(width=120).print(table(found))
    worst = max(found, key=lambda trial: abs(trial.error))
    print(f"process {dist.get_rank()}: largest error {worst.error:+.1%}, {worst.phase} in {worst.dtype}")
    dist.destroy_process_group()
    sys.exit(abs(worst.error) > PROMISED)


if __name__ == "__main__":
    main()
