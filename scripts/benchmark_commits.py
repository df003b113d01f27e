"""Is a step faster, or smaller, than at another commit? Runs the same training command on both, in turns.

    python scripts/benchmark_commits.py 91fec43 -- --batch-size 64 --max-new-tokens 144
    python scripts/benchmark_commits.py 91fec43 -- --model smollm2 --prompts gym:chain_sum \\
        --reward gym:chain_sum --batch-size 64 --max-new-tokens 256 --precision bf16

Both sample the same texts with the same seeds; the learning rate is next to nothing, so that they go on doing
so. The other commit is checked out beside this one, and needs nothing but what this one's environment has.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import tyro
from benchmarks.results import CONSOLE, conclude, in_turns, table, times_as_much

ROOT = Path(__file__).resolve().parents[1]
PHASES = "sample", "score", "learn"
NO_CHANGE = "--learning-rate", "1e-12", "--eval-interval", "0", "--checkpoint-interval", "1000000"


def main(
    commit: tyro.conf.Positional[str],
    flags: tyro.conf.Positional[tuple[str, ...]] = (),
    rounds: int = 3,
    steps: int = 4,
    least: float | None = None,
) -> int:
    """Prints seconds by phase and the peak of memory, here and there, and the ratios there over here.

    Args:
        commit: The other commit.
        flags: Of train_lean.py, behind `--`.
        rounds: Runs of each.
        steps: Steps of a run; the first does not count.
        least: The exit status is 1 unless scoring and learning together took that many times as long there.
    """
    if steps < 2 or rounds < 1:
        sys.exit(f"--steps is {steps}, --rounds {rounds}: give at least 2 steps and 1 round.")
    with TemporaryDirectory() as folder:
        there = Path(folder) / "there"
        git = "git", "-C", str(ROOT), "worktree"
        subprocess.run([*git, "add", "--detach", "--quiet", str(there), commit], check=True)
        try:
            command = [*flags, *NO_CHANGE, "--steps", str(steps), "--runs-dir", folder]
            trees = {"here": ROOT, commit: there}
            runs = {name: partial(_run, tree, command) for name, tree in trees.items()}
            found = in_turns(runs, rounds)
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)
    names = [f"timing/{phase}_s" for phase in PHASES]
    rows, ratios = [], {}
    for name, parts in {**{name: [name] for name in names}, "score and learn": names[1:]}.items():
        seconds = {side: [_median(steps, parts) for steps in of_rounds] for side, of_rounds in found.items()}
        if not any(seconds["here"]):
            continue
        ratio, low, high = times_as_much(seconds[commit], seconds["here"])
        ratios[name] = ratio
        shown = {side: f"{median(values):.3g}" for side, values in seconds.items()}
        rows.append({"seconds a step": name, **shown, "times": f"{ratio:.2f} ({low:.2f} to {high:.2f})"})
    peaks = {side: _median([steps[-1] for steps in runs], ["memory/peak_gb"]) for side, runs in found.items()}
    rows.append(
        {
            "seconds a step": "peak, GB",
            **{side: f"{peak:.2f}" for side, peak in peaks.items()},
            "times": f"{peaks[commit] / peaks['here']:.2f}",
        }
    )
    CONSOLE.print(table(rows, title=" ".join(flags)))
    tokens = [
        [step["completions/mean_length"] for step in steps] for runs in found.values() for steps in runs
    ]
    verdicts = {f"both sampled texts alike ({tokens[0][0]:.1f} tokens a row)": _alike(tokens)}
    if least is not None:
        ratio = ratios["score and learn"]
        verdicts[f"scoring and learning took {ratio:.2f} times as long there (at least {least})"] = (
            ratio >= least
        )
    return conclude(verdicts)


def _run(tree: Path, command: list[str]) -> list[dict[str, float]]:
    """Metrics of a run's steps but the first, by the code in a folder."""
    runs = Path(command[-1])
    before = set(runs.glob("*/metrics.jsonl"))
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    script = [sys.executable, str(tree / "train_lean.py"), *command]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree.name}: {' '.join(command)}\n{done.stderr[-2000:]}")
    (metrics,) = set(runs.glob("*/metrics.jsonl")) - before
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "step_time" in line][1:]


def _median(steps: list[dict[str, float]], names: list[str]) -> float:
    return median(sum(step.get(name, 0.0) for name in names) for step in steps)


def _alike(tokens: list[list[float]]) -> bool:
    """Whether lengths of texts differ by no more than rounding makes some rows differ."""
    firsts = [steps[0] for steps in tokens]
    return max(firsts) - min(firsts) <= 0.05 * max(firsts)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
