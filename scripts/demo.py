"""Train the bundled model on the bundled positions, and show what it learned: `make demo`."""

import time

import tyro


def main(seed: int = 0, steps: int | None = None, batch_size: int | None = None, heldout: int = 1000) -> None:
    """Measure, train, measure again.

    Args:
        seed: Of the prompts' order and of every sampled token.
        steps: Fewer steps than the demo's, for a quick look.
        batch_size: Completions a step in place of the demo's, likewise.
        heldout: Held-out prompts of each task that quality is measured on.
    """
    from grpo.environment import set_library_defaults

    set_library_defaults()
    from benchmarks.learning import demo_config, heldout_prompts, measure, train_grpo
    from loguru import logger

    from grpo.commands.screen import screen
    from grpo.evaluate import comparison_table
    from grpo.model.load import load_policy
    from grpo.model.target import choose_device
    from grpo.run.tracking import configure_logging

    console = screen()
    if not console.is_terminal:
        console = screen(width=110)
    configure_logging("INFO", console)
    config = demo_config(seed=seed, steps=steps, batch_size=batch_size)
    prompts = heldout_prompts(config, heldout)

    logger.info("measuring held-out quality before training, on {} prompts", len(prompts))
    policy = load_policy(config.model, choose_device(config.device), config.precision)
    before = measure(policy, config, prompts)
    start = time.monotonic()
    folder, policy, _ = train_grpo(config, console)  # after Ctrl-C, what was learned so far is shown
    minutes = (time.monotonic() - start) / 60
    logger.info("measuring again")
    after = measure(policy, config, prompts)
    console.print()
    console.print(comparison_table(before.sampled, after.sampled, title="Held out, sampled at temperature 1"))
    console.print(comparison_table(before.greedy, after.greedy, title="Held out, greedy"))
    console.print(f"Trained for {minutes:.1f} minutes. Run folder: {folder}")
    console.print(f"Metrics: tensorboard --logdir {folder.parent}")


if __name__ == "__main__":
    from grpo.environment import restart_without_thread_cache

    restart_without_thread_cache()
    tyro.cli(main)
