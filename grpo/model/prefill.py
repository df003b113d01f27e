"""Prompts of unequal length as one tensor, and their keys and values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel

from grpo.model.head import LogitRule
from grpo.model.transfer import to_device

_LARGE_LOGIT = 30.0
"""A soft cap of 15 to 50, as models have them, changes logits of this size by more than a nat."""


class PromptBatch(NamedTuple):
    """b prompts padded to P tokens: on the right, as causal attention never looks at what follows."""

    ids: Tensor  # (b, P)
    lengths: Tensor  # (b,)
    is_padded: bool = True
    """Whether any is shorter than P, as far as is known."""
    on_left: bool = False
    """Whether padding stands there, and with it all prompts' ends beside each other."""

    @property
    def mask(self) -> Tensor:
        """(b, P), True where a token is the prompt's."""
        return self._places >= 0 if self.on_left else self._places < self.lengths.unsqueeze(1)

    @property
    def positions(self) -> Tensor:
        """(b, P) that the model is told; of what pads, any."""
        return self._places.clamp(min=0)

    @property
    def _places(self) -> Tensor:
        """(b, P) of tokens within their prompts: below zero, or from the length on, where there is none."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        return columns + (self.lengths.unsqueeze(1) - columns.shape[1]) if self.on_left else columns

    def to(self, device: torch.device) -> "PromptBatch":
        ids, lengths = to_device([self.ids, self.lengths], device)
        return self._replace(ids=ids, lengths=lengths)

    def padded_for(self, model: PreTrainedModel) -> "PromptBatch":
        """On the left where attention has a sliding window, which counts places between tokens."""
        if not self.is_padded or self.on_left or sliding_window(model.config) is None:
            return self
        return self.moved_left()

    def moved_left(self) -> "PromptBatch":
        """Returns prompts that are padded on the right, padded on the left."""
        moved = self._replace(on_left=True)
        return moved._replace(ids=self.ids.gather(1, moved.positions))


def sliding_window(config: PretrainedConfig) -> int | None:
    """Tokens that some layers attend to at most, the newest among them; None where all see all."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ("sliding_attention",)
    return getattr(text, "sliding_window", None) if "sliding_attention" in kinds else None


@contextmanager
def shrunk_sliding_window(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Inside, texts of so many tokens are longer than any sliding window, which is made smaller if need be.

    So checks on made-up tokens look at what is beyond a window of thousands at the price of hundreds.
    """
    text, window = model.config.get_text_config(decoder=True), sliding_window(model.config)
    if window is not None:
        text.sliding_window = min(window, max(1, length // 2))
    try:
        yield
    finally:
        if window is not None:
            text.sliding_window = window


@contextmanager
def large_logits(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the head is scaled so that the largest logit is as large as a trained model's.

    What a soft cap does to logits shows in large ones alone, and those of fresh weights are small.
    """
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(head.weight.shape[0], (2, 4), generator=generator).to(model.device)
    scores = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    scores = scores * LogitRule.of(model.config).scale
    largest = scores[scores.isfinite()].abs().max().item()
    weights = [weight for weight in head.parameters() if weight.is_floating_point()]
    before = [weight.detach().clone() for weight in weights]
    try:
        if 0 < largest < _LARGE_LOGIT:
            for weight in weights:
                weight.data.mul_(_LARGE_LOGIT / largest)
        yield
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)


def pad_prompts(prompt_ids: Sequence[Sequence[int]], *, width: int | None = None) -> PromptBatch:
    """Pads prompts to the longest, or to `width`, with token 0; masks come from lengths, not from ids."""
    lengths = [len(ids) for ids in prompt_ids]
    width = width or max(lengths)
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in prompt_ids]  # of them one tensor: quicker
    return PromptBatch(torch.tensor(padded), torch.tensor(lengths), min(lengths) < width)


@contextmanager
def without_pad_token_id(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model knows of no token for padding.

    Without a mask GPT-2 looks for it among the tokens, which waits for the device, and warns.
    """
    settings = vars(model.config)  # past checks that the value is a number
    token = settings.get("pad_token_id")
    if token is not None:
        settings["pad_token_id"] = None
    try:
        yield
    finally:
        if token is not None:
            settings["pad_token_id"] = token


def encode_prompts(
    model: PreTrainedModel, prompts: PromptBatch, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Hidden states (b, D) of each prompt's last token, and the cache of all layers (None: a new one).

    Positions are explicit. There is no mask where the padding lies to the right: causal attention does not
    look there, and without one the fast attention kernels serve, and nothing waits for the device.
    """
    with without_pad_token_id(model):
        output = model.base_model(
            input_ids=prompts.ids,
            attention_mask=prompts.mask.long() if prompts.on_left else None,
            position_ids=prompts.positions,
            past_key_values=DynamicCache(config=model.config) if cache is None else cache,
            use_cache=True,
        )
    if prompts.on_left:
        return output.last_hidden_state[:, -1], output.past_key_values
    rows = torch.arange(len(prompts.lengths), device=prompts.ids.device)
    return output.last_hidden_state[rows, prompts.lengths - 1], output.past_key_values
