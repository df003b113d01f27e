"""Does it learn? Five seeds of the demo with two controls: the table and picture of docs/measurements.md.

    python scripts/learning_curve.py --output runs/learning

Finished runs are kept in the output folder, so a stopped command goes on where it was.
"""

import math
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import tyro
import yaml
from benchmarks.learning import (
    change_rows,
    demo_config,
    draw,
    fallen,
    heldout_prompts,
    play_untrained,
    train_grpo,
    train_supervised,
    untrained,
)
from benchmarks.results import CONSOLE, conclude, table
from loguru import logger

from grpo.config import Config, from_flat
from grpo.evaluate.quality import MODES, Quality, measure
from grpo.play.match import GAMES
from grpo.run.screen import configure_logging

SAMPLES = 4
"""Of each held-out prompt."""
CONTROLS = "rate-0", "supervised"


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
    if seeds < 1:
        sys.exit(f"--seeds is {seeds}: give at least 1.")
    configure_logging("WARNING", CONSOLE)
    changes = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in change)}
    config = demo_config(
        runs_dir=output, eval_interval=0, steps=steps, batch_size=batch_size, minutes=minutes
    )
    config = from_flat(changes, config)
    prompts = heldout_prompts(config, heldout)
    fens = [prompt.columns["fen"] for prompt in prompts if prompt.task == "policy"][: games // 2]
    first = cache(lambda: untrained(config))
    output.mkdir(parents=True, exist_ok=True)

    def run(name: str, settings: Config) -> None:
        if (output / f"{name}-greedy.json").exists():
            return
        # An unfinished run starts anew: its minutes are part of the result.
        shutil.rmtree(output / name, ignore_errors=True)
        start = time.monotonic()
        if name == "supervised":
            limit = settings.minutes or math.inf
            policy = train_supervised(settings, minutes=min(limit, _minutes(output, "seed-0")))
        elif name == "before":
            policy = first()
        else:
            _, policy, stopped = train_grpo(replace(settings, name=name), CONSOLE)
            if stopped:
                sys.exit(130)
        (output / f"{name}.minutes").write_text(f"{(time.monotonic() - start) / 60:.3f}")
        quality = measure(policy, settings, prompts, samples=SAMPLES)
        if fens:
            quality |= play_untrained(None if name == "before" else policy, first(), settings, fens)
        quality.save(output, name)
        logger.warning("{}: trained for {:.1f} minutes", name, _minutes(output, name))

    # Nothing can move at rate 0, so a few steps show it.
    unmoved = replace(config.optimizer, learning_rate=0.0)
    settings = {f"seed-{seed}": replace(config, seed=seed) for seed in range(seeds)}
    names = [*settings]
    settings = {"before": config} | settings
    if controls:
        settings["rate-0"] = replace(config, steps=min(4, config.steps), optimizer=unmoved)
        settings["supervised"] = config
    for name, each in settings.items():
        run(name, each)
    results = {name: Quality.load(output, name) for name in settings}
    times = sorted(_minutes(output, name) for name in names)
    took = f"{times[0]:.1f} to {times[-1]:.1f} minutes, seeds: {seeds}"
    CONSOLE.print(f"GRPO for {took}. In percent, reward in hundredths; of controls the change.\n")
    for mode in MODES:
        _report(mode, results, names)
    draw(output, results, names, output / "learning.png")
    CONSOLE.print(f"picture: {output / 'learning.png'}")
    if not controls:
        return 0
    return conclude({"at learning rate 0 no score moves": _is_unmoved(results)})


def _report(mode: str, results: Mapping[str, Quality], names: list[str]) -> None:
    before, *after = (getattr(results[name], mode) for name in ("before", *names))
    controls = {name: getattr(results[name], mode) for name in CONTROLS if name in results}
    CONSOLE.print(table(change_rows(before, after, controls), f"Held out, {mode}"))
    lost = ", ".join(fallen(before, after)) or "no column"
    CONSOLE.print(f"Significantly below -2 points ({mode}): {lost}.\n", highlight=False)


def _is_unmoved(results: Mapping[str, Quality]) -> bool:
    """Games aside, which differ by who plays."""
    for mode in MODES:
        before, still = (getattr(results[name], mode).scores for name in ("before", "rate-0"))
        if not all(np.array_equal(still[column], before[column]) for column in still if column != GAMES):
            return False
    return True


def _minutes(output: Path, name: str) -> float:
    return float((output / f"{name}.minutes").read_text())


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
