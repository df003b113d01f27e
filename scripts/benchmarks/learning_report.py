"""The table and the picture of scripts/learning_curve.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table

from grpo.evaluate import Evaluation
from grpo.evaluate.quality import Quality
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.workbench.pictures import picture

RESAMPLES = 5_000
MARGIN = -0.02
"""A column has fallen if its change is significantly below this."""


def seed_bootstrap(
    before: Evaluation, after: Sequence[Evaluation], column: str, *, seed: int = 0
) -> np.ndarray:
    """Resampled mean changes of a column, (RESAMPLES,): seeds and prompts are both drawn anew."""
    changes = np.stack([each.scores[column] - before.scores[column] for each in after])  # (S, prompts)
    rng = np.random.default_rng(seed)
    num_seeds, num_prompts = changes.shape
    drawn = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), RESAMPLES) / num_seeds
    prompts = rng.integers(num_prompts, size=(RESAMPLES, num_prompts))
    return np.take_along_axis(drawn @ changes, prompts, axis=1).mean(1)


def fallen(before: Evaluation, after: Sequence[Evaluation], columns: Sequence[str]) -> list[str]:
    """Columns whose change is significantly below −2 points, Holm-corrected at 5 %."""
    p_values = {column: float((seed_bootstrap(before, after, column) >= MARGIN).mean()) for column in columns}
    result: list[str] = []
    for rank, (column, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > 0.05 / (len(columns) - rank):
            break
        result.append(column)
    return result


def report(results: Mapping[str, Quality], minutes: Mapping[str, float]) -> Group:
    """One table each for sampled and greedy: before, mean over seeds with its interval, controls."""
    seeds = [name for name in results if name.startswith("seed-")]
    controls = [name for name in results if name not in ("before", *seeds)]
    parts: list[Table | str] = []
    for how in ("sampled", "greedy"):
        evaluations = {name: getattr(quality, how) for name, quality in results.items()}
        before, after = evaluations["before"], [evaluations[name] for name in seeds]
        times = sorted(minutes[name] for name in seeds)
        took = f"{times[0]:.1f}" + (f" to {times[-1]:.1f}" if len(times) > 1 else "")
        against = f" Controls, changes only: {', '.join(controls)}." if controls else ""
        parts.append(
            f"Held out, {how}, in percent (reward in hundredths); GRPO for {took} minutes, "
            f"seeds: {len(seeds)}.{against}\n"
        )
        table = Table("", "before", "GRPO", "change", "95 %", "each seed", *controls, box=box.MARKDOWN)
        for column in table.columns[1:]:
            column.justify = "right"
        for column in before.scores:
            means = seed_bootstrap(before, after, column)
            low, high = np.quantile(means, [0.025, 0.975])
            was = before.mean(column)
            changes = [each.mean(column) - was for each in after]
            change = float(np.mean(changes))
            table.add_row(
                column, _points(was), _points(was + change), _signed(change),
                f"{_signed(low)} to {_signed(high)}", " ".join(_signed(each) for each in changes),
                *(_signed(evaluations[name].mean(column) - was) for name in controls),
            )  # fmt: skip
        lost = fallen(before, after, list(before.scores))
        parts += [table, f"Significantly below -2 points ({how}): {', '.join(lost) or 'no column'}.\n"]
    return Group(*parts)


def _points(value: float) -> str:
    return f"{100 * value:.1f}"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}"


def draw(runs: Path, results: Mapping[str, Quality], names: Sequence[str], file: Path) -> None:
    """Left: the training reward of every seed. Right: held-out quality before and after."""
    with picture(file, (11, 4.2), layout=None, ncols=2, width_ratios=(1, 1.25)) as (left, right):
        for name in names:
            records = [r for r in read_lines(runs / name / METRICS_FILE) if "reward" in r]
            steps, rewards = (np.array([r[key] for r in records]) for key in ("step", "reward"))
            window = max(1, len(rewards) // 20)
            smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
            left.plot(steps[window - 1 :], smooth, linewidth=1.2, alpha=0.8, label=name.replace("-", " "))
        left.set(xlabel="step", ylabel="reward, sampled", title="Training reward, moving mean")
        left.legend(frameon=False, fontsize=8)

        columns = [c for c in results["before"].sampled.scores if c != "reward"]
        places = np.arange(len(columns))[::-1]
        for how, shift, color in (("sampled", 0.15, "tab:blue"), ("greedy", -0.15, "tab:orange")):
            before = np.array([getattr(results["before"], how).mean(c) for c in columns]) * 100
            after = np.array([[getattr(results[n], how).mean(c) for c in columns] for n in names]) * 100
            right.hlines(places + shift, before, after.mean(0), color=color, linewidth=2)
            right.plot(before, places + shift, "o", color="white", markeredgecolor=color, markersize=5)
            right.plot(after.mean(0), places + shift, "o", color=color, markersize=5, label=f"{how}, after")
            for row in after:
                right.plot(row, places + shift, "|", color=color, markersize=6, alpha=0.6)
        right.set_yticks(
            places, [c.replace("policy/", "policy: ").replace("environment/", "env.: ") for c in columns]
        )
        right.set(
            xlabel="held-out prompts, percent", title="Before (hollow) and after (filled), ticks: each seed"
        )
        right.legend(frameon=False, fontsize=8, loc="lower left")
        left.figure.tight_layout()
