"""How well memory is predicted, in whole runs on the CPU: what tensors were said to add, and did.

    python scripts/benchmark_memory.py
    python scripts/benchmark_memory.py --tails
    python scripts/benchmark_memory.py --masters
    python scripts/benchmark_memory.py --card 24GB

With `--tails`: how many rows of long answers are sampled at once if they are planned by what such texts take,
and how many tokens are sampled twice where they turn out longer. With `--masters`: what whole training takes
whose weights are in bf16, with fp32 masters in the optimizer alone, beside fp32 weights and copies of them.
With `--card`: how many rows of larger models fit a card, by dry run.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro
from benchmarks.models import (
    GPT2_3M,
    GPT2_30M,
    GPT2_124M,
    LLAMA_3B,
    QWEN_0_5B,
    QWEN_1_5B,
    write_model,
    write_shape,
)
from benchmarks.results import CONSOLE, conclude, table, write
from loguru import logger

from grpo.config import Config
from grpo.logs.screen import configure_logging
from grpo.logs.tracking import MEMORY_FILE, METRICS_FILE, read_lines
from grpo.model.target import make_target, multiplies_in_bf16
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload

ROOT = Path(__file__).parents[1]
SHAPES = {"3m": GPT2_3M, "30m": GPT2_30M, "124m": GPT2_124M}
"""Shapes of models with random weights, whose texts never end."""
KINDS = {
    "fp32": ("--precision", "fp32"),
    "bf16": ("--precision", "bf16"),
    "auto": (),
    "lora": ("--lora-rank", "16"),
}
WHOLE = {"124 M": GPT2_124M, "1.5 B": QWEN_1_5B, "3 B": LLAMA_3B}
LARGER = {"0.5 B": QWEN_0_5B, "1.5 B": QWEN_1_5B, "3 B": LLAMA_3B}
WAYS = {
    "whole": (),
    "whole, 8-bit moments, no KL": ("--optimizer-kind", "adamw8bit", "--kl-coef", "0"),
    "LoRA, rank 16": ("--lora-rank", "16"),
    "LoRA, base in 4 bits": ("--lora-rank", "16", "--load-in-4bit"),
}
RUNS = {
    ("rook-tiny", "fp32"): (8, 32, 128, 512),
    ("rook-tiny", "bf16"): (8, 64, 512),
    ("rook-tiny", "lora"): (16, 256),
    ("3m", "fp32"): (8, 64, 256, 512),
    ("3m", "bf16"): (16, 128),
    ("3m", "lora"): (64,),
    ("30m", "fp32"): (8, 32, 64),
    ("30m", "bf16"): (16,),
    ("30m", "lora"): (32,),
    ("124m", "fp32"): (8,),
    ("124m", "auto"): (16,),
    ("124m", "lora"): (16,),
}
"""Batch sizes by model and kind: 24 runs, and 19 where there are no products in bf16."""
QUICK = {
    ("rook-tiny", "fp32"): (64,),
    ("rook-tiny", "bf16"): (8,),
    ("rook-tiny", "lora"): (16,),
    ("3m", "fp32"): (16,),
}
TWO_STEPS = "--device", "cpu", "--engine", "off", "--steps", "2", "--eval-interval", "0"
PHASES = ("sample", "score", "learn")
MEDIAN, WORST = 0.02, 0.08


@dataclass(frozen=True)
class MeasuredRun:
    """How a run ended, what it printed, and the lines of its memory.jsonl."""

    name: str
    size: int
    status: int
    printed: str
    passes: list[dict[str, Any]]

    def compared(self) -> Iterator[dict[str, Any]]:
        """Yields the predicted pass that is furthest off, of each phase that is planned all at once."""
        planned = re.search(r"rows at once" + 3 * r"\D+(\d+)", self.printed)
        for phase, rows in zip(PHASES, planned.groups() if planned else (), strict=False):
            errors = {
                line["predicted_bytes"] / line["added_bytes"] - 1: line
                for line in self.passes
                if line["phase"] == phase and line["added_bytes"] and line["predicted_bytes"] is not None
            }
            if errors and int(rows) >= self.size:
                line = errors[error := max(errors, key=abs)]
                yield {"run": self.name, "phase": phase, "error": error} | {
                    name: line[name] for name in ("rows", "predicted_bytes", "added_bytes")
                }


def main(
    quick: bool = False,
    tails: bool = False,
    masters: bool = False,
    card: str | None = None,
    output: Path | None = None,
) -> int:
    """Print what tensors add, against what was said before the first step; 1 if a bar is missed.

    Args:
        quick: Four runs of small models, not 24.
        tails: Rows at once of answers with tails instead, by dry run, and a run in which they turn out long.
        masters: The memory of whole training with and without weights in bf16 instead, by traces.
        card: A size such as 24GB, instead: rows of larger models that fit a card which is sold with it.
        output: A JSON file for every phase.
    """
    configure_logging("INFO", CONSOLE)
    if masters:
        return conclude(without_fp32_weights())
    if card:
        with TemporaryDirectory() as folder:
            return conclude(rows_on_card(Path(folder), card))
    if tails:
        with TemporaryDirectory() as folder:
            return conclude({**rows_of_tails(Path(folder)), **longer_than_planned(Path(folder))})
    runs: list[MeasuredRun] = []
    with TemporaryDirectory() as folder:
        try:
            runs.extend(train_all(Path(folder), QUICK if quick else RUNS))
        except KeyboardInterrupt:
            logger.warning("stopped: this is what was measured so far")
    rows = [row for run in runs for row in run.compared()]
    middle = median([abs(row["error"]) for row in rows] or [1.0])
    retries, phases = sum(line["retries"] for run in runs for line in run.passes), len(PHASES) * len(runs)
    verdicts = {
        f"{len(runs)} runs, and all end well": bool(runs) and not any(run.status for run in runs),
        f"{len(rows)} of {phases} phases are compared (at least half)": 2 * len(rows) >= phases,
        f"in the median they are off by {middle:.2%} (at most {MEDIAN:.0%})": middle <= MEDIAN,
        f"memory ran out {retries} times (never)": retries == 0,
    }
    for phase in PHASES:
        worst = max((row["error"] for row in rows if row["phase"] == phase), key=abs, default=0.0)
        verdicts[f"{phase}: at worst {worst:+.2%} (at most {WORST:.0%})"] = abs(worst) <= WORST
    shown = [
        {"run": row["run"], "phase": row["phase"], "rows": row["rows"]}
        | {f"{name}, MB": f"{row[f'{name}_bytes'] / 2**20:.1f}" for name in ("predicted", "added")}
        | {"off by": f"{row['error']:+.1%}"}
        for row in rows
    ]
    CONSOLE.print(table(shown, "What tensors add"))
    write(output, {"verdicts": verdicts, "rows": rows})
    return conclude(verdicts)


def train(*flags: object) -> subprocess.CompletedProcess[str]:
    """Runs the training command."""
    command = [sys.executable, ROOT / "train_lean.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True)


def train_all(folder: Path, chosen: dict[tuple[str, str], tuple[int, ...]]) -> Iterator[MeasuredRun]:
    """Two steps of each, in a folder of its own."""
    for (model, kind), sizes in chosen.items():
        if kind == "bf16" and not multiplies_in_bf16(torch.device("cpu")):
            sizes = sizes[:1] if model == "rook-tiny" else ()  # emulated, a step takes minutes
        if model in SHAPES and sizes and not (folder / model).exists():
            write_model(folder / model, SHAPES[model])
        for size in sizes:
            source, runs = (
                str(folder / model) if model in SHAPES else model,
                folder / f"{model}-{kind}-{size}",
            )
            ended = train(
                "--model",
                source,
                *KINDS[kind],
                "--batch-size",
                size,
                "--max-new-tokens",
                48,
                *TWO_STEPS,
                "--runs-dir",
                runs,
            )
            passes = [line for path in runs.glob(f"*/{MEMORY_FILE}") for line in read_lines(path)]
            printed = " ".join((ended.stdout + ended.stderr).split())
            run = MeasuredRun(f"{model} {kind} {size}", size, ended.returncode, printed, passes)
            errors = [f"{row['error']:+.1%}" for row in run.compared()]
            logger.info("{}: status {}, {}", run.name, run.status, errors)
            yield run


class InFp32(Workload):
    """Weights in fp32: the optimizer moves them themselves, and the sampler has a copy in bf16."""

    splits_masters = False


def without_fp32_weights() -> dict[str, bool]:
    """Compares the largest phase of whole training in bf16, and all that stays beside it.

    A group of 8 rows of 100 and 256 tokens, activations recomputed.
    """
    rows, saved = [], {}
    for (name, shape), kind, kl_coef in product(WHOLE.items(), ("adamw", "adamw8bit"), (0.0, 0.02)):
        config = Config(
            device="cpu",
            precision="bf16",
            batch_size=8,
            group_size=8,
            max_new_tokens=256,
            kl_coef=kl_coef,
            optimizer_kind=kind,
            gradient_checkpointing="full",
        )
        needs = []
        for workload in (InFp32, Workload):
            work = workload(config, make_target(shape, torch.device("cpu"), torch.bfloat16), 100)
            traced = TracedPhases(work)
            largest = max(traced.added_bytes(phase, work.size(8, phase)) for phase in work.phases)
            needs.append(sum(traced.phases.resident().values()) + largest)
        before, now = needs
        less = saved[name, kind, kl_coef] = 1 - now / before
        row = {"model": name, "optimizer": kind, "reference": "yes" if kl_coef else "no"}
        sizes = {"fp32, GB": f"{before / 2**30:.2f}", "bf16, GB": f"{now / 2**30:.2f}"}
        rows.append(row | sizes | {"less": f"{less:.1%}"})
    CONSOLE.print(table(rows, "Whole training, with weights in fp32 or in bf16"))
    found = {kind: saved["1.5 B", kind, 0.0] for kind in ("adamw", "adamw8bit")}
    return {
        f"1.5 B, {kind}: {less:.2%} less (at least a sixth)": less >= 1 / 6 for kind, less in found.items()
    }


def rows_of_tails(folder: Path) -> dict[str, bool]:
    """Rows that 24 GB hold of 3 B of Llama's shape, if all texts may be long, and by their average."""
    model = write_shape(folder / "llama", LLAMA_3B)
    rows, verdicts = [], {}
    for most, mean in ((2048, 600), (4096, 1200)):
        found = []
        for typical in ((), ("--typical-tokens", str(mean))):
            planned = train(
                "--dry-run",
                "--model",
                model,
                "--device",
                "cuda",
                "--precision",
                "bf16",
                "--lora-rank",
                16,
                "--load-in-4bit",
                "--batch-size",
                512,
                "--max-new-tokens",
                most,
                "--device-memory",
                "24GB",
                *typical,
            )
            planned.check_returncode()
            told = re.search(r"rows at once\D+(\d+)", planned.stdout + planned.stderr)
            found.append(int(told[1]) if told else 0)
        ratio = found[1] / max(1, found[0])
        rows.append({"new tokens": most, "on average": mean, "all long": found[0], "by average": found[1]})
        verdicts[f"{ratio:.2f} times as many rows of {mean} of {most} tokens (at least 2)"] = ratio >= 2
    CONSOLE.print(table(rows, "Rows sampled at once, 3 B of Llama's shape, 4 bits, 24 GB, by dry run"))
    return verdicts


