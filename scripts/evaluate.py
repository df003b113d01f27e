"""Held-out quality of a model or a run: `python scripts/evaluate.py runs/NAME`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("evaluate"))
