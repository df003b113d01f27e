"""The largest batch that fits this device, by real training steps."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("find-max"))
