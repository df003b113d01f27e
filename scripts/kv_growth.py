"""Measure and draw how keys and values grow within a rollout, for both kinds of cache."""

import sys
from pathlib import Path

import tyro
from benchmarks.verdicts import conclude
from rich.table import Table

from grpo.commands.screen import screen


def main(
    model: str = "rook-tiny",
    num_prompts: int = 8,
    group_size: int = 8,
    prompt_tokens: int = 60,
    new_tokens: int = 144,
    output: Path = Path("kv_growth.png"),
) -> int:
    """Decode the same shape with both caches, counting tensor bytes; 1 if ours is not the smaller one.

    Args:
        model: A GPT-2: hub id, folder, or rook-tiny.
        num_prompts: Prompts.
        group_size: Completions of each.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens generated.
        output: The picture.
    """
    from benchmarks.kv_growth import MB, draw_growth, measure_growth

    growths = measure_growth(
        model, num_prompts=num_prompts, group_size=group_size, prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
    )  # fmt: skip
    table = Table("cache", "after the first token", "at the end", "peak, last token", "peak / held")
    for growth in growths:
        first, last, peak = growth.held_bytes[0], growth.held_bytes[-1], growth.peak_bytes[-1]
        sizes = (f"{size / MB:.1f} MB" for size in (first, last, peak))
        table.add_row(growth.name, *sizes, f"{peak / last:.2f}")
    screen().print(table)
    draw_growth(growths, output)
    print(f"picture: {output}")
    ours, growing = (max(growth.peak_bytes) for growth in growths)
    sentence = f"ours holds {ours / growing:.2f} of the growing cache's peak (below 0.9)"
    return conclude({sentence: ours < 0.9 * growing}, screen())


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
