"""What a CUDA card shows of memory and speed; see gpu_check.sh, which runs it."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro

from grpo.environment import set_library_defaults


def main(output: Path | None = None, small: bool = False, quick: bool = False) -> int:
    """Run all parts, print them, and write them as JSON after each: what ends it early costs one part.

    The exit status is 1 if one failed, or found what cannot be.

    Args:
        output: The JSON file; by default docs/measurements/gpu_CARD.json.
        small: The bundled model and few rows: shows on any machine that the parts work.
        quick: Two minutes: what the card reaches, a step by phase, recorded decoding, two batches.
    """
    set_library_defaults()
    import torch
    from benchmarks.gpu_check import check_card, summary, verdicts
    from benchmarks.random_gpt2 import GPT2_124M, make_random_gpt2
    from benchmarks.speed import CONTENDERS, Case
    from benchmarks.verdicts import conclude
    from loguru import logger

    from grpo.commands.screen import screen
    from grpo.config import Config
    from grpo.config.groups import SamplingSettings

    case = Case("GPT-2 124 M on a card", "GPT-2 124 M without end", 60, 64, 6, (10.0, 10.0))
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
        sizes = (8, 16) if small else (64, 512) if quick else (8, 32, 64, 128, 256, 512)
        parts = check_card(
            config,
            small_case if small else case,
            contenders=CONTENDERS[:1] if small else CONTENDERS,
            batch_sizes=sizes,
            limit="8GB" if small else "24GB",
            long_steps=2 if small else 100,
            short_steps=1 if small else 6,
            quick=quick,
        )
        results: dict[str, Any] = {}
        for name, result in parts:
            results[name] = result
            card = re.sub(r"[^A-Za-z0-9]+", "_", results["device"]).strip("_")
            file = output or Path(__file__).parents[1] / "docs" / "measurements" / f"gpu_{card}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(summary(results)))
    print(f"written: {file}")
    return conclude(verdicts(results), screen(width=110))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
