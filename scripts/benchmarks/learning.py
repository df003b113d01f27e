"""Does it learn? Held-out quality before and after, and a picture of both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from grpo.config import Config
from grpo.config.reading import read_config
from grpo.data import load_prompts
from grpo.evaluate import Evaluation
from grpo.evaluate.quality import Quality
from grpo.logs.tracking import METRICS_FILE, read_lines
from grpo.model.load import Policy
from grpo.run.interrupt import stop_on_signal
from grpo.run.setup import open_run
from grpo.statistics import t_interval
from grpo.trainer import Trainer
from grpo.types import Prompt
from grpo.workbench.pictures import picture

DEMO_SETTINGS = Path(__file__).parents[2] / "grpo" / "assets" / "demo.yaml"


def demo_config(**changes: Any) -> Config:
    """The demo's settings, as the bundled YAML has them, but for changes that are not None."""
    changed = {name: value for name, value in changes.items() if value is not None}
    return replace(read_config(DEMO_SETTINGS), **changed)


def heldout_prompts(config: Config, count: int) -> list[Prompt]:
    """Up to `count` held-out prompts of each task."""
    return load_prompts(config.prompts, seed=config.seed, heldout_count=count).heldout


def train_grpo(config: Config, console: Console) -> tuple[Path, Policy, bool]:
    """Run the trainer; its folder, the trained policy, and whether Ctrl-C cut it short."""
    with stop_on_signal() as stop, open_run(config) as run:
        Trainer(run, console).train(stop)
        return run.folder, run.policy, stop.requested


def change_rows(before: Evaluation, after: Sequence[Evaluation]) -> Iterator[dict[str, str]]:
    """Yields by column, in percent: before, the mean over seeds, its change and the interval of that.

    The interval is over seeds, on these prompts; a single seed has none.
    """
    for column in before.scores:
        was = before.mean(column)
        changes = [evaluation.mean(column) - was for evaluation in after]
        low, high = t_interval(changes)
        change = float(np.mean(changes))
        interval = f"{_signed(low)} to {_signed(high)}" if len(changes) > 1 else "one seed"
        yield {
            "": column,
            "before": f"{100 * was:.1f}",
            "GRPO": f"{100 * (was + change):.1f}",
            "change": _signed(change),
            "95 %": interval,
            "each seed": " ".join(map(_signed, changes)),
        }


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}"


def draw(runs: Path, results: Mapping[str, Quality], names: Sequence[str], file: Path) -> None:
    """Left: the training reward of every seed. Right: held-out quality before and after."""
    with picture(file, (11, 4.2), layout=None, ncols=2, width_ratios=(1, 1.25)) as (left, right):
        for name in names:
            records = [line for line in read_lines(runs / name / METRICS_FILE) if "reward" in line]
            steps, rewards = (np.array([line[key] for line in records]) for key in ("step", "reward"))
            window = max(1, len(rewards) // 20)
            smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
            left.plot(steps[window - 1 :], smooth, linewidth=1.2, alpha=0.8, label=name.replace("-", " "))
        left.set(xlabel="step", ylabel="reward, sampled", title="Training reward, moving mean")
        left.legend(frameon=False, fontsize=8)

        columns = [column for column in results["before"]["sampled"].scores if column != "reward"]
        places = np.arange(len(columns))[::-1]
        for mode, shift, color in (("sampled", 0.15, "tab:blue"), ("greedy", -0.15, "tab:orange")):
            was, *now = (
                np.array([100 * results[name][mode].mean(column) for column in columns])
                for name in ("before", *names)
            )
            mean = np.mean(now, axis=0)
            right.hlines(places + shift, was, mean, color=color, linewidth=2)
            right.plot(was, places + shift, "o", color="white", markeredgecolor=color, markersize=5)
            right.plot(mean, places + shift, "o", color=color, markersize=5, label=f"{mode}, after")
            for seed in now:
                right.plot(seed, places + shift, "|", color=color, markersize=6, alpha=0.6)
        right.set_yticks(
            places, [c.replace("policy/", "policy: ").replace("environment/", "env.: ") for c in columns]
        )
        right.set(
            xlabel="held-out prompts, percent", title="Before (hollow) and after (filled), ticks: each seed"
        )
        right.legend(frameon=False, fontsize=8, loc="lower left")
        left.figure.tight_layout()
