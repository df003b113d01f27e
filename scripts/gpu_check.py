"""Checks memory and speed on a CUDA card; see gpu_check.sh, which runs it."""

import sys

import tyro

from grpo.environment import set_library_defaults

if __name__ == "__main__":
    set_library_defaults()
    from benchmarks.gpu_check import main

    sys.exit(tyro.cli(main))
