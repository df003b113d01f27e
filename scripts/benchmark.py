"""How fast is a step? Ours beside TRL 1.16 in its best configuration and as it comes, in one run.

python scripts/benchmark.py
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
import tyro
from rich.console import Console
from transformers import GPT2Config

from grpo.experiments.speed import (
    CONTENDERS,
    as_json,
    chosen,
    race,
    race_table,
    race_verdicts,
)
from grpo.experiments.speed_limits import limit_table, measure_rates
from grpo.model import BUNDLED_FOLDER
from grpo.tracking import configure_logging


def main(only: str = "", alone: bool = False, output: Path | None = None) -> None:
    """Race, and print what was found. Needs trl (pip install -e '.[peer]').

    Args:
        only: Rows of the table whose name holds these words, such as "124 M".
        alone: Without TRL: our own phases beside the machine's limit.
        output: A JSON file for every step.
    """
    console = Console(width=150)  # the tables are for the README, whatever the terminal
    configure_logging("INFO", console)
    outcomes = []
    for case in chosen(only):
        with TemporaryDirectory() as folder:
            outcomes.append(race(case, Path(folder), contenders=CONTENDERS[:1] if alone else CONTENDERS))
    rates = measure_rates()
    console.print(f"torch {torch.__version__}, transformers {transformers.__version__}", highlight=False)
    console.print(
        f"{torch.get_num_threads()} threads: {rates.flops / 1e9:.0f} GFLOP/s in bf16, "
        f"{rates.bytes / 1e9:.1f} GB/s copied",
        highlight=False,
    )
    console.print(race_table(outcomes))
    for outcome in outcomes:
        large = outcome.case.model.startswith("GPT-2")
        model = GPT2Config() if large else GPT2Config.from_pretrained(BUNDLED_FOLDER)
        case, steps = outcome.case, outcome.steps["ours"]
        prompts = case.batch_size // case.group_size
        console.print(
            limit_table(case.name, steps, model, rates, prompts=prompts, group_size=case.group_size)
        )
    verdicts = race_verdicts(outcomes)
    for sentence, holds in verdicts.items():
        console.print(f"{'met   ' if holds else 'MISSED'} {sentence}", highlight=False)
    if output is not None:
        output.write_text(json.dumps(as_json(outcomes, rates), indent=1) + "\n")
    sys.exit(0 if all(verdicts.values()) else 1)


if __name__ == "__main__":
    tyro.cli(main)
