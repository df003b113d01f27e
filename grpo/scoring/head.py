"""Log-probs of given tokens, and gradients of a loss of them, without the logits of all tokens.

Logits for a batch are (rows, tokens, vocabulary), usually the largest tensor of a step. Here they exist for a
chunk of tokens at once: they are multiplied, scored and, where something is learned, turned into the gradient
in their own place, so that the vocabulary's matrix is multiplied three times and not four.

In lower precision the head is a copy, centred and, on an accelerator, padded to a multiple of 64 rows:
products of an odd vocabulary, such as GPT-2's 50,257, cannot use a card's fast kernels, as their rows begin
at odd addresses. What is done with logits number by number stands in `kernels.py`.

Left out on purpose: heads that are not a plain linear layer (soft-capped logits), and gradients of the
entropy, which is a metric here.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.errors import UserError
from grpo.model.head import CAST_ROWS, LogitRule, adds_in, centred_head, chunks, factor_dtype, multiply
from grpo.model.numerics import matmul_dtype
from grpo.scoring.kernels import are_compiled, compiled, fill_softmax, scores_of, try_kernels

LogpGradFn = Callable[[Tensor, slice], Tensor]
"""Takes log-probs (k,) of some of the K tokens, and which ones; gives the loss's derivative by each (k,)."""

HOST_TOKENS, HOST_BYTES = 2**10, 2**27
"""Tokens and bytes of a chunk on a CPU, at most."""
LAUNCHED_TOKENS, LAUNCHED_BYTES = 2**14, 2**28
"""Tokens and bytes of a chunk on an accelerator, at most; its kernels have to be worth launching."""
_MULTIPLE = 64
"""A padded vocabulary is a multiple of this: rows of products in 16 bits begin at multiples of 128 bytes."""


class LMHeadOutput(NamedTuple):
    logp: Tensor
    """(K,) in nats, fp32 or float64."""
    entropy: Tensor
    """(K,) in nats; zeros where it is not asked for."""
    hidden_gradient: Tensor | None
    """The loss's gradient by the hidden states, in their shape; None without a slope."""


@torch.no_grad()
def chunked_lm_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    rule: LogitRule = LogitRule(),  # noqa: B008
    fp32_logits: bool = False,
    entropy: bool = False,
    slope: LogpGradFn | None = None,
    chunk_tokens: int | None = None,
    device: torch.device | None = None,
) -> LMHeadOutput:
    """log softmax(rule(hidden @ weightᵀ + bias) / temperature) at `targets`, and gradients of a loss of it.

    hidden: (K, D), the states that predict `targets` (K,). weight: (V, D), bias: (V,). rule: what the model
    does to products before they are its logits.

    slope: the derivative of a loss, asked for each chunk as soon as its log-probs are there. The gradients of
    `weight` and `bias`, where they require one, are ADDED to their `.grad`; hidden's is returned, and left to
    the caller: `hidden.backward(gradient)`.

    The matrix product is taken in autocast's dtype where autocast is on, else in hidden's; from the logits on
    everything is fp32 (float64 for float64), and weight gradients are summed in it, too. fp32_logits: logits
    themselves are not rounded to that dtype; where the device has no such product, weight and states are not,
    either. A head in lower precision is centred, see `centred_head`. chunk_tokens: None: as `tokens_at_once`
    has it. device: whose memory a trace is of, if not hidden's. ValueError for arguments that do not go
    together.
    """
    if hidden.shape[:-1] != targets.shape or targets.ndim != 1:
        shapes = tuple(hidden.shape), tuple(targets.shape)
        raise UserError(f"hidden (K, D) and targets (K,) do not go together: {shapes}.")
    if not temperature > 0:
        raise UserError(f"temperature is {temperature}; log-probs need one above 0 (usual: 1.0).")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise UserError(f"chunk_tokens is {chunk_tokens}; it must be 1 or more (usual: 256 to 4096).")
    dtype, device = matmul_dtype(hidden), device or hidden.device
    exact = torch.promote_types(dtype, torch.float32)
    dtype = factor_dtype(dtype, hidden.device, fp32_logits=fp32_logits)
    logit_dtype = exact if fp32_logits else dtype
    count = len(hidden)
    logp, entropies = hidden.new_zeros(2, count, dtype=exact)
    hidden_gradient = None if slope is None else torch.empty_like(hidden)
    learning = [] if slope is None else [p for p in (weight, bias) if p is not None and p.requires_grad]
    sums = [(parameter, _room_for_gradient(parameter, exact)) for parameter in learning]
    with torch.autocast(hidden.device.type, enabled=False):
        is_traced = device.type != hidden.device.type
        head = _Head(weight, bias, dtype, logit_dtype, temperature, rule, device, is_traced=is_traced)
        chunk_tokens = min(
            chunk_tokens or tokens_at_once(len(weight), logit_dtype, device.type), max(1, count)
        )
        room = hidden.new_empty(chunk_tokens, len(head.weight), dtype=logit_dtype)  # (k, V + padding)
        for chunk in chunks(count, chunk_tokens, hidden):
            inputs = hidden[chunk].to(dtype)  # (k, D)
            products = rule(head.multiply(inputs, room[: len(inputs)]))
            scores = head.score(products, targets[chunk], entropy=entropy)  # (k, 4)
            logp[chunk], entropies[chunk] = scores[:, 0], scores[:, 1]
            if slope is None or hidden_gradient is None:
                continue
            head.to_gradient(products, scores, targets[chunk], slope(logp[chunk], chunk))
            products = products.to(dtype)
            hidden_gradient[chunk] = (products @ head.weight).to(hidden.dtype)
            for parameter, total in sums:
                if parameter is weight:
                    _add_product(total, products[:, : len(weight)], inputs)
                else:
                    total += products[:, : len(weight)].sum(0, dtype=exact)
    for parameter, total in sums:
        _add_gradient(parameter, total)
    return LMHeadOutput(logp, entropies, hidden_gradient)