def rows_on_card(folder: Path, card: str) -> dict[str, bool]:
    """Prints how many rows each phase takes at once, of batches of 64 with prompts of RookWorld's length."""
    rows, fits = [], False
    for (name, shape), (how, flags) in product(LARGER.items(), WAYS.items()):
        model = write_shape(folder / name, shape)
        row = {"model": name, "trained": how}
        for new_tokens in (512, 2048):
            words = ("--model", model, "--device-memory", card, "--batch-size", 64, "--max-new-tokens")
            planned = train("--dry-run", *words, new_tokens, *flags)
            printed = planned.stdout + planned.stderr
            told = re.search(r"rows at once\D.*", printed)
            needs = re.search(r"As it is, ([\d.]+ GB)", printed)
            lack = f"needs {needs[1]}" if needs else "does not fit"
            row[f"{new_tokens} new tokens"] = ", ".join(re.findall(r"\d+", told[0])) if told else lack
            fits = fits or told is not None
        rows.append(row)
        logger.info("{}", row)
    CONSOLE.print(table(rows, f"Rows at once to sample, score and learn, of 64, on a card of {card}"))
    return {"something fits": fits}


def longer_than_planned(folder: Path) -> dict[str, bool]:
    """A run in a limit on the host, whose texts are longer than is said to be typical."""
    model = write_model(folder / "3m", SHAPES["3m"])
    ended = train(
        "--model",
        model,
        "--batch-size",
        64,
        "--max-new-tokens",
        384,
        "--typical-tokens",
        230,
        "--memory-limit",
        "1.2GB",
        *TWO_STEPS,
        "--runs-dir",
        folder / "runs",
    )
    steps = [line for path in folder.glob(f"runs/*/{METRICS_FILE}") for line in read_lines(path)]
    told = [line for line in (ended.stdout + ended.stderr).splitlines() if "twice" in line or "plan:" in line]
    for line in told:
        CONSOLE.print(line.strip(), highlight=False)
    twice = [line["memory/tokens_twice"] for line in steps]
    return {
        f"in 1.2 GB texts that turn out long are sampled, status {ended.returncode}": not ended.returncode,
        f"tokens sampled twice: {', '.join(f'{share:.1%}' for share in twice)} (under 5 %)": len(twice) == 2
        and max(twice) < 0.05,
    }


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
