"""Does a real chat model learn a real task, and how fast? Ours beside TRL 1.16 in its best configuration.

    python scripts/chat_model.py smollm2
    python scripts/chat_curve.py smollm2 --output runs/chat

All sides train on the same problems with the same reward, rate and number of samples, in processes that take
turns step by step, so that what slows the machine slows all; seconds are those of their own steps. Every few
steps all answer the same held-out problems, greedily and with room to finish, which is not timed. Prints a
table, draws chat.png, and exits with 1 where our held-out accuracy has not risen by what docs/recipes/chat.md
says.

Our trainer leaves out groups of equal rewards. What a step takes where all groups are learned from is told by
a reward that hardly any two answers share:

    python scripts/chat_curve.py smollm2 --reward scripts/chat_curve.py:length --steps 4 --every 4 --seeds 1

`--sides trl drop-in` races TRL's trainer with ours that takes its place.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tyro
from benchmarks.contender import Name, Work
from benchmarks.results import CONSOLE, conclude, table, times_as_much, write
from benchmarks.speed import Worker
from loguru import logger

from grpo.data.gym import gym_rows
from grpo.logs.screen import configure_logging
from grpo.statistics import mean_interval
from grpo.workbench.pictures import picture

TASK = "gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"
RISE, SURELY = 0.15, 0.05
"""The least rise of held-out accuracy, and of the lower end of its interval."""


def main(
    model: tyro.conf.Positional[Path],
    output: Path = Path("runs/chat"),
    task: str = TASK,
    system: str | None = None,
    steps: int = 60,
    every: int = 12,
    seeds: int = 2,
    batch_size: int = 64,
    train_rows: int = 64,
    new_tokens: int = 24,
    learning_rate: float = 3e-5,
    temperature: float = 1.0,
    heldout: int = 200,
    sides: tuple[Name, ...] = ("ours", "trl"),
    reward: str = "gym",
) -> int:
    """Train, print and draw.

    Args:
        model: A chat model's folder.
        output: Folder of the figures and the picture.
        task: A task of reasoning-gym.
        system: A system prompt before each question.
        steps: Optimizer steps of each side and seed.
        every: Steps between looks at the held-out problems.
        seeds: How often, from another seed.
        batch_size: Completions a step, in groups of 8.
        train_rows: Of these learned from at once by both.
        new_tokens: Longest completion in training.
        learning_rate: Of AdamW, constant.
        temperature: Of sampling.
        heldout: Held-out problems.
        sides: Who trains.
        reward: What is learned, if not the task: by name, or file.py:function.
    """
    configure_logging("INFO", CONSOLE)
    output.mkdir(parents=True, exist_ok=True)
    files = {name: output / f"{name}.jsonl" for name in ("heldout", "prompts")}
    rows = gym_rows(task, as_messages=True)  # no two of which are the same
    apart = len(rows) // heldout  # of the held-out among all, which keeps the share of each kind
    parts = rows[::apart][:heldout], [row for number, row in enumerate(rows) if number % apart]
    for file, part in zip(files.values(), parts, strict=True):
        file.write_text("".join(f"{json.dumps(asked(row, system))}\n" for row in part), encoding="utf-8")
    work = Work(
        "ours",
        str(model),
        str(files["prompts"]),
        str(output),
        steps + 1,
        batch_size=batch_size,
        max_new_tokens=new_tokens,
        train_rows=train_rows,
        kl_coef=0.0,
        learning_rate=learning_rate,
        temperature=temperature,
        rewards=(reward,),
        heldout=str(files["heldout"]),
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        folder = output / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        found |= curves(replace(work, folder=str(folder), seed=seed), sides, every)
        write(output / "chat.json", found)
        draw(found, batch_size, output / "chat.png")
    first = [found[f"{sides[0]}, seed {name[-1]}"] for name in found]
    CONSOLE.print(table(map(row_for, found, found.values(), first)))
    CONSOLE.print(f"picture: {output / 'chat.png'}")
    return conclude(verdicts(found)) if reward == "gym" else 0


def length(completions: list[Any], **_: Any) -> list[float]:
    """Characters of each answer, as a reward."""
    return [float(len(answer[-1]["content"])) for answer in completions]


def asked(row: dict[str, Any], system: str | None) -> dict[str, Any]:
    """A row of the prompt and of what the reward reads: of metadata nothing, as a sum is scored without."""
    first = [{"role": "system", "content": system}] if system else []
    return row | {"prompt": first + row["prompt"], "metadata": {}, "difficulty": None}


def curves(work: Work, names: tuple[Name, ...], every: int) -> dict[str, list[dict[str, Any]]]:
    """Returns each side's reports of its steps; with `look` in them its answers."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as stack:
        workers = {name: Worker(replace(work, name=name)) for name in names}
        for worker in workers.values():
            stack.callback(worker.close)
            worker.step("")  # that it is ready
        for step in range(work.steps):  # the last is not taken: who had taken it would end
            for name in names if step % 2 else reversed(names):
                record = workers[name].step() if step else {"seconds": 0.0, "peak_bytes": 0}
                if step % every == 0 or step == work.steps - 1:
                    record["look"] = workers[name].step("look\n")
                    logger.info(
                        "seed {} {} step {}: {:.1f} s, right {:.1%}, ended {:.1%}, {:.0f} tokens",
                        work.seed,
                        name,
                        step,
                        record["seconds"],
                        record["look"]["right"],
                        record["look"]["ended"],
                        record["look"]["tokens"],
                    )
                found[name].append(record)
    return {f"{name}, seed {work.seed}": steps for name, steps in found.items()}


