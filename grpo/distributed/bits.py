"""Whether unlike devices hold the same numbers, told by one integer."""

import torch
from torch import Tensor


def sum_of_bits(numbers: Tensor) -> int:
    """Of the numbers' bits, taken as integers: the same in whatever order a device adds them."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()]
    return int(numbers.detach().view(as_integers).sum(dtype=torch.int64).item())
