"""A sweep or a run as one page: `python scripts/report.py runs/NAME`."""

import sys

from grpo.commands import run

if __name__ == "__main__":
    sys.exit(run("report"))
