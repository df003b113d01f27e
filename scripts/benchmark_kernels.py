"""What each kernel for CPUs is worth: runs with all of them, and with all but one, in turn.

python scripts/benchmark_kernels.py                       # rook-tiny, in the device's precision
python scripts/benchmark_kernels.py --precision fp32 --model FOLDER --rounds 2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.verdicts import conclude
from rich.progress import track
from rich.table import Table

from grpo.commands.screen import screen
from grpo.environment import NO_THREAD_CACHE
from grpo.model.cpu import KERNELS, SWITCH

TRAIN = Path(__file__).parents[1] / "train_lean.py"
PHASES = ("sample", "score", "learn")
WITHOUT_RESTART = {"GLIBC_TUNABLES": NO_THREAD_CACHE.replace("=0", "=7")}
"""What malloc does anyway: `grpo.environment` leaves what a user has set as it is."""


class Outcome(NamedTuple):
    """Medians over a run's steps but the first, and its highest peak."""

    seconds: dict[str, float]
    peak_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="rook-tiny", help="what is trained (rook-tiny)")
    parser.add_argument("--precision", default="auto", help="of products: auto, bf16 or fp32 (auto)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a run (8)")
    parser.add_argument("--batch-size", type=int, default=64, help="completions a step (64)")
    given = parser.parse_args()
    others = {"all of them": {}, **{f"without {name}": without(name) for name in KERNELS}}
    others |= {"without any": {SWITCH: "0"}, "without a restart for malloc": WITHOUT_RESTART}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in others}
    turns = [(name, changes) for _ in range(given.rounds) for name, changes in others.items()]
    for name, changes in track(turns, console=screen(stderr=True)):
        outcomes[name].append(run(given, changes))
    screen(width=100).print(table(outcomes, given.model))
    return conclude(verdicts(outcomes), screen(width=100))


def without(kernel: str) -> Mapping[str, str]:
    return {SWITCH: ",".join(name for name in KERNELS if name != kernel)}


def run(given: argparse.Namespace, changes: Mapping[str, str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model": given.model, "precision": given.precision, "batch-size": given.batch_size,
            "steps": given.steps, "eval-interval": 0, "checkpoint-interval": 0, "engine": "off",
            "runs-dir": folder, "name": "run", "log-level": "ERROR",
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        environment = {**os.environ, **changes}
        done = subprocess.run(
            [sys.executable, str(TRAIN), *words], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{changes}: {done.stderr[-2000:]}")
        steps = _lines(Path(folder, "run", "metrics.jsonl"))[1:]
        phases = _lines(Path(folder, "run", "memory.jsonl"))
    seconds = {phase: statistics.median(step[f"timing/{phase}_s"] for step in steps) for phase in PHASES}
    seconds["step"] = statistics.median(step["step_time"] for step in steps)
    return Outcome(seconds, max(phase["process_bytes"] for phase in phases))


def _lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def table(outcomes: Mapping[str, list[Outcome]], model: str) -> Table:
    """Ratios of each round to the round's run with all kernels: the median, and the least and largest."""
    first, *rest = outcomes
    base = outcomes[first]
    shown = Table(
        title=f"{model}: time and memory as a multiple of those with all kernels", title_justify="left"
    )
    for column in ("", *PHASES, "step", "peak"):
        shown.add_column(column, justify="right" if column else "left")
    seconds = {name: statistics.median(each.seconds[name] for each in base) for name in base[0].seconds}
    peak = statistics.median(each.peak_bytes for each in base)
    shown.add_row(first, *(f"{seconds[name]:.3f} s" for name in (*PHASES, "step")), f"{peak / 2**30:.2f} GB")
    for name in rest:
        pairs = list(zip(outcomes[name], base, strict=True))
        columns = [[one.seconds[key] / all_.seconds[key] for one, all_ in pairs] for key in (*PHASES, "step")]
        columns.append([one.peak_bytes / all_.peak_bytes for one, all_ in pairs])
        cells = (f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in columns)
        shown.add_row(name, *cells)
    return shown


def verdicts(outcomes: Mapping[str, list[Outcome]]) -> dict[str, bool]:
    """What holds in any precision: in fp32 kernels save memory, not time."""
    pairs = list(zip(outcomes["all of them"], outcomes["without any"], strict=True))
    seconds = statistics.median(one.seconds["step"] / none.seconds["step"] for one, none in pairs)
    peak = statistics.median(one.peak_bytes / none.peak_bytes for one, none in pairs)
    return {
        f"a step with all of them takes {seconds:.2f} of one without any (at most 1.25)": seconds <= 1.25,
        f"and holds {peak:.2f} of its memory (at most 1.03)": peak <= 1.03,
    }


if __name__ == "__main__":
    sys.exit(main())
