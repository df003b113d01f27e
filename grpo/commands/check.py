"""What this machine reaches in training, in tokens a second, and which switches are off.

grpo-lean check
grpo-lean check --arch llama --layers 8 --width 512 --heads 8 --compile
"""

import torch
from loguru import logger
from rich.console import Console

from grpo.model.target import choose_device, compute_dtype
from grpo.workbench.check import (
    CheckSettings,
    matmul_rate,
    rates_table,
    switches,
    switches_table,
    training_rates,
    what_is_trained,
)
from grpo.workbench.machine import device_name


def main(settings: CheckSettings, console: Console) -> None:
    """Look, measure, and say what is off."""
    device = choose_device(settings.device)
    found = switches(device, compute_dtype(settings.precision, device))
    console.print(switches_table(found, device_name(device)))
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        rate = matmul_rate(device, dtype) / 1e9
        console.print(f"matrix products in {name}: {rate:,.0f} GFLOP/s", highlight=False)
    rates = []
    for measured in training_rates(settings, device):
        logger.info("{}: {:,.0f} tokens/s", measured.name, measured.tokens_per_s)
        rates.append(measured)
    console.print(rates_table(rates, what_is_trained(settings)))
    for switch in (each for each in found if each.state == "off"):
        console.print(f"off: {switch.name} ({switch.found}): {switch.remedy}", highlight=False)
