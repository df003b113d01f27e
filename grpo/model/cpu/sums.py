"""Weighted sums of a table's rows, which attention for one token at a time is made of.

A token's scores are features of keys, added up with its query as weights; what it then reads is values of
tokens, added up with the scores' softmax as weights. As matrix products most of these have one row, which
CPU libraries are slow at; their lookup of embeddings does such sums at the pace of memory.

Shapes: R rows with H heads; b tables of m rows of width w for each of H' heads, each for g = R / b rows and
for h = H / H' heads in turn. The first n rows of a table are added up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from grpo.model import cpu


class Bags(NamedTuple):
    """What is added up, as `torch.embedding_bag` reads it."""

    rows: Tensor  # (R·H·n,) places in the tables, one after the other
    starts: Tensor  # (R·H,) where in `rows` each sum begins


_FEW = 8
"""Sums of one table: for more, a matrix product is the faster way."""


def bags(tables: Tensor, n: int, *, g: int = 1, h: int = 1) -> Bags | None:
    """Of the first n rows of each table, for tables (b, H', m, w); None where products are the faster way."""
    if tables.device.type != "cpu" or not cpu.is_on("sums") or g * h > _FEW:
        return None
    b, heads, m, _ = tables.shape
    first = torch.arange(0, b * heads * m, m, dtype=torch.int32)
    first = first.view(b, 1, heads, 1, 1).expand(-1, g, -1, h, -1)
    rows = first + torch.arange(n, dtype=torch.int32)  # (b, g, H', h, n)
    return Bags(rows.flatten(), torch.arange(0, rows.numel(), n, dtype=torch.int32))


def weighted_sums(weights: Tensor, tables: Tensor, bags: Bags | None, *, width: int | None = None) -> Tensor:
    """weights (R, H, n) times the first n rows of their tables (b, H', m, w), added up: (R, H, w).

    bags: of these tables. width: so many of the w columns are wanted.
    """
    (rows, heads, n), (b, shared, _, w) = weights.shape, tables.shape
    if bags is None:
        g, h = rows // b, heads // shared
        by_table = weights.view(b, g, shared, h, n).transpose(1, 2).reshape(b, shared, g * h, n)
        sums = by_table @ tables[:, :, :n, :width]  # (b, H', g·h, width)
        return sums.unflatten(2, (g, h)).transpose(1, 2).reshape(rows, heads, -1)
    sums, *_ = torch.embedding_bag(
        tables.view(-1, w), bags.rows, bags.starts, mode=_SUM, per_sample_weights=weights.reshape(-1)
    )
    return sums.view(rows, heads, w)[..., :width]


_SUM = 0
"""What torch.embedding_bag calls adding up."""