def change(steps: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Returns the mean change of held-out accuracy, and its 95 % interval over problems."""
    first, last = (np.array(steps[place]["look"]["each"]) for place in (0, -1))
    return (last - first).mean(), *mean_interval(last - first, bounds=(-1.0, 1.0))


def row_for(name: str, steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, str]:
    """Makes a row of the table. others: the first side's steps; in its very first the drop-in still
    measures."""
    first, last = steps[0]["look"], steps[-1]["look"]
    ratio, least, most = times_as_much(*([step["seconds"] for step in side[2:]] for side in (steps, others)))
    rise, low, high = change(steps)
    seconds = [step["seconds"] for step in steps[1:]]
    return {
        "": name,
        "right before": f"{first['right']:.1%}",
        "after": f"{last['right']:.1%}",
        "change": f"{100 * rise:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
        "within the tokens of training": f"{first['short']:.1%} to {last['short']:.1%}",
        "ended": f"{first['ended']:.1%} to {last['ended']:.1%}",
        "minutes": f"{sum(seconds) / 60:.1f}",
        "s a step": f"{np.median(seconds):.1f}",
        "times the first's": f"{ratio:.2f} ({least:.2f} to {most:.2f})",
        "peak, GB": f"{steps[-1]['peak_bytes'] / 2**30:.2f}",
    }


def draw(found: dict[str, list[dict[str, Any]]], batch_size: int, file: Path) -> None:
    """Held-out accuracy over the time of training, and over samples."""
    with picture(file, (10, 4), ncols=2, sharey=True) as (over_time, over_samples):
        for name, steps in found.items():
            looks = [step for step, record in enumerate(steps) if "look" in record]
            seconds = list(accumulate(record["seconds"] for record in steps))
            right = [100 * steps[step]["look"]["right"] for step in looks]
            style = {
                "color": f"C{get_args(Name).index(name.rpartition(', seed')[0])}",
                "marker": ".",
                "linestyle": ("-", "--", ":")[int(name[-1]) % 3],
                "label": name,
            }
            over_time.plot([seconds[step] / 60 for step in looks], right, **style)
            over_samples.plot([step * batch_size for step in looks], right, **style)
        over_time.set(xlabel="minutes of training", ylabel="held-out problems right, percent (greedy)")
        over_samples.set(xlabel="completions")
        over_samples.set_ylim(0)
        over_samples.legend(frameon=False, loc="lower right", ncols=2)


def verdicts(found: dict[str, list[dict[str, Any]]]) -> dict[str, bool]:
    """Whether ours has learned with each seed."""
    sentences = {}
    for name, steps in found.items():
        if name.startswith("ours"):
            rise, low, _ = change(steps)
            sentence = f"{name}: {100 * rise:+.1f} points, at least {100 * low:+.1f}"
            sentences[f"{sentence} ({100 * RISE:.0f} and {100 * SURELY:.0f})"] = rise >= RISE and low > SURELY
    return sentences


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
