"""Is memory growing? `python monitor_memory.py 200 64`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("monitor"))
