"""The way that a model is run: by its kind at first, and by what the checks at load found out about it.

Scoring and learning read a model over streams of tokens (`model/attention.py`), or else through its own
forward pass over whole texts, padded on the right or only ever beside others of their length. Sampling
decodes over a static cache, or over the cache of transformers for rows that are padded, or of one length,
or alone, or without a cache, by whole texts.
"""

from collections.abc import Sequence
from typing import Literal
from weakref import ref

from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo.errors import UserError

Reading = Literal["streams", "padded rows", "rows of one length"]
Decoding = Literal["a static cache", "padded rows", "rows of one length", "rows one by one", "whole texts"]
READING: tuple[Reading, ...] = ("streams", "padded rows", "rows of one length")
DECODING: tuple[Decoding, ...] = (
    "a static cache",
    "padded rows",
    "rows of one length",
    "rows one by one",
    "whole texts",
)
"""From the fastest to the one that asks least of a model."""

_chosen: dict[tuple[str, int], tuple[ref[PretrainedConfig], int]] = {}
"""For "reading" or "decoding" and the id of a configuration: that configuration, and the place of its way."""


def choose_reading(way: Reading, *configs: PretrainedConfig) -> None:
    """Has models with these configurations scored that way from here on."""
    _choose("reading", READING.index(way), configs)


def choose_decoding(way: Decoding, *configs: PretrainedConfig) -> None:
    """Has models with these configurations sampled from that way from here on."""
    _choose("decoding", DECODING.index(way), configs)


def reading_of(model: PreTrainedModel) -> Reading:
    """Returns the way that a model is scored."""
    place = _place("reading", model.config)
    if place is None:
        place = 0 if why_not_fastest(type(model), model.config) is None else 1
        _choose("reading", place, [model.config])
    return READING[place]


def decoding_of(config: PretrainedConfig) -> Decoding:
    """Returns the way that a model with this configuration is sampled from."""
    place = _place("decoding", config)
    if place is None:
        kind = kind_of(config)
        place = 0 if kind is not None and why_not_fastest(kind, config) is None else 1
        if not _remembers_tokens_alone(config):
            place = 2
        _choose("decoding", place, [config])
    return DECODING[place]


def kind_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class of models with this configuration; None of one that transformers does not list."""
    try:
        kind: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return None
    return kind


def why_not_fastest(kind: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    """Returns why models of a kind neither read streams nor decode over a static cache; None where they do.

    Both take attention that is called by its name, and is all that layers do across tokens.
    """
    if not _remembers_tokens_alone(config):
        return "its layers remember something else than the keys and values of tokens"
    if not kind._supports_attention_backend:
        return "its attention is not called by name"
    return None


def _remembers_tokens_alone(config: PretrainedConfig) -> bool:
    """Layers that are recurrent, or convolve over time, keep a state beside or instead of keys and values."""
    try:
        layers_with_window(config)
    except (KeyError, AttributeError, ValueError):  # transformers has a cache of its own for it, or none
        return False
    return True


def layers_with_window(config: PretrainedConfig) -> list[bool]:
    """Returns which layers have a sliding window, of all layers of a model.

    ValueError for a model that remembers something else than the keys and values of its layers.
    """
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise UserError("its layers remember something else than their own keys and values.")
    return [layer.is_sliding for layer in layers]


def _choose(what: str, place: int, configs: Sequence[PretrainedConfig]) -> None:
    for key in [key for key, (config, _) in _chosen.items() if config() is None]:
        del _chosen[key]
    _chosen.update({(what, id(config)): (ref(config), place) for config in configs})


def _place(what: str, config: PretrainedConfig) -> int | None:
    known = _chosen.get((what, id(config)))
    return known[1] if known is not None and known[0]() is config else None
