"""Train a language model with GRPO: `python train_lean.py --help`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("train"))
