"""What this machine reaches in training, in tokens a second, and which switches are off.

grpo-lean check
grpo-lean check --arch llama --layers 8 --width 512 --heads 8 --compile
"""

import torch
from rich.console import Console

from grpo.config import Config
from grpo.model.target import choose_device, compute_dtype
from grpo.workbench.check import matmul_rate, switches, training_rates
from grpo.workbench.machine import device_name
from grpo.workbench.settings import CheckSettings
from grpo.workbench.tables import table
from grpo.workbench.task import model_name


def main(settings: CheckSettings, console: Console) -> None:
    """Look, measure, and say what is off."""
    device = choose_device(settings.device)
    states = switches(device, compute_dtype(settings.precision, device))
    console.print(table(device_name(device), states))
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        rate = matmul_rate(device, dtype) / 1e9
        console.print(f"matrix products in {name}: {rate:,.0f} GFLOP/s", highlight=False)
    model = model_name(Config(model=settings.model), settings.made)
    rates = list(training_rates(settings, device))
    console.print(table(f"Training {model}, {settings.batch_size} windows a step", rates))
