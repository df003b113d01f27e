"""What matrix products are computed in, where functions of ours stand in for torch's."""

import torch
from torch import Tensor


def product_dtype(values: Tensor) -> torch.dtype:
    """Of products of these values: autocast's where it is on, which leaves float64 alone, else their own."""
    device = values.device.type
    if values.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return values.dtype
