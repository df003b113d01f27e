"""Kernels for CPUs: to the same result as torch's own, in less time or less memory. One switch for all.

`GRPO_CPU_KERNELS=0` in the environment turns them off, and names from KERNELS, separated by commas, turn all
others off. What they are worth stands in docs/measurements.md.
"""

import os

KERNELS = ("attention", "feed_forward", "embedding_gradients", "head", "slices", "sums")
"""By the name of the module that has it."""
SWITCH = "GRPO_CPU_KERNELS"


def is_on(kernel: str) -> bool:
    """Whether a CPU is to use it. ValueError for a switch that names none of KERNELS."""
    wanted = os.environ.get(SWITCH, "1")
    if wanted in ("0", "1"):
        return wanted == "1"
    names = wanted.split(",")
    if unknown := set(names) - set(KERNELS):
        raise ValueError(f"{SWITCH} names {min(unknown)}: give 0, 1, or some of {', '.join(KERNELS)}.")
    return kernel in names


def what_is_on() -> tuple[str, ...]:
    """For whatever depends on which kernels are used, such as traces that are remembered."""
    return tuple(filter(is_on, KERNELS))
