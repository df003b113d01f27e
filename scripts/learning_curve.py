"""Does it learn? Five seeds of the demo with two controls: the table and picture of docs/measurements.md.

    python scripts/learning_curve.py --output runs/learning

Finished runs are kept in the output folder, so a stopped command goes on where it was.
"""

import math
import shutil
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tyro
import yaml
from benchmarks.learning import demo_config, heldout_prompts, play_untrained, train_grpo, train_supervised
from benchmarks.learning_report import draw, report
from benchmarks.verdicts import conclude
from loguru import logger

from grpo.commands.screen import screen
from grpo.config import Config, from_flat
from grpo.evaluate.quality import MODES, Quality, measure
from grpo.model.load import Policy, load_policy
from grpo.model.target import choose_device
from grpo.play.match import GAMES
from grpo.run.screen import configure_logging

SAMPLES = 4
"""Of each held-out prompt."""


def main(
    output: Path = Path("runs/learning"),
    seeds: int = 5,
    steps: int | None = None,
    batch_size: int | None = None,
    heldout: int = 1000,
    games: int = 200,
    controls: bool = True,
    minutes: float | None = None,
    change: tuple[str, ...] = (),
) -> int:
    """Run what is missing, then print the table and draw learning.png; 1 if rate 0 has moved anything.

    Args:
        output: Folder of the runs, the scores and the picture.
        seeds: Seeds of the demo's settings.
        steps: Fewer steps than the demo's, for a quick look.
        batch_size: Completions a step in place of the demo's, likewise.
        heldout: Held-out prompts of each task.
        games: Games in each mode against the untrained model, two from each of so many held-out positions.
        controls: Learning rate 0, and supervised training for as long as GRPO took with seed 0.
        minutes: Limit of each run in place of the demo's, for a machine that is busy with other work.
        change: Other settings than the demo's, such as "credit=whole" "kl_coef=0.02"; give another output.
    """
    console = screen(width=130)  # the table is for docs/measurements.md, whatever the terminal
    configure_logging("WARNING", console)
    config = demo_config(
        runs_dir=output, eval_interval=0, steps=steps, batch_size=batch_size, minutes=minutes
    )
    config = from_flat(dict(map(_setting, change)), config)
    prompts = heldout_prompts(config, heldout)
    fens = [prompt.columns["fen"] for prompt in prompts if prompt.task == "policy"][: games // 2]
    output.mkdir(parents=True, exist_ok=True)

    @cache
    def untrained() -> Policy:
        return load_policy(config.model, choose_device(config.device), config.precision)

    def run(name: str, settings: Config) -> None:
        if (output / f"{name}-greedy.json").exists():
            return
        # An unfinished run starts anew: its minutes are part of the result.
        shutil.rmtree(output / name, ignore_errors=True)
        start = time.monotonic()
        if name == "supervised":
            limit = settings.minutes or math.inf
            policy = train_supervised(settings, minutes=min(limit, _minutes(output / "seed-0.minutes")))
        elif name == "before":
            policy = untrained()
        else:
            _, policy, stopped = train_grpo(replace(settings, name=name), console)
            if stopped:
                sys.exit(130)
        minutes = (time.monotonic() - start) / 60
        (output / f"{name}.minutes").write_text(f"{minutes:.3f}")
        quality = measure(policy, settings, prompts, samples=SAMPLES)
        if fens:
            quality |= play_untrained(None if name == "before" else policy, untrained(), settings, fens)
        quality.save(output, name)
        logger.warning("{}: trained for {:.1f} minutes", name, minutes)

    names = [f"seed-{seed}" for seed in range(seeds)]
    run("before", config)
    for seed, name in enumerate(names):
        run(name, replace(config, seed=seed))
    shown = ["before", *names]
    if controls:
        # Nothing can move at rate 0, so a few steps show it.
        unmoved = replace(config.optimizer, learning_rate=0.0)
        run("rate-0", replace(config, steps=min(4, config.steps), optimizer=unmoved))
        run("supervised", config)
        shown += ["rate-0", "supervised"]

    results = {name: Quality.load(output, name) for name in shown}
    console.print(report(results, {name: _minutes(output / f"{name}.minutes") for name in shown}))
    draw(output, results, names, output / "learning.png")
    console.print(f"picture: {output / 'learning.png'}")
    still = controls and all(
        np.array_equal(scores, getattr(results["before"], mode).scores[name])
        for mode in MODES
        for name, scores in getattr(results["rate-0"], mode).scores.items()
        if name != GAMES
    )
    return conclude({"at learning rate 0 no score moves": still} if controls else {}, console)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


def _minutes(file: Path) -> float:
    return float(file.read_text())


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
