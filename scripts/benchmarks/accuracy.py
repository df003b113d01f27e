"""Whole runs: what tensors were said to add before they did, against what was counted."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from loguru import logger
from rich import box
from rich.table import Table

from benchmarks.limits import Outcome, run_command
from benchmarks.random_gpt2 import GPT2_124M, SHAPE_OF_30M, make_random_gpt2
from grpo.model.target import multiplies_in_bf16

SHAPES = {
    "endless": {"n_layer": 6, "n_head": 6, "n_embd": 192, "n_positions": 512},
    "30m": SHAPE_OF_30M,
    "124m": GPT2_124M,
}
"""Of models with random weights, whose texts hardly end."""
KINDS = {
    "fp32": ("--precision", "fp32"), "bf16": ("--precision", "bf16"),
    "auto": (), "lora": ("--lora-rank", "16"),
}  # fmt: skip
RUNS = {
    ("rook-tiny", "fp32"): (8, 32, 128, 512), ("rook-tiny", "bf16"): (8, 64, 512),
    ("rook-tiny", "lora"): (16, 256),
    ("endless", "fp32"): (8, 64, 256, 512), ("endless", "bf16"): (16, 128), ("endless", "lora"): (64,),
    ("30m", "fp32"): (8, 32, 64), ("30m", "bf16"): (16,), ("30m", "lora"): (32,),
    ("124m", "fp32"): (8,), ("124m", "auto"): (16,), ("124m", "lora"): (16,),
}  # fmt: skip
"""Batch sizes by model and kind: 24 runs, and 19 where there are no products in bf16."""
QUICK = {
    ("rook-tiny", "fp32"): (64,), ("rook-tiny", "bf16"): (8,), ("rook-tiny", "lora"): (16,),
    ("endless", "fp32"): (16,),
}  # fmt: skip
PHASES = ("sample", "score", "learn")
MEDIAN, WORST = 0.02, 0.08


@dataclass(frozen=True)
class Compared:
    """The pass of a run's phase that was furthest off. Bytes that its tensors add."""

    run: str
    phase: str
    rows: int
    said_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.said_bytes / self.measured_bytes - 1


def accuracy_runs(folder: Path, *, quick: bool) -> Iterator[tuple[Outcome, list[Compared]]]:
    """Runs of two steps, and what of them can be compared."""
    for (model, kind), sizes in (QUICK if quick else RUNS).items():
        if kind == "bf16" and not multiplies_in_bf16(torch.device("cpu")):
            sizes = sizes[:1] if model == "rook-tiny" else ()  # emulated, a step takes minutes
        source = folder / model
        if model in SHAPES and not source.exists():
            make_random_gpt2(source, **SHAPES[model])
        for size in sizes:
            name = f"{model} {kind} {size}"
            options = ["--model", str(source) if model in SHAPES else model, *KINDS[kind]]
            options += ["--batch-size", str(size), "--max-new-tokens", "48"]
            run = run_command(name, options, steps=2)
            found = list(_compared(run, size))
            logger.info("{}: status {}, {}", name, run.status, [f"{each.error:+.1%}" for each in found])
            yield run, found


def _compared(run: Outcome, batch_size: int) -> Iterator[Compared]:
    """Of each phase that is planned all at once, the first two steps' predictions, made before each."""
    planned = re.search(r"rows at once" + 3 * r"\D+(\d+)", run.said)
    for phase, rows in zip(PHASES, planned.groups() if planned else (), strict=False):
        each = [
            Compared(run.name, phase, line["rows"], line["predicted_bytes"], line["added_bytes"])
            for line in run.passes
            if line["phase"] == phase and line["added_bytes"] and line["predicted_bytes"] is not None
        ]
        if each and int(rows) >= batch_size:
            yield max(each, key=lambda one: abs(one.error))


def accuracy_table(found: Iterable[Compared]) -> Table:
    table = Table(title="MB that tensors add", title_justify="left", box=box.MARKDOWN)
    for column in ("run", "phase", "rows", "said before", "measured", "off by"):
        table.add_column(column, justify="left" if column in ("run", "phase") else "right")
    for each in found:
        sizes = (f"{size / 2**20:.1f}" for size in (each.said_bytes, each.measured_bytes))
        table.add_row(each.run, each.phase, str(each.rows), *sizes, f"{each.error:+.1%}")
    return table


def accuracy_verdicts(runs: Sequence[Outcome], found: Sequence[Compared]) -> dict[str, bool]:
    retries, phases = sum(run.retries for run in runs), len(PHASES) * len(runs)
    middle = median([abs(each.error) for each in found] or [1.0])
    verdicts = {
        f"{len(runs)} runs, and all end well": bool(runs) and not any(run.status for run in runs),
        f"{len(found)} of {phases} phases are compared (at least half)": 2 * len(found) >= phases,
        f"in the median they are off by {middle:.2%} (at most {MEDIAN:.0%})": middle <= MEDIAN,
        f"memory ran out {retries} times (never)": retries == 0,
    }
    for phase in PHASES:
        worst = max((each.error for each in found if each.phase == phase), key=abs, default=0.0)
        verdicts[f"{phase}: at worst {worst:+.2%} (at most {WORST:.0%})"] = abs(worst) <= WORST
    return verdicts
