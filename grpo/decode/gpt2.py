"""GPT-2, one token at a time: a static cache, and one copy of a prompt's keys for its whole group.

Attention runs over two parts, the group's prompt and the row's own tokens, joined in one softmax.
Linear layers and norms are the model's own modules; only the attention is written out.

Shapes: b groups of g rows, H heads of width d, P prompt tokens, t own tokens so far.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from grpo.decode.cache_bytes import CacheBytes
from grpo.prefill import encode_prompts, pad_prompts

_BLOCK = 16
"""Own tokens are attended to in multiples of this: a CPU compiles its products for each length anew."""


def static_cache_length(tokens: int) -> int:
    """Places the cache has, or attention looks at, for so many tokens."""
    return -(-tokens // _BLOCK) * _BLOCK


class GPT2Decoder:
    def __init__(self, model: GPT2LMHeadModel, max_new_tokens: int) -> None:
        self._model = model
        self._blocks = list(model.transformer.h)
        self._max_new_tokens = max_new_tokens
        config = model.config
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        by_layer = config.scale_attn_by_inverse_layer_idx
        self._scales = [scale / (layer + 1 if by_layer else 1) for layer in range(config.n_layer)]

    def prefill(self, prompt_ids: Sequence[Sequence[int]], rows_per_prompt: int) -> Tensor:
        model, config = self._model, self._model.config
        prompts = pad_prompts(prompt_ids, model.device)
        hidden, cache = encode_prompts(model, prompts)  # (b, D)
        b, g = len(prompt_ids), rows_per_prompt
        heads, width = config.n_head, config.n_embd // config.n_head
        # Keys are stored transposed, (…, d, tokens): the layout a row of scores is fastest from.
        self._prompt_keys = [layer.keys.transpose(-1, -2).contiguous() for layer in cache.layers]
        self._prompt_values = [layer.values for layer in cache.layers]  # each (b, H, P, d)
        longest = static_cache_length(self._max_new_tokens)
        new = self._prompt_keys[0].new_empty
        self._own_keys = [new(b * g, heads, width, longest).zero_() for _ in self._blocks]
        self._own_values = [new(b * g, heads, longest, width).zero_() for _ in self._blocks]
        self._own_bias = new(longest).fill_(-torch.inf)  # 0 where there is a token
        self._prompt_bias = torch.zeros_like(prompts.mask, dtype=hidden.dtype)
        self._prompt_bias.masked_fill_(~prompts.mask, -torch.inf)
        self._prompt_bias = self._prompt_bias[:, None, None]  # (b, 1, 1, P)
        self._groups, self._rows_per_prompt, self._t = b, g, 0
        self._positions = prompts.lengths.repeat_interleave(g)  # (R,)
        return model.lm_head(hidden).repeat_interleave(g, 0)

    def step(self, tokens: Tensor) -> Tensor:
        transformer = self._model.transformer
        x = transformer.wte(tokens) + transformer.wpe(self._positions)  # (R, D)
        self._own_bias[self._t] = 0.0
        self._t += 1
        for layer, block in enumerate(self._blocks):
            x = x + block.attn.c_proj(self._attend(layer, block.attn, block.ln_1(x)))
            x = x + block.mlp(block.ln_2(x))
        self._positions = self._positions + 1
        return self._model.lm_head(transformer.ln_f(x))

    def _attend(self, layer: int, attention: GPT2Attention, x: Tensor) -> Tensor:
        """Attention of each row's newest token, (R, D) to (R, D)."""
        b, g, t = self._groups, self._rows_per_prompt, self._t
        seen = static_cache_length(t)
        rows, heads = b * g, self._own_keys[0].shape[1]
        query, key, value = attention.c_attn(x).view(rows, 3, heads, -1).unbind(1)  # (R, H, d)
        own_keys, own_values = self._own_keys[layer], self._own_values[layer]
        own_keys[..., t - 1] = key
        own_values[:, :, t - 1] = value

        query = query * self._scales[layer]
        grouped = query.view(b, g, heads, -1).transpose(1, 2)  # (b, H, g, d)
        over_prompt = grouped @ self._prompt_keys[layer] + self._prompt_bias  # (b, H, g, P)
        over_prompt = over_prompt.transpose(1, 2).reshape(rows, heads, 1, -1)
        over_own = query.unsqueeze(2) @ own_keys[..., :seen] + self._own_bias[:seen]  # (R, H, 1, seen)
        weights = torch.cat([over_prompt, over_own], -1).softmax(-1)

        length = over_prompt.shape[-1]
        prompt_weights = weights[..., :length].view(b, g, heads, length).transpose(1, 2)
        mixed = (prompt_weights @ self._prompt_values[layer]).transpose(1, 2).reshape(rows, heads, -1)
        mixed = mixed + (weights[..., length:] @ own_values[:, :, :seen]).squeeze(2)  # (R, H, d)
        return mixed.reshape(rows, -1)

    def keep(self, groups: Tensor) -> None:
        within = torch.arange(self._rows_per_prompt, device=groups.device)
        rows = (groups.unsqueeze(1) * self._rows_per_prompt + within).flatten()
        for layer in range(len(self._blocks)):  # one by one: never two copies of the whole cache
            self._prompt_keys[layer] = self._prompt_keys[layer][groups]
            self._prompt_values[layer] = self._prompt_values[layer][groups]
            self._own_keys[layer] = self._own_keys[layer][rows]
            self._own_values[layer] = self._own_values[layer][rows]
        self._prompt_bias = self._prompt_bias[groups]
        self._positions = self._positions[rows]
        self._groups = len(groups)

    def skip(self, num_tokens: int) -> None:
        self._own_bias[self._t : self._t + num_tokens] = 0.0
        self._t += num_tokens
        self._positions = self._positions + num_tokens

    @property
    def cache_bytes(self) -> CacheBytes:
        prompt = sum(part.nbytes for part in (*self._prompt_keys, *self._prompt_values))
        own = sum(part.nbytes for part in (*self._own_keys, *self._own_values))
        return CacheBytes(held=prompt + own, used=prompt + own * self._t // len(self._own_bias))
