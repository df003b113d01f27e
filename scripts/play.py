"""A model as an engine for chess programs: `python scripts/play.py --model runs/NAME`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("uci"))
