"""What the scripts that print docs/measurements.md are made of."""

import os
import sys


def worker_environment() -> dict[str, str]:
    """For a process of its own (`python -m benchmarks.NAME`) that is to find what this one has found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
