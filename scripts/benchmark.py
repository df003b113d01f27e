"""How fast is a step? Ours beside TRL 1.16 in its best configuration and as it comes, in one run.

python scripts/benchmark.py
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
import tyro
from benchmarks.results import CONSOLE, conclude, table, write
from benchmarks.speed import CASES, CONTENDERS, race, race_rows, race_verdicts

from grpo.logs.screen import configure_logging
from grpo.model.target import compute_dtype


def main(
    only: str = "",
    alone: bool = False,
    best: bool = False,
    rounds: int | None = None,
    output: Path | None = None,
) -> int:
    """Race, and print what was found. Needs trl (pip install -e '.[trl]').

    Args:
        only: Rows of the table whose name holds these words, such as "124 M".
        alone: Without TRL.
        best: Against TRL in its best configuration alone, not as it comes too.
        rounds: Of each row; None: 5, or 2 of GPT-2 124 M. One has no interval, but shows memory.
        output: A JSON file for every step.
    """
    if rounds is not None and rounds < 1:
        sys.exit(f"--rounds is {rounds}: give at least 1.")
    chosen = [case for case in CASES if all(word in case.name for word in only.split())]
    if not chosen:
        sys.exit(f"--only is {only!r}: the rows are {'; '.join(case.name for case in CASES)}.")
    configure_logging("INFO", CONSOLE)
    contenders = CONTENDERS[: 1 if alone else 2 if best else 3]
    outcomes = []
    for case in chosen:
        with TemporaryDirectory() as folder:
            case = replace(case, rounds=rounds or case.rounds)
            outcomes.append(race(case, Path(folder), contenders=contenders))
    precision = compute_dtype("auto", torch.device("cpu"))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {precision}"
    CONSOLE.print(f"{versions}, {torch.get_num_threads()} threads", highlight=False)
    CONSOLE.print(table(race_rows(outcomes)))
    write(output, {"cases": [{"name": outcome.case.name, "steps": outcome.steps} for outcome in outcomes]})
    return conclude(race_verdicts(outcomes))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
