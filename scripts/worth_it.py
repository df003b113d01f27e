"""Which batch is worth it, before training."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("worth-it"))
