"""Train the bundled model on the bundled positions, and show what it learned: `make demo`."""

import sys
import time

import tyro

SAMPLES = 2
"""Of each held-out prompt at temperature 1, besides the greedy answer."""


def main(
    seed: int = 0,
    minutes: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    heldout: int = 360,
    must_improve: bool = False,
) -> int:
    """Measure, train, measure again.

    Args:
        seed: Of the prompts' order and of every sampled token.
        minutes: Of training, in place of the demo's.
        steps: Fewer steps than the demo's, for a quick look.
        batch_size: Completions a step in place of the demo's, likewise.
        heldout: Held-out prompts of each task that quality is measured on.
        must_improve: End with 1 unless the sampled reward rose by more than chance.
    """
    from grpo.environment import set_library_defaults

    set_library_defaults()
    from benchmarks.learning import demo_config, heldout_prompts, train_grpo
    from loguru import logger

    from grpo.commands.screen import screen
    from grpo.evaluate.boards import example_boards
    from grpo.evaluate.quality import ASKED, Quality, answers, changes, examples, in_words, measure, save
    from grpo.evaluate.tables import change_table
    from grpo.model.load import Policy, load_policy
    from grpo.model.target import choose_device
    from grpo.run.screen import configure_logging
    from grpo.workbench.report import write_report

    console = screen()
    if not console.is_terminal:
        console = screen(width=110)
    configure_logging("INFO", console)
    config = demo_config(seed=seed, steps=steps, batch_size=batch_size, minutes=minutes)
    prompts = heldout_prompts(config, heldout)
    asked = [
        prompt
        for task in ("environment", "policy")
        for prompt in [each for each in prompts if each.task == task][: ASKED // 2]
    ]

    def look(policy: Policy) -> tuple[Quality, list[str]]:
        return measure(policy, config, prompts, samples=SAMPLES), answers(policy, config, asked)

    begun = time.monotonic()
    logger.info("held-out quality before training, on {} prompts", len(prompts))
    before = look(load_policy(config.model, choose_device(config.device), config.precision))
    start = time.monotonic()
    folder, policy, _ = train_grpo(config, console)  # after Ctrl-C, what was learned so far is shown
    trained = time.monotonic() - start
    logger.info("and after it")
    after = look(policy)
    found, shown = changes(before[0], after[0]), examples(asked, before[1], after[1])
    save(folder, before[0], after[0], shown)
    console.print()
    console.print(change_table(found, num_prompts=len(prompts)))
    for sentence in in_words(found):
        console.print(sentence)
    for example in shown:
        console.print()
        console.print(example_boards(example))
    console.print()
    page = write_report([folder])
    minutes = (time.monotonic() - begun) / 60
    console.print(
        f"Trained for {trained / 60:.1f} minutes, {minutes:.1f} in all. All of it as a page: {page}"
    )
    better = any((each.mode, each.name, each.verdict) == ("sampled", "reward", "better") for each in found)
    return int(must_improve and not better)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
