"""Train the bundled model on the bundled positions, and show what it learned: `make demo`."""

import sys
import time
from pathlib import Path

import tyro

from grpo.environment import set_library_defaults

SAMPLES = 2
"""Samples of each held-out prompt at temperature 1, besides the greedy answer."""


def main(
    seed: int = 0,
    minutes: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    heldout: int = 360,
    runs_dir: Path = Path("runs"),
    must_improve: bool = False,
) -> int:
    """Measure, train, measure again.

    Args:
        seed: Of the prompts' order and of every sampled token.
        minutes: Of training, in place of the demo's.
        steps: Fewer steps than the demo's, for a quick look.
        batch_size: Completions a step in place of the demo's, likewise.
        heldout: Held-out prompts of each task that quality is measured on.
        runs_dir: Where the run's folder is made.
        must_improve: End with 1 unless the sampled reward rose by more than chance.
    """
    set_library_defaults()  # before the large libraries are loaded
    from benchmarks.learning import demo_config, heldout_prompts, train_grpo
    from loguru import logger

    from grpo.evaluate import quality
    from grpo.evaluate.boards import example_boards
    from grpo.evaluate.tables import change_table
    from grpo.logs.screen import configure_logging, plain_console
    from grpo.model.load import Policy, load_policy
    from grpo.model.target import choose_device
    from grpo.workbench.report import write_report

    console = plain_console(width=None if sys.stdout.isatty() else 110)
    configure_logging("INFO", console)
    begun = time.monotonic()
    config = demo_config(seed=seed, steps=steps, batch_size=batch_size, minutes=minutes, runs_dir=runs_dir)
    prompts = heldout_prompts(config, heldout)
    asked = [
        prompt
        for task in ("environment", "policy")
        for prompt in [it for it in prompts if it.task == task][: quality.ASKED // 2]
    ]

    def look(policy: Policy) -> tuple[quality.Quality, list[str]]:
        measured = quality.measure(policy, config, prompts, samples=SAMPLES)
        return measured, quality.answers(policy, config, asked)

    logger.info("held-out quality before training, on {} prompts", len(prompts))
    before, answers = look(load_policy(config.model, choose_device(config.device), config.precision))
    start = time.monotonic()
    folder, policy, _ = train_grpo(config, console)  # after Ctrl-C, what was learned so far is shown
    trained = time.monotonic() - start
    logger.info("and after it")
    after, answers_after = look(policy)
    changes, examples = quality.changes(before, after), quality.examples(asked, answers, answers_after)
    quality.save(folder, before, after, examples)
    words = "\n".join(quality.in_words(changes))
    for part in (change_table(changes, num_prompts=len(prompts)), words, *map(example_boards, examples)):
        console.print("", part, sep="\n")
    took = f"Trained for {trained / 60:.1f} minutes, {(time.monotonic() - begun) / 60:.1f} in all"
    console.print(f"\n{took}. All of it as a page: {write_report([folder])}")
    better = any((row.mode, row.name, row.verdict) == ("sampled", "reward", "better") for row in changes)
    return int(must_improve and not better)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
