"""What a CUDA card shows of memory and speed; see gpu_check.sh, which runs it."""

import json
import re
import sys
import tempfile
from pathlib import Path

import tyro

from grpo.environment import set_library_defaults


def main(output: Path | None = None, small: bool = False) -> None:
    """Run all parts, print them, and write them as JSON.

    Args:
        output: The JSON file; by default docs/measurements/gpu_CARD.json.
        small: The bundled model and few rows: shows on any machine that the parts work.
    """
    set_library_defaults()
    import torch
    from benchmarks.gpu_check import check_card, summary
    from benchmarks.random_gpt2 import GPT2_124M, make_random_gpt2
    from benchmarks.speed import CONTENDERS, Case
    from loguru import logger

    from grpo.config import Config
    from grpo.config.groups import SamplingSettings

    case = Case("GPT-2 124 M on a card", "GPT-2 124 M without end", 60, 16, 4, (10.0, 10.0))
    # As long as the other parts' rows, whose traces are then its own, too.
    small_case = Case("small", "rook-tiny without end", 59, 8, 1, (1.0, 1.0), batch_size=8, max_new_tokens=16)
    logger.remove()
    logger.add(sys.stderr, level="WARNING", format="{time:HH:mm:ss} {message}")
    if not small and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device: choose another build of torch, or try --small.")
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model=str(make_random_gpt2(Path(folder) / "gpt2", **({} if small else GPT2_124M))),
            runs_dir=Path(folder) / "runs", engine="off", eval_interval=0, checkpoint_interval=0,
            trackers=(), sampling=SamplingSettings(max_new_tokens=16 if small else 144),
            batch_size=8 if small else 64, max_batch_size=16 if small else 1024,
        )  # fmt: skip
        results = check_card(
            config,
            small_case if small else case,
            contenders=CONTENDERS[:1] if small else CONTENDERS,
            batch_sizes=(8, 16) if small else (8, 32, 48, 64, 80, 96, 128, 256, 512),
            limit="8GB" if small else "24GB",
            long_steps=2 if small else 300,
            short_steps=1 if small else 6,
        )
    print("\n".join(summary(results)))
    card = re.sub(r"[^A-Za-z0-9]+", "_", results["device"]).strip("_")
    output = output or Path(__file__).parents[1] / "docs" / "measurements" / f"gpu_{card}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {output}")


if __name__ == "__main__":
    tyro.cli(main)
