"""Rows stand group by group: row r is of group r // rows_per_prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rows_of_groups(groups: Sequence[int], rows_per_prompt: int, device: torch.device) -> Tensor:
    """Indices of the rows of these groups, in the groups' order."""
    within = torch.arange(rows_per_prompt, device=device)
    return (torch.tensor(groups, device=device).unsqueeze(1) * rows_per_prompt + within).flatten()
