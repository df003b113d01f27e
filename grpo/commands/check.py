"""What this machine reaches in training, in tokens a second, and which switches are off.

python scripts/check_performance.py
python scripts/check_performance.py --arch llama --layers 8 --width 512 --heads 8 --compile
"""

import sys

import tyro
from loguru import logger

from grpo.commands.screen import print_error, screen

DONE, WRONG_SETTING = 0, 2
"""Exit statuses."""


def main() -> int:
    """Run the command line."""
    from grpo.run.screen import configure_logging
    from grpo.workbench.performance.settings import PerformanceSettings

    errors = screen(stderr=True)
    console = screen(width=None if sys.stdout.isatty() else 120)
    configure_logging("INFO", errors)
    try:
        settings = tyro.cli(PerformanceSettings, config=(tyro.conf.OmitArgPrefixes,))
        # These load torch: a wrong flag need not wait for it.
        import torch

        from grpo.model.target import choose_device, compute_dtype
        from grpo.workbench.machine import device_name
        from grpo.workbench.performance.measure import (
            matmul_rate,
            rates_table,
            switches_table,
            training_rates,
        )
        from grpo.workbench.performance.switches import switches

        device = choose_device(settings.device)
        what = f"{settings.model.name}, {settings.batch_size} x {settings.context} tokens a step"
    except ValueError as error:
        print_error(errors, error)
        return WRONG_SETTING
    found = switches(device, compute_dtype(settings.precision, device))
    console.print(switches_table(found, device_name(device)))
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        rate = matmul_rate(device, dtype) / 1e9
        console.print(f"matrix products in {name}: {rate:,.0f} GFLOP/s", highlight=False)
    rates = []
    for measured in training_rates(settings, device):
        logger.info("{}: {:,.0f} tokens/s", measured.name, measured.tokens_per_s)
        rates.append(measured)
    console.print(rates_table(rates, what))
    for switch in (each for each in found if each.state == "off"):
        console.print(f"off: {switch.name} ({switch.found}): {switch.remedy}", highlight=False)
    return DONE
