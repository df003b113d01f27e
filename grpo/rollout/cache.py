"""A decoder's cache: what keys and values take up, and which rows are whose.

Rows stand group by group: row r is of group r // rows_per_prompt.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CacheBytes(NamedTuple):
    """Bytes of the cache: `held` by tensors, `used` by tokens so far.

    growing: the largest layer of a cache that grows by concatenation, which is held once more while
    a token is added; 0 for a static cache.
    """

    held: int
    used: int
    growing: int = 0


def move_to_front(tensors: Iterable[Tensor], index: Tensor) -> None:
    """What stands at these places goes to the first ones, tensor by tensor: never two copies of them all."""
    for tensor in tensors:
        tensor[: len(index)] = tensor.index_select(0, index)


def rows_of_groups(groups: Sequence[int], rows_per_prompt: int, device: torch.device) -> Tensor:
    """Indices of the rows of these groups, in the groups' order."""
    within = torch.arange(rows_per_prompt, device=device)
    return (torch.tensor(groups, device=device).unsqueeze(1) * rows_per_prompt + within).flatten()
