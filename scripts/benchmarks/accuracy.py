"""Whole runs: what tensors were said to add before they did, against what was counted."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from loguru import logger

from benchmarks.limits import Outcome, run_command
from benchmarks.models import GPT2_3M, GPT2_30M, GPT2_124M, write_model
from benchmarks.results import finish, until_stopped
from grpo.model.target import multiplies_in_bf16

SHAPES = {"3m": GPT2_3M, "30m": GPT2_30M, "124m": GPT2_124M}
"""Of models with random weights, whose texts never end."""
KINDS = {
    "fp32": ("--precision", "fp32"), "bf16": ("--precision", "bf16"),
    "auto": (), "lora": ("--lora-rank", "16"),
}  # fmt: skip
RUNS = {
    ("rook-tiny", "fp32"): (8, 32, 128, 512), ("rook-tiny", "bf16"): (8, 64, 512),
    ("rook-tiny", "lora"): (16, 256),
    ("3m", "fp32"): (8, 64, 256, 512), ("3m", "bf16"): (16, 128), ("3m", "lora"): (64,),
    ("30m", "fp32"): (8, 32, 64), ("30m", "bf16"): (16,), ("30m", "lora"): (32,),
    ("124m", "fp32"): (8,), ("124m", "auto"): (16,), ("124m", "lora"): (16,),
}  # fmt: skip
"""Batch sizes by model and kind: 24 runs, and 19 where there are no products in bf16."""
QUICK = {
    ("rook-tiny", "fp32"): (64,), ("rook-tiny", "bf16"): (8,), ("rook-tiny", "lora"): (16,),
    ("3m", "fp32"): (16,),
}  # fmt: skip
PHASES = ("sample", "score", "learn")
MEDIAN, WORST = 0.02, 0.08


def accuracy(quick: bool = False, output: Path | None = None) -> int:
    """What tensors add in whole runs of the command, against what was said before their first step.

    Args:
        quick: Four runs of small models, not 24.
        output: A JSON file for every phase.
    """
    with TemporaryDirectory() as folder:
        runs = until_stopped(_runs(Path(folder), QUICK if quick else RUNS))
    rows = [row for run in runs for row in _compared(run)]
    errors = {phase: [row["error"] for row in rows if row["phase"] == phase] for phase in PHASES}
    middle = median([abs(row["error"]) for row in rows] or [1.0])
    retries, phases = sum(run.retries for run in runs), len(PHASES) * len(runs)
    verdicts = {
        f"{len(runs)} runs, and all end well": bool(runs) and not any(run.status for run in runs),
        f"{len(rows)} of {phases} phases are compared (at least half)": 2 * len(rows) >= phases,
        f"in the median they are off by {middle:.2%} (at most {MEDIAN:.0%})": middle <= MEDIAN,
        f"memory ran out {retries} times (never)": retries == 0,
    }
    for phase, some in errors.items():
        worst = max(some, key=abs, default=0.0)
        verdicts[f"{phase}: at worst {worst:+.2%} (at most {WORST:.0%})"] = abs(worst) <= WORST
    shown = [
        {"run": row["run"], "phase": row["phase"], "rows": row["rows"]}
        | {f"{name}, MB": f"{row[f'{name}_bytes'] / 2**20:.1f}" for name in ("said", "measured")}
        | {"off by": f"{row['error']:+.1%}"}
        for row in rows
    ]
    return finish("What tensors add", shown, verdicts, rows, output)


def _runs(folder: Path, chosen: dict[tuple[str, str], tuple[int, ...]]) -> Iterator[Outcome]:
    for (model, kind), sizes in chosen.items():
        if kind == "bf16" and not multiplies_in_bf16(torch.device("cpu")):
            sizes = sizes[:1] if model == "rook-tiny" else ()  # emulated, a step takes minutes
        if model in SHAPES and sizes and not (folder / model).exists():
            write_model(folder / model, SHAPES[model])
        for size in sizes:
            source = str(folder / model) if model in SHAPES else model
            options = ["--model", source, *KINDS[kind], "--batch-size", str(size), "--max-new-tokens", "48"]
            run = run_command(f"{model} {kind} {size}", options, steps=2)
            errors = [f"{row['error']:+.1%}" for row in _compared(run)]
            logger.info("{}: status {}, {}", run.name, run.status, errors)
            yield run


def _compared(run: Outcome) -> Iterator[dict[str, Any]]:
    """Of each phase that is planned all at once, the pass that was predicted, before it, furthest off."""
    planned = re.search(r"rows at once" + 3 * r"\D+(\d+)", run.said)
    for phase, rows in zip(PHASES, planned.groups() if planned else (), strict=False):
        lines = [line for line in run.passes if line["phase"] == phase and line["added_bytes"]]
        errors = {
            line["predicted_bytes"] / line["added_bytes"] - 1: line
            for line in lines
            if line["predicted_bytes"] is not None
        }
        if errors and int(rows) >= int(run.name.split()[-1]):
            error = max(errors, key=abs)
            said, measured = errors[error]["predicted_bytes"], errors[error]["added_bytes"]
            row = {"run": run.name, "phase": phase, "rows": errors[error]["rows"]}
            yield {**row, "said_bytes": said, "measured_bytes": measured, "error": error}
