"""Does it learn? Five seeds of the demo, and rate 0: the tables and picture of docs/measurements.md.

    python scripts/learning_curve.py --output runs/learning

Finished runs are kept in the output folder, so a stopped command goes on where it was.
"""

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro
import yaml
from benchmarks.learning import change_rows, demo_config, draw, heldout_prompts, train_grpo
from benchmarks.results import CONSOLE, conclude, table
from loguru import logger

from grpo.config import Config, from_plain
from grpo.evaluate.quality import MODES, load_quality, measure, save_quality
from grpo.logs.screen import configure_logging
from grpo.model.load import load_policy
from grpo.model.target import choose_device
from grpo.types import Prompt

SAMPLES = 4
"""Samples of each held-out prompt."""


def main(
    output: Path = Path("runs/learning"),
    seeds: int = 5,
    steps: int | None = None,
    batch_size: int | None = None,
    heldout: int = 1000,
    controls: bool = True,
    minutes: float | None = None,
    change: tuple[str, ...] = (),
) -> int:
    """Run what is missing, then print the tables and draw learning.png; 1 if rate 0 has moved anything.

    Args:
        output: Folder of the runs, the scores and the picture.
        seeds: Seeds of the demo's settings.
        steps: Fewer steps than the demo's, for a quick look.
        batch_size: Completions a step in place of the demo's, likewise.
        heldout: Held-out prompts of each task.
        controls: Learning rate 0 as well.
        minutes: Limit of each run in place of the demo's, for a machine that is busy with other work.
        change: Other settings than the demo's, such as "credit=whole" "kl_coef=0.02"; give another output.
    """
    if seeds < 1:
        sys.exit(f"--seeds is {seeds}: give at least 1.")
    configure_logging("WARNING", CONSOLE)
    changes = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in change)}
    config = demo_config(
        runs_dir=output, eval_interval=0, steps=steps, batch_size=batch_size, minutes=minutes
    )
    config = from_plain(changes, config)
    output.mkdir(parents=True, exist_ok=True)
    names = [f"seed-{seed}" for seed in range(seeds)]
    settings = {"before": config} | {name: replace(config, seed=seed) for seed, name in enumerate(names)}
    if controls:  # nothing can move at rate 0, so a few steps show it
        settings["rate-0"] = replace(config, steps=min(4, config.steps), learning_rate=0.0)
    prompts = heldout_prompts(config, heldout)
    for name, its_config in settings.items():
        if not (output / f"{name}-greedy.json").exists():
            _run(name, its_config, prompts)
    results = {name: load_quality(output, name) for name in settings}
    times = sorted(float((output / f"{name}.minutes").read_text(encoding="utf-8")) for name in names)
    took = f"{times[0]:.1f} to {times[-1]:.1f} minutes, seeds: {seeds}"
    CONSOLE.print(f"GRPO for {took}. In percent, of the reward that of the most it can be.\n")
    unmoved = True
    for mode in MODES:
        before, *after = (results[name][mode] for name in ("before", *names))
        CONSOLE.print(table(change_rows(before, after), f"Held out, {mode}"))
        still = results["rate-0" if controls else "before"][mode].scores
        unmoved &= all(np.array_equal(still[column], before.scores[column]) for column in still)
    draw(output, results, names, output / "learning.png")
    CONSOLE.print(f"picture: {output / 'learning.png'}")
    return conclude({"at learning rate 0 no score moves": unmoved}) if controls else 0


def _run(name: str, config: Config, prompts: list[Prompt]) -> None:
    """Train, unless it is the model before, measure and save both. An unfinished run starts anew: its
    minutes are part of the result.
    """
    output, start = config.runs_dir, time.monotonic()
    shutil.rmtree(output / name, ignore_errors=True)
    if name == "before":
        policy = load_policy(config.model, choose_device(config.device), config.precision)
    else:
        _, policy, stopped = train_grpo(replace(config, name=name), CONSOLE)
        if stopped:
            sys.exit(130)
    minutes = (time.monotonic() - start) / 60
    (output / f"{name}.minutes").write_text(f"{minutes:.3f}", encoding="utf-8")
    save_quality(measure(policy, config, prompts, samples=SAMPLES), output, name)
    logger.warning("{}: trained for {:.1f} minutes", name, minutes)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
