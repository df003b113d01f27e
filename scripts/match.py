"""Games of a model against an opponent: `python scripts/match.py runs/NAME --against rook-tiny`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("match"))
