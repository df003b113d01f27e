"""Log-probs of given tokens without the logits tensor: the vocabulary head, a chunk of tokens at a time.

Logits for a batch are (rows, tokens, vocabulary), usually the largest tensor of a step. Here they
exist for `chunk_tokens` tokens at once, in the forward pass and, recomputed, in the backward pass. What
is done with them number by number is done in fp32 for a slice of the chunk at a time, which on a CPU stays
in its caches. Beyond inputs and gradients there are, shared by all chunks, one (chunk_tokens, V) buffer in
the dtype of products and two slices; two numbers per token; and, where the head is computed in another
dtype than it is stored in or in lower precision, one (V, D) copy.

Left out on purpose: heads that are not a plain linear layer (soft-capped logits), and gradients
of the entropy, which is a metric here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo.model.cpu import slices
from grpo.model.head import centred_head
from grpo.model.stand_ins import product_dtype
from grpo.scoring import fused


def completion_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scored: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden @ weightᵀ + bias) / temperature) at `targets`, and the entropy, in nats.

    hidden: (R, C, D), the states that predict `targets` (R, C). weight: (V, D), bias: (V,). scored: (K,)
    places among the R·C tokens, None: all, so that shapes are known beforehand and fake tensors can trace
    it; elsewhere nothing is computed or read, and the results are 0. Returns (R, C) log-probs with
    gradients to hidden, weight and bias, and (R, C) detached entropies or None.

    The matrix product is taken in autocast's dtype where autocast is on, else in hidden's; from
    the logits on everything is fp32 (float64 for float64), weight gradients are summed in it too:
    where the weight has one already (`.grad`), in that, and autograd is given none.
    A head in lower precision is centred, see `centred_head`.
    """
    if hidden.shape[:-1] != targets.shape or (scored is not None and scored.ndim != 1):
        shapes = [tuple(t.shape) for t in (hidden, targets, scored) if t is not None]
        raise ValueError(f"hidden (R, C, D), targets (R, C) and scored (K,) do not go together: {shapes}.")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0 (usual: 1.0).")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be 1 or more (usual: 256 to 4096).")
    flat = hidden.reshape(-1, hidden.shape[-1])  # (R·C, D)
    options = (temperature, chunk_tokens, entropy, product_dtype(hidden))
    inputs = (flat, weight, bias, targets.reshape(-1), scored)
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    logp, entropies = apply(*inputs, *options)  # keeps nothing where nothing needs a gradient
    return logp.reshape(targets.shape), entropies.reshape(targets.shape) if entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: Tensor | None,
        temperature: float,
        chunk_tokens: int,
        entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all tokens (R·C,); of `rows` kept: largest logit and log-sum (K, 2)."""
        exact = torch.promote_types(dtype, torch.float32)
        count = len(hidden) if rows is None else len(rows)
        scores = hidden.new_empty(count, 4, dtype=exact)
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(weight, bias, dtype, temperature, min(chunk_tokens, count))
            for chunk in slices.slices(count, chunk_tokens):
                part = chunk if rows is None else rows[chunk]
                head.score(hidden[part].to(dtype), targets[part], scores[chunk], entropy=entropy)
        logp, entropies = hidden.new_zeros(2, len(hidden), dtype=exact)
        everywhere = slice(None) if rows is None else rows
        logp[everywhere], entropies[everywhere] = scores[:, 0], scores[:, 1]
        ctx.save_for_backward(hidden, weight, bias, targets, rows, scores[:, 2:].clone())
        ctx.options = (temperature, chunk_tokens, dtype)
        ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, rows, normalizers = ctx.saved_tensors
        temperature, chunk_tokens, dtype = ctx.options
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        exact = normalizers.dtype
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight, has_one = None, weight.is_leaf and weight.grad is not None and weight.grad.dtype == exact
        if wants_weight:
            grad_weight = weight.grad if has_one else torch.zeros_like(weight, dtype=exact)
        grad_bias = torch.zeros_like(bias, dtype=exact) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(weight, bias, dtype, temperature, min(chunk_tokens, len(normalizers)))
            for chunk in slices.slices(len(normalizers), chunk_tokens):
                part = chunk if rows is None else rows[chunk]
                states = hidden[part].to(dtype)  # (K, D)
                slope = grad_logp[part].to(exact).unsqueeze(1) / temperature  # (K, 1)
                grad = head.gradient(states, normalizers[chunk], targets[part], slope, of_bias=grad_bias)
                if grad_hidden is not None:
                    grad_hidden[part] = (grad @ head.weight).to(hidden.dtype)
                if grad_weight is not None:
                    slices.add_product(grad_weight, grad, states)
        return (
            grad_hidden,
            None if grad_weight is None or has_one else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


class _Head:
    """The vocabulary head in the dtype of its products, a chunk's products, and slices of them as logits.

    All chunks share their tensors: on a CPU fresh pages would take longer than what is written on them.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, temperature: float, tokens: int
    ) -> None:
        """tokens: of a chunk, at most."""
        cast = centred_head if dtype.itemsize < 4 else Tensor.to
        self.weight = cast(weight, dtype)  # (V, D)
        self._bias = None if bias is None else cast(bias, dtype)  # (V,)
        self._temperature = temperature
        self._products = weight.new_empty(tokens, len(weight), dtype=dtype)
        self._room: Tensor | None = None
        self._is_fused = fused.is_fused(weight.device, dtype)
        self._slice_tokens = min(tokens, max(1, slices.slice_numbers(weight.device) // len(weight)))
        self._logits = None if dtype.itemsize >= 4 or self._is_fused else self._new_slice()

    def score(self, states: Tensor, targets: Tensor, scores: Tensor, *, entropy: bool) -> None:
        """Write log-prob, entropy (or 0), largest logit and log-sum of states (K, D) to scores (K, 4)."""
        products = self._multiply(states)
        if self._is_fused:
            scores.copy_(fused.scores(products, targets, self._temperature, entropy))
            return
        if self._room is None:
            self._room = self._new_slice()
        for place, logits in self._slices(products):
            scores[place] = _score(logits, self._room[: len(logits)], targets[place], entropy)

    def gradient(
        self, states: Tensor, normalizers: Tensor, targets: Tensor, slope: Tensor, *, of_bias: Tensor | None
    ) -> Tensor:
        """slope (K, 1) times the logits' slope, (K, V), until the next; what it comes to is added to of_bias.

        normalizers: largest logits and log-sums (K, 2).
        """
        grad = self._multiply(states)  # the logits, which are there first
        if self._is_fused:
            fused.to_gradient(grad, normalizers, targets, slope, self._temperature)
            if of_bias is not None:
                of_bias += grad.sum(dim=0, dtype=of_bias.dtype)
            return grad
        for place, logits in self._slices(grad):
            _logits_gradient(logits, normalizers[place], targets[place], slope[place])
            if of_bias is not None:
                of_bias += logits.sum(dim=0)
            if logits.dtype != grad.dtype:
                grad[place] = logits
        return grad

    def _new_slice(self) -> Tensor:
        """Room for a slice (k, V) in fp32, or float64."""
        exact = torch.promote_types(self._products.dtype, torch.float32)
        return self._products.new_empty(self._slice_tokens, len(self.weight), dtype=exact)

    def _multiply(self, states: Tensor) -> Tensor:
        """states (K, D) @ weightᵀ + bias: (K, V), until the next ones."""
        products = self._products[: len(states)]
        if self._bias is None:
            return torch.mm(states, self.weight.T, out=products)
        return torch.addmm(self._bias, states, self.weight.T, out=products)

    def _slices(self, products: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Places in the chunk, and their logits (k, V) in fp32 or float64, to be overwritten.

        They are the products themselves where those are as exact.
        """
        for place in slices.slices(len(products), self._slice_tokens):
            logits = products[place]
            if self._logits is not None:
                logits = self._logits[: len(logits)].copy_(logits)
            yield place, logits if self._temperature == 1 else logits.div_(self._temperature)


def _score(logits: Tensor, room: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    """Log-prob, entropy (or 0), largest logit and log-sum of each token: (k, 4).

    Overwrites `logits` (k, V) and `room` (k, V).
    """
    # Shifted by the largest, as log_softmax does: GPT-2's logits lie near -100, where fp32 is coarse.
    largest = logits.amax(dim=1, keepdim=True)
    probs = torch.exp(logits.sub_(largest), out=room)
    total = probs.sum(dim=1, keepdim=True)
    log_total = total.log()
    logp = logits.gather(1, targets.unsqueeze(1)) - log_total
    entropies = torch.zeros_like(logp)
    if entropy:  # a token that cannot occur (logit -inf) adds 0, not 0 * -inf
        lowest = torch.finfo(logits.dtype).min
        entropies = log_total - probs.mul_(logits.clamp_(min=lowest)).sum(dim=1, keepdim=True) / total
    return torch.cat([logp, entropies, largest, log_total], dim=1)


def _logits_gradient(logits: Tensor, normalizers: Tensor, targets: Tensor, slope: Tensor) -> None:
    """slope * (one-hot(targets) - softmax(logits)), (k, V), in place of `logits`."""
    largest, log_total = normalizers[:, :1], normalizers[:, 1:]
    probs = logits.sub_(largest).sub_(log_total).exp_()
    probs.mul_(-slope).scatter_add_(1, targets.unsqueeze(1), slope)