# ------------------------------------------------------------------------------------ what a chunk takes


def tokens_at_once(vocabulary: int, dtype: torch.dtype, device_type: str) -> int:
    """Tokens of a chunk, whose products in `dtype`, and what is made of them, exist at once."""
    most, num_bytes = (HOST_TOKENS, HOST_BYTES) if device_type == "cpu" else (LAUNCHED_TOKENS, LAUNCHED_BYTES)
    return max(1, min(most, num_bytes // (vocabulary * logit_bytes(dtype, device_type))))


def logit_bytes(dtype: torch.dtype, device_type: str, *, entropy: bool = True) -> int:
    """Returns the bytes of one logit of a chunk: its product, and without compiled kernels one or two numbers
    made of it."""
    made = 0 if are_compiled(device_type, dtype) else 1 + entropy
    return dtype.itemsize + made * max(4, dtype.itemsize)


def vocabulary_padding(vocabulary: int, dtype: torch.dtype, device_type: str) -> int:
    """Rows of zeros that a head gets where it is copied in any case: in lower precision."""
    return -vocabulary % _MULTIPLE if dtype.itemsize < 4 and device_type != "cpu" else 0


class _Head:
    """The vocabulary's matrix in the dtype of its products, and what is done with these."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        logit_dtype: torch.dtype,
        temperature: float,
        rule: LogitRule,
        device: torch.device,
        *,
        is_traced: bool,
    ) -> None:
        """device: that it runs on, or whose memory is traced."""
        self._vocabulary, self._temperature, self._rule = len(weight), temperature, rule
        padding = vocabulary_padding(len(weight), dtype, device.type)
        cast = partial(centred_head, rule=rule) if dtype.itemsize < 4 else Tensor.to
        self.weight = _padded(cast(weight, dtype), padding)  # (V + padding, D)
        self._bias = None if bias is None else _padded(cast(bias, dtype), padding)
        self._is_traced = is_traced
        if not is_traced:
            try_kernels(device, logit_dtype)
        self._is_compiled = are_compiled(device.type, logit_dtype)

    def multiply(self, states: Tensor, products: Tensor) -> Tensor:
        """states (k, D) @ weightᵀ + bias, written to products (k, V + padding), 0 in the padding."""
        return multiply(states, self.weight, self._bias, products)

    def score(self, products: Tensor, targets: Tensor, *, entropy: bool) -> Tensor:
        """Log-prob, entropy or 0, largest logit and log-sum of each token: (k, 4)."""
        if self._is_compiled and self._is_traced:  # which takes nothing but its results
            exact = torch.promote_types(products.dtype, torch.float32)
            return products.new_empty(len(products), 4, dtype=exact)
        score = compiled(scores_of, len(products)) if self._is_compiled else scores_of
        scores: Tensor = score(products[:, : self._vocabulary], targets, self._temperature, entropy)
        return scores

    def to_gradient(self, products: Tensor, scores: Tensor, targets: Tensor, slope: Tensor) -> None:
        """slope (k,) times (one-hot(targets) - softmax) times the rule's, by the products, in their place."""
        slope = slope.to(scores.dtype).unsqueeze(1) / self._temperature  # (k, 1)
        of_rule = self._rule.slope(products)
        if not (self._is_compiled and self._is_traced):
            fill = compiled(fill_softmax, len(products)) if self._is_compiled else fill_softmax
            fill(products[:, : self._vocabulary], scores[:, 2:], slope, self._temperature)
        of_targets = slope * -torch.expm1(scores[:, :1])
        products.scatter_(1, targets.unsqueeze(1), of_targets.to(products.dtype))
        if self._rule != LogitRule():
            products.mul_(of_rule)


def _padded(values: Tensor, padding: int) -> Tensor:
    """With so many rows of zeros behind."""
    return torch.cat([values, values.new_zeros(padding, *values.shape[1:])]) if padding else values


# --------------------------------------------------------------------------- sums of weight gradients


def _room_for_gradient(parameter: Tensor, exact: torch.dtype) -> Tensor:
    """Returns the tensor that its gradient is summed in: its `.grad`, if there is one that is exact
    enough."""
    if parameter.grad is not None and parameter.grad.dtype == exact:
        return parameter.grad
    return torch.zeros_like(parameter, dtype=exact)


def _add_gradient(parameter: Tensor, total: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = total.to(parameter.dtype)
    elif parameter.grad is not total:
        parameter.grad += total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (M, N) += leftᵀ @ right, for left (T, M) and right (T, N); they may be less exact than it."""
    if total.dtype == right.dtype:
        total.addmm_(left.T, right)
        return
    if adds_in(total.dtype, right.dtype, total.device):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        return
    for rows in chunks(len(total), CAST_ROWS, total):
        total[rows] += left[:, rows].T @ right
