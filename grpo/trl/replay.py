"""The state that a pass starts from which may have to be done again: no gradients, the same random
numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def gradients_apart(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients begin anew; those that were there before are added afterwards."""
    before = [parameter.grad for parameter in parameters]
    drop_gradients(parameters)
    try:
        yield
    except BaseException:
        drop_gradients(parameters)
        raise
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


class RandomState:
    """The state of the host's generator and the device's, as they are when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_state = torch.get_rng_state()
        self._device_state = (
            None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        )

    def restore(self) -> None:
        torch.set_rng_state(self._host_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, self._device)
