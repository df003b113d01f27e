"""From the host to where a model is: what belongs together, in one copy that nobody waits for."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes at multiples of which each tensor begins: enough for any dtype."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors on a device. Those on an accelerator are views of one piece of its memory.

    On CUDA the copy is from pinned memory and asynchronous: work that is launched afterwards finds it done.
    """
    if device.type == "cpu" or all(tensor.device == device for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    room = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    starts = [0, *accumulate(room)]
    is_pinned = device.type == "cuda"  # from other memory, nobody may change it before it is there
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_pinned)

    def views(of: Tensor) -> list[Tensor]:
        return [
            of[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        ]

    for place, tensor in zip(views(packed), tensors, strict=True):
        place.copy_(tensor)
    return views(packed.to(device, non_blocking=is_pinned))
