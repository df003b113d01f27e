"""How fast is a step? Ours beside TRL 1.16 in its best configuration and as it comes, in one run.

python scripts/benchmark.py
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
import tyro
from benchmarks.speed import (
    CONTENDERS,
    as_json,
    chosen,
    race,
    race_table,
    race_verdicts,
)
from benchmarks.verdicts import conclude

from grpo.commands.screen import screen
from grpo.model.target import compute_dtype
from grpo.run.screen import configure_logging


def main(
    only: str = "",
    alone: bool = False,
    best: bool = False,
    rounds: int | None = None,
    output: Path | None = None,
    quick: bool = False,
) -> None:
    """Race, and print what was found. Needs trl (pip install -e '.[trl]').

    Args:
        only: Rows of the table whose name holds these words, such as "124 M".
        alone: Without TRL.
        best: Against TRL in its best configuration alone, not as it comes too.
        rounds: Of each row; None: 5, or 2 of GPT-2 124 M. One has no interval, but shows memory.
        output: A JSON file for every step.
        quick: One round of the smallest, held against what is so on any machine and not against our goals: we
            are no slower than the others, and hold less.
    """
    if rounds is not None and rounds < 1:
        sys.exit(f"--rounds is {rounds}: give at least 1.")
    console = screen(width=150)  # the tables are for docs/measurements.md, whatever the terminal
    configure_logging("INFO", console)
    rounds = rounds or (1 if quick else None)
    contenders = CONTENDERS[: 1 if alone else 2 if best else 3]
    outcomes = []
    for case in chosen(only):
        case = case if rounds is None else replace(case, rounds=rounds)
        with TemporaryDirectory() as folder:
            outcomes.append(race(case, Path(folder), contenders=contenders))
    precision = compute_dtype("auto", torch.device("cpu"))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {precision}"
    console.print(f"{versions}, {torch.get_num_threads()} threads", highlight=False)
    console.print(race_table(outcomes))
    if output is not None:
        output.write_text(json.dumps(as_json(outcomes), indent=1) + "\n")
    sys.exit(conclude(race_verdicts(outcomes, goals=not quick), console))


if __name__ == "__main__":
    tyro.cli(main)
