"""Traces of deep models from those of two shallow ones: bytes are affine in the number of equal layers.

A log of the work on d + 1 layers is that on d with one more copy of what each loop over layers does. What is
held at a loop's first copy and at its last is affine in the number of layers, and so is all between two
loops; what lies between first and last copy lies between those two in bytes, too.
"""

import copy
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from grpo.distributed.shard import decoder_layers

SHALLOW = 2, 3
"""Layers of the models that are traced: one more than a first and a last, and one more again."""
_AHEAD = 4
"""Operations by which it is recognised where the work goes on after a loop."""

_END = "end"

Log = list[tuple[str, int]]
"""Operations that allocate, and the bytes held while each runs."""


def num_layers(config: PretrainedConfig) -> int:
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def has_equal_layers(model: PreTrainedModel) -> bool:
    """Whether its layers differ in nothing but their weights."""
    layers: list[nn.Module] = list(decoder_layers(model.base_model))
    kinds = set(getattr(model.config, "layer_types", None) or ())
    alike = len({repr(layer) for layer in layers}) == 1
    return alike and len(layers) == num_layers(model.config) and len(kinds) <= 1


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The same model with so many layers."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = count
    if kinds := getattr(config, "layer_types", None):
        shallow.layer_types = kinds[:count]
    return shallow


def extend(shorter: Log, longer: Log, layers: int) -> Log | None:
    """The log for so many layers, told by those for SHALLOW; of each loop its first and its last copies.

    None where the two do not differ by one copy of each loop.
    """
    pairs = _align([*(name for name, _ in shorter), _END], [*(name for name, _ in longer), _END])
    if pairs is None:
        return None
    more = layers - SHALLOW[0]
    values = ((*shorter[i], longer[j][1]) for i, j in pairs[:-1])
    return [(name, held + more * (after - held)) for name, held, after in values]


Pairs = list[tuple[int, int]]


def _align(
    shorter: Sequence[str], longer: Sequence[str], pairs: Pairs | None = None, j: int = 0
) -> Pairs | None:
    """Places of the same operation in both: first copies in a loop with first ones, last with last.

    pairs: of all places of `shorter` so far; `longer` goes on at j.
    """
    pairs = list(pairs or ())
    while len(pairs) < len(shorter) and j < len(longer) and shorter[len(pairs)] == longer[j]:
        pairs.append((len(pairs), j))
        j += 1
    i = len(pairs)
    if i == len(shorter) and j == len(longer):
        return pairs
    for period in _periods(shorter, longer, i, j):
        # The copies before this place have been paired from the first on: the last goes with the last.
        last = [(i - period + k, j + k) for k in range(period)]
        found = _align(shorter, longer, pairs[: i - period] + last, j + period)
        if found is not None:
            return found
    return None


def _periods(shorter: Sequence[str], longer: Sequence[str], i: int, j: int) -> Iterator[int]:
    """How long a copy may be in the loop that `longer` does once more at j, when `shorter` goes on at i."""
    following = shorter[i : i + _AHEAD]
    for period in range(1, min(i, len(longer) - j) + 1):
        after = longer[j + period : j + period + len(following)]
        if following and after == following and longer[j - period : j] == longer[j : j + period]:
            yield period
