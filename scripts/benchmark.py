"""How fast is a step? Ours beside TRL 1.16 in its best configuration and as it comes, in one run.

python scripts/benchmark.py
python scripts/benchmark.py --decoding             # sampling alone, of another family
python scripts/benchmark.py --growth growth.png    # how our step's seconds grow
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
import tyro
from benchmarks.decoding import (
    decoding_table,
    decoding_verdicts,
    memory_verdicts,
    race_decoders,
    sampling_memory,
    sampling_memory_table,
)
from benchmarks.speed import (
    CONTENDERS,
    as_json,
    chosen,
    race,
    race_table,
    race_verdicts,
)
from benchmarks.speed_growth import GROWTH, ROUNDS, draw_growth, growth_table, measure_growth
from benchmarks.speed_limits import limit_table, measure_rates
from benchmarks.verdicts import conclude
from rich.console import Console
from transformers import GPT2Config

from grpo.commands.screen import screen
from grpo.model.names import BUNDLED_FOLDER
from grpo.model.target import compute_dtype
from grpo.run.screen import configure_logging


def main(
    only: str = "",
    alone: bool = False,
    best: bool = False,
    rounds: int | None = None,
    output: Path | None = None,
    growth: Path | None = None,
    decoding: bool = False,
    quick: bool = False,
) -> None:
    """Race, and print what was found. Needs trl (pip install -e '.[trl]').

    Args:
        only: Rows of the table whose name holds these words, such as "124 M".
        alone: Without TRL: our own phases beside the machine's limit.
        best: Against TRL in its best configuration alone, not as it comes too.
        rounds: Of each row; None: 5, or 2 of GPT-2 124 M. One has no interval, but shows memory.
        output: A JSON file for every step.
        growth: Measure our step at batches of 8 to 256 and 32 to 256 new tokens instead, and draw it here.
        decoding: Sampling alone instead, 8, 64 and 256 rows of Qwen's kind, beside Hugging Face's generate.
        quick: One round of the smallest, held against what is so on any machine and not against our goals: we
            are no slower than the others, and hold less.
    """
    if rounds is not None and rounds < 1:
        sys.exit(f"--rounds is {rounds}: give at least 1.")
    console = screen(width=150)  # the tables are for docs/measurements.md, whatever the terminal
    configure_logging("INFO", console)
    if growth is not None:
        sys.exit(grows_in_a_line(growth, console, quick))
    rounds = rounds or (1 if quick else None)
    if decoding:
        sys.exit(decodes_faster(rounds or 3, console, quick))
    contenders = CONTENDERS[: 1 if alone else 2 if best else 3]
    outcomes = []
    for case in chosen(only):
        case = case if rounds is None else replace(case, rounds=rounds)
        with TemporaryDirectory() as folder:
            outcomes.append(race(case, Path(folder), contenders=contenders))
    rates = measure_rates(compute_dtype("auto", torch.device("cpu")))
    console.print(f"torch {torch.__version__}, transformers {transformers.__version__}", highlight=False)
    console.print(f"{torch.get_num_threads()} threads: {rates}", highlight=False)
    console.print(race_table(outcomes))
    for outcome in outcomes:
        if outcome.case.model.startswith("Qwen"):
            continue  # the limit is known for GPT-2
        large = outcome.case.model.startswith("GPT-2")
        model = GPT2Config() if large else GPT2Config.from_pretrained(BUNDLED_FOLDER)
        case, steps = outcome.case, outcome.steps["ours"]
        prompts = case.batch_size // case.group_size
        console.print(
            limit_table(case.name, steps, model, rates, prompts=prompts, group_size=case.group_size)
        )
    if output is not None:
        output.write_text(json.dumps(as_json(outcomes, rates), indent=1) + "\n")
    sys.exit(conclude(race_verdicts(outcomes, goals=not quick), console))


def decodes_faster(rounds: int, console: Console, quick: bool) -> int:
    """Race, print: 0 if all bars are met."""
    outcomes = []
    for rows in (8,) if quick else (8, 64, 256):
        with TemporaryDirectory() as folder:
            outcomes.append(race_decoders(rows, rounds, Path(folder)))
    console.print(f"{torch.get_num_threads()} threads, {compute_dtype('auto', torch.device('cpu'))}")
    console.print(decoding_table(outcomes))
    held = list(sampling_memory(32 if quick else 256))
    console.print(sampling_memory_table(held))
    return conclude(decoding_verdicts(outcomes, goals=not quick) | memory_verdicts(held), console)


def grows_in_a_line(picture: Path, console: Console, quick: bool) -> int:
    """Measure, print, draw: 0 if no size is a cliff."""
    rounds = 1 if quick else ROUNDS
    lines = [measure_growth(axis, sizes[:3] if quick else sizes, rounds) for axis, sizes in GROWTH.items()]
    for line in lines:
        start, slope = line.fit
        console.print(growth_table(line))
        off, cliffs = f"{line.worst:.0%}", f"cliffs at {line.cliffs}" if line.cliffs else "no cliff"
        console.print(
            f"{line.axis}: {start:.2f} s + {slope:.4f} s each, at most {off} off the line; {cliffs}",
            highlight=False,
        )
    draw_growth(lines, picture)
    console.print(f"picture: {picture}")
    return conclude({f"{line.axis}: no size is a cliff": not line.cliffs for line in lines}, console)


if __name__ == "__main__":
    tyro.cli(main)
