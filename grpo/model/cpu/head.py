"""The vocabulary head on a CPU for a token of each row: a slice of the vocabulary at a time, transposed.

Few rows times a tall matrix is the shape that MKL is slowest at in fp32: with rows and columns exchanged,
and results that stay near the processor until they are put in their places, it takes half to three quarters
of the time for 8 to 128 rows (32,000 × 512 and 151,936 × 896, AVX2), and never more.
"""

import torch
from torch import Tensor, nn

from grpo.model import cpu
from grpo.model.cpu import slices

_TOKENS = 1024
"""Of the vocabulary, at a time."""


def head_logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """What `head` makes of hidden (R, D), without a gradient: (R, V)."""
    device = slices.traced_device() or hidden.device
    slow = device.type == "cpu" and hidden.dtype == torch.float32 and cpu.is_on("head")
    if not slow or type(head) is not nn.Linear or head.bias is not None or head.out_features <= _TOKENS:
        logits: Tensor = head(hidden)
        return logits
    columns = hidden.T
    logits = hidden.new_empty(len(hidden), head.out_features)
    for tokens in slices.slices(head.out_features, _TOKENS):
        logits[:, tokens].T.copy_(torch.mm(head.weight[tokens], columns))
    return logits
