"""Hidden states of completions over a shared prompt, with gradients: what learning reads.

Each prompt goes through the model once however many completions it has; gradients flow back
through its keys and values. Works for every Hugging Face causal model whose layers remember keys
and values and nothing else. Shapes follow from the arguments' shapes alone, so that fake tensors
can trace it.

The caches here may be written to any number of times, as they are where layers are recomputed:
whatever is written, they stay as they are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo.config.groups import Checkpointing
from grpo.distributed.shard import is_sharded
from grpo.errors import UserError
from grpo.model.activation_checkpointing import recomputed_layers
from grpo.model.attention import needs_no_mask
from grpo.model.prefill import PromptBatch, encode_prompts, layers_with_window, padding_unknown


def completion_hidden(
    model: PreTrainedModel,
    prompts: PromptBatch,
    row_to_prompt: Tensor,
    completion_ids: Tensor,
    *,
    checkpointing: Checkpointing = "none",
) -> Tensor:
    """The states (R, C, D) from which the tokens `completion_ids` (R, C) are predicted.

    All on the model's device; row_to_prompt: (R,) index of each row's prompt. Completions are padded on the
    right, where causal attention never looks; the states there mean nothing. checkpointing: see
    `recomputed_layers`. ValueError for a model whose layers cannot be run so.
    """
    width, prompts = completion_ids.shape[1], prompts.padded_for(model)
    if width == 1 and is_sharded(model):  # a second pass is needed as others may have one
        completion_ids = F.pad(completion_ids, (0, 1))
    with recomputed_layers(model, checkpointing):
        prompt_layers = _prompt_layers(model)
        try:
            last, _ = encode_prompts(model, prompts, Cache(prompt_layers))  # (b, D)
            layers = [_CompletionLayer(layer, row_to_prompt) for layer in prompt_layers]
            if is_sharded(model) and torch.is_grad_enabled():
                last = _cut(last, layers)
        finally:
            for layer in prompt_layers:
                layer.forget()
        first = last[row_to_prompt].unsqueeze(1)  # (R, 1, D)
        if completion_ids.shape[1] == 1:
            return first
        inputs = completion_ids[:, :-1]  # (R, C - 1)
        ones = torch.ones_like(inputs)
        mask = None
        if prompts.is_padded or not needs_no_mask(model.config._attn_implementation):
            mask = torch.cat([prompts.mask[row_to_prompt].to(ones), ones], 1)
        with padding_unknown(model):
            hidden = model.base_model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=prompts.ends[row_to_prompt].unsqueeze(1) + ones.cumsum(1) - 1,
                past_key_values=Cache(layers),
                use_cache=True,
            ).last_hidden_state
    return torch.cat([first, hidden], 1)[:, :width]


def empty_cache(model: PreTrainedModel) -> Cache:
    """A cache that remembers nothing, for texts that go through in one piece.

    Without any, Hugging Face looks into the positions for packed texts, which waits for an accelerator, and
    on fake tensors takes them for packed.
    """
    layers = _prompt_layers(model)
    for layer in layers:
        layer.forget()
    return Cache(layers)


class _PromptLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer while prompts are encoded: empty at any time, but it remembers what it was given first."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.key_values: tuple[Tensor, Tensor] | None = None  # keys and values (b, H, P, d)
        self._listens = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._listens:
            self.key_values = key_states, value_states
        return key_states, value_states

    def forget(self) -> None:
        """Let go of the tensors, and take no others.

        What recomputes a layer holds the cache it was given. If that held tensors of the graph in
        turn, a graph that never sees its backward pass would hold itself, out of the collector's sight.
        """
        self.key_values, self._listens = None, False


class _CompletionLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values of the prompts, repeated to rows (R, H, P, d) only as it attends."""

    def __init__(self, prompts: _PromptLayer, row_to_prompt: Tensor) -> None:
        super().__init__()
        if prompts.key_values is None:
            raise UserError("its layers do not hand their keys and values to a cache.")
        self.keys, self.values = prompts.key_values
        self.is_sliding, self.is_initialized, self._rows = prompts.is_sliding, True, row_to_prompt

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        # index_select, as its backward pass takes a tenth of that of an index's.
        keys = torch.cat([self.keys.index_select(0, self._rows), key_states], -2)  # (R, H, P + C - 1, d)
        return keys, torch.cat([self.values.index_select(0, self._rows), value_states], -2)


def _cut(last: Tensor, layers: list[_CompletionLayer]) -> Tensor:
    """`last` and the prompts' keys and values, where the backward pass ends and another one begins.

    A weight's gradient is whole, and can be reduced over processes, when a backward pass has been to all
    of its uses. Prompts and completions use the same weights: in one pass each layer's gradient would
    wait for the prompts', and so all would exist at once.
    """
    tensors = [last, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    last, *key_values = _Cut.apply(tensors, *leaves)  # type: ignore[no-untyped-call]
    for layer, keys, values in zip(layers, key_values[::2], key_values[1::2], strict=True):
        layer.keys, layer.values = keys, values
    return last


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.tensors = tensors
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        pairs = [pair for pair in zip(ctx.tensors, gradients, strict=True) if pair[1] is not None]
        ctx.tensors = None
        tensors, known = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, known)
        return None, *(None for _ in gradients)


def _prompt_layers(model: PreTrainedModel) -> list[_PromptLayer]:
    return [_PromptLayer(is_sliding) for is_sliding in layers_with_window(model.config)]
