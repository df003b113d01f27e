"""Make endgame positions as RookWorld lines: policy lines labelled by Stockfish, environment lines refereed.

The bundled positions, and what rook-tiny was pretrained on:

    python scripts/label_positions.py --policy 4000 --environment 4000 --depth 8 --seed 2 \
        --output grpo/assets/positions/train.txt
    python scripts/label_positions.py --policy 1000 --environment 1000 --depth 8 --seed 3 --heldout \
        --output grpo/assets/positions/heldout.txt
    python scripts/label_positions.py --policy 90000 --environment 0 --depth 6 --seed 1 --output policy.txt
"""

from itertools import chain
from pathlib import Path

import tyro
from rich.progress import track


def main(
    output: Path,
    policy: int = 4000,
    environment: int = 4000,
    depth: int = 8,
    seed: int = 0,
    heldout: bool = False,
    num_processes: int = 2,
) -> None:
    """Write `policy` + `environment` lines to a file.

    Args:
        output: The file to write.
        policy: Lines labelled by Stockfish.
        environment: Lines from short random play.
        depth: Plies Stockfish searches.
        seed: Of the positions.
        heldout: Positions of the held-out side of the hash instead of the training side.
        num_processes: Processes that label, each with an engine.
    """
    from benchmarks.positions import labelled_lines, transition_lines

    lines = chain(
        labelled_lines(policy, seed=seed, heldout=heldout, depth=depth, num_processes=num_processes),
        transition_lines(environment, seed=seed, heldout=heldout),
    )
    with output.open("w") as file:
        for line in track(lines, "positions", total=policy + environment):
            file.write(line + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
