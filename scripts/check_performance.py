"""What this machine reaches in training: `python scripts/check_performance.py`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("check"))
