"""The state of the generators that a pass draws from, to begin it again from the same."""

from typing import Any

import torch


class RandomState:
    """Of the host's generator and the device's, as they are when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._on_device = self._module.get_rng_state(device) if self._module else None

    @property
    def _module(self) -> Any:
        return None if self._device.type == "cpu" else torch.get_device_module(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._module:
            self._module.set_rng_state(self._on_device, self._device)
