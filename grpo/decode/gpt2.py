"""GPT-2, one token at a time: a static cache, and one copy of a prompt's keys for its whole group.

Attention runs over two parts, the group's prompt and the row's own tokens, joined in one softmax.
Linear layers and norms are the model's own modules; only the attention is written out.

Own tokens lie in blocks, each a tensor without gaps: what attends to the first of them copies nothing.
All rows write a step's keys to the same place of a ring, whenever their own first token was, so that a
new group can take the place of a finished one; a bias says which places are a row's own.

Shapes: b groups of g rows, H heads of width d, P prompt tokens, n blocks of K own tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from grpo.decode.cache_bytes import CacheBytes
from grpo.prefill import encode_prompts, pad_prompts

_BLOCK = 48
"""Own tokens are attended to in multiples of this: a CPU compiles its products for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has for so many tokens."""
    return -(-tokens // _BLOCK) * _BLOCK


class _EncodedPrompts(NamedTuple):
    keys: list[Tensor]  # of each layer (b, H, d, P)
    values: list[Tensor]  # of each layer (b, H, P, d)
    bias: Tensor  # (b, 1, 1, P), 0 where there is a token
    lengths: Tensor  # (b,)
    logits: Tensor  # (b, V) of each prompt's last token


class GPT2Decoder:
    def __init__(self, model: GPT2LMHeadModel, max_new_tokens: int) -> None:
        self._model = model
        self._blocks = list(model.transformer.h)
        self._max_new_tokens = max_new_tokens
        config = model.config
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        by_layer = config.scale_attn_by_inverse_layer_idx
        self._scales = [scale / (layer + 1 if by_layer else 1) for layer in range(config.n_layer)]

    def prefill(
        self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int, *, longest_prompt: int = 0
    ) -> Tensor:
        config = self._model.config
        width = max(longest_prompt, *map(len, prompt_ids))
        prompts = self._encode(prompt_ids, width)
        self._prompt_keys, self._prompt_values, self._prompt_bias = prompts.keys, prompts.values, prompts.bias
        heads, head_width = config.n_head, config.n_embd // config.n_head
        self._groups, self._rows_per_prompt, self._t = len(prompt_ids), rows_per_prompt, 0
        rows, places = self._groups * rows_per_prompt, static_cache_length(self._max_new_tokens)
        new, blocks = prompts.logits.new_zeros, places // _BLOCK
        # Keys are stored transposed, (…, d, K): the layout a row of scores is fastest from.
        self._own_keys = [new(blocks, rows, heads, head_width, _BLOCK) for _ in self._blocks]
        self._own_values = [new(blocks, rows, heads, _BLOCK, head_width) for _ in self._blocks]
        self._own_bias = new(rows, places).fill_(-torch.inf)  # 0 where a row has a token
        self._positions = prompts.lengths.repeat_interleave(rows_per_prompt)  # (R,)
        return prompts.logits.repeat_interleave(rows_per_prompt, 0)

    def replace(self, group: int, prompt_ids: Sequence[int]) -> Tensor:
        rows = slice(group * self._rows_per_prompt, (group + 1) * self._rows_per_prompt)
        prompt = self._encode([prompt_ids], self._prompt_bias.shape[-1])
        for layer in range(len(self._blocks)):
            self._prompt_keys[layer][group] = prompt.keys[layer][0]
            self._prompt_values[layer][group] = prompt.values[layer][0]
            self._own_keys[layer][:, rows] = 0.0  # a NaN would outlive its bias
            self._own_values[layer][:, rows] = 0.0
        self._prompt_bias[group] = prompt.bias[0]
        self._own_bias[rows] = -torch.inf
        self._positions[rows] = prompt.lengths
        return prompt.logits.repeat_interleave(self._rows_per_prompt, 0)

    def _encode(self, prompt_ids: Sequence[Sequence[int]], width: int) -> _EncodedPrompts:
        prompts = pad_prompts(prompt_ids, self._model.device, width=width)
        hidden, cache = encode_prompts(self._model, prompts)  # (b, D)
        bias = torch.zeros_like(prompts.mask, dtype=hidden.dtype).masked_fill_(~prompts.mask, -torch.inf)
        return _EncodedPrompts(
            keys=[layer.keys.transpose(-1, -2).contiguous() for layer in cache.layers],
            values=[layer.values for layer in cache.layers],
            bias=bias[:, None, None],
            lengths=prompts.lengths,
            logits=self._model.lm_head(hidden),
        )

    def step(self, tokens: Tensor) -> Tensor:
        transformer = self._model.transformer
        x = transformer.wte(tokens) + transformer.wpe(self._positions)  # (R, D)
        self._own_bias[:, self._t % self._own_bias.shape[-1]] = 0.0
        self._t += 1
        for layer, block in enumerate(self._blocks):
            x = x + block.attn.c_proj(self._attend(layer, block.attn, block.ln_1(x)))
            x = x + block.mlp(block.ln_2(x))
        # A row that has ended runs on until its group has, perhaps beyond the context.
        self._positions = (self._positions + 1).clamp(max=self._model.config.n_positions - 1)
        return self._model.lm_head(transformer.ln_f(x))

    def _attend(self, layer: int, attention: GPT2Attention, x: Tensor) -> Tensor:
        """Attention of each row's newest token, (R, D) to (R, D)."""
        b, g = self._groups, self._rows_per_prompt
        rows, heads = b * g, self._model.config.n_head
        query, key, value = attention.c_attn(x).view(rows, 3, heads, -1).unbind(1)  # (R, H, d)
        own_keys, own_values = self._own_keys[layer], self._own_values[layer]
        block, place = divmod((self._t - 1) % self._own_bias.shape[-1], _BLOCK)
        own_keys[block, ..., place] = key
        own_values[block, :, :, place] = value
        n = min(-(-self._t // _BLOCK), len(own_keys))  # blocks that hold something

        query = query * self._scales[layer]
        grouped = query.view(b, g, heads, -1).transpose(1, 2)  # (b, H, g, d)
        over_prompt = grouped @ self._prompt_keys[layer] + self._prompt_bias  # (b, H, g, P)
        over_prompt = over_prompt.transpose(1, 2).reshape(rows, heads, -1)
        by_block = query.unsqueeze(2) @ own_keys[:n]  # (n, R, H, 1, K)
        over_own = by_block.permute(1, 2, 3, 0, 4).reshape(rows, heads, -1)  # (R, H, n·K)
        over_own = over_own + self._own_bias[:, None, : n * _BLOCK]
        weights = torch.cat([over_prompt, over_own], -1).softmax(-1)  # (R, H, P + n·K)

        length = over_prompt.shape[-1]
        prompt_weights = weights[..., :length].view(b, g, heads, length).transpose(1, 2)
        mixed = (prompt_weights @ self._prompt_values[layer]).transpose(1, 2).reshape(rows, heads, -1)
        own_weights = weights[..., length:].view(rows, heads, 1, n, _BLOCK).permute(3, 0, 1, 2, 4)
        mixed = mixed + (own_weights @ own_values[:n]).sum(0).squeeze(2)  # (R, H, d)
        return mixed.reshape(rows, -1)

    def keep(self, groups: Tensor) -> None:
        within = torch.arange(self._rows_per_prompt, device=groups.device)
        rows = (groups.unsqueeze(1) * self._rows_per_prompt + within).flatten()
        for layer in range(len(self._blocks)):  # one by one: never two copies of the whole cache
            self._prompt_keys[layer] = self._prompt_keys[layer][groups]
            self._prompt_values[layer] = self._prompt_values[layer][groups]
            self._own_keys[layer] = self._own_keys[layer][:, rows]
            self._own_values[layer] = self._own_values[layer][:, rows]
        self._prompt_bias = self._prompt_bias[groups]
        self._own_bias = self._own_bias[rows]
        self._positions = self._positions[rows]
        self._groups = len(groups)

    def skip(self, num_tokens: int) -> None:
        self._own_bias[:, self._t : self._t + num_tokens] = 0.0
        self._t += num_tokens
        self._positions = self._positions + num_tokens

    @property
    def cache_bytes(self) -> CacheBytes:
        prompt = sum(part.nbytes for part in (*self._prompt_keys, *self._prompt_values))
        own = sum(part.nbytes for part in (*self._own_keys, *self._own_values))
        places = self._own_bias.shape[-1]
        return CacheBytes(held=prompt + own, used=prompt + own * min(self._t, places) // places)
